# SPDX-License-Identifier: Apache-2.0
"""Carry out one shared call as it was decided, and once more in tiles where a rank has no memory for that."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ..config import VaeParallelMode
from ..distributed import asked_for, give_back
from ..errors import GeometryError, RankMemoryError, UnsupportedError
from ..tiling import without_margins
from .arguments import call_facts
from .policy import Decision, Strategy
from .sharded import run_sharded
from .spec import CallOptions, Operation
from .state import ParallelState


def run_shared(
    vae: Any, state: ParallelState, operation: Operation, x: torch.Tensor, arguments: Mapping[str, Any]
) -> torch.Tensor | None:
    """Collective over the working ranks, and over all calling ranks where the result is theirs.

    A rank that runs out of memory in anything but tiles makes all ranks run the call once more in tiles, from the same
    input. That is a decision of its own, a fallback whose reason names the rank. Not so where the network draws random
    numbers, which would be others the second time.

    Args:
        vae, state: The distributed autoencoder, and how it shares its work.
        operation: What runs.
        x: The whole input as the tiled function sees it; where a rendezvous is set, its leader's counts.
        arguments: Further arguments of the tiled function, by name.

    Returns:
        The whole result on its owner, and everywhere where it is for all; else None.

    Raises:
        RankError, Cancelled: a rank failed or was told to stop; `RankMemoryError` if it was memory that it had not.
        DisagreementError: ranks came with different inputs.
    """
    if state.rendezvous:
        x, arguments = state.rendezvous.announce(operation, x, arguments)
    decision = vae.decide(state, operation, vae.spec.extents(x.shape), x.shape[0])
    try:
        return _run(vae, state, decision, x, arguments)
    except RankMemoryError as error:
        retry = _in_tiles(vae, state, decision, x, error)
        if retry is None:
            raise
    # The error is gone here, and with it what its traceback held.
    state.note(retry)
    vae.spec.reset(vae)
    give_back(x.device)
    return _run(vae, state, retry, x, arguments)


def out_of_memory_in(decision: Decision, rank: int | None, reason: str) -> str:
    """Why ``decision`` could not be had: which rank has no memory for it, and what it was asked for."""
    who = "the only VAE rank" if rank is None else f"rank {rank}"
    asked = asked_for(reason)
    return f"{decision.strategy}: {who} ran out of memory" + (f", asked for {asked} more" if asked else "")


def _in_tiles(
    vae: Any, state: ParallelState, decision: Decision, x: torch.Tensor, error: RankMemoryError
) -> Decision | None:
    """The decision to run a call once more, or None where that cannot help; the same on every rank."""
    operation = decision.operation
    if decision.strategy is Strategy.TILE or not state.retry_in_tiles or vae.spec.draws(vae, operation):
        return None
    try:
        retry = vae.decide(state, operation, vae.spec.extents(x.shape), x.shape[0], VaeParallelMode.TILE)
    except (GeometryError, UnsupportedError):
        return None
    return dataclasses.replace(retry, fallback=True, reason=out_of_memory_in(decision, error.rank, error.reason))


def _run(
    vae: Any, state: ParallelState, decision: Decision, x: torch.Tensor, arguments: Mapping[str, Any]
) -> torch.Tensor | None:
    operation = decision.operation
    broadcast = operation is Operation.ENCODE or state.broadcast_decode
    draws = vae.spec.draws(vae, operation) and arguments.get("generator") is None
    facts = call_facts(operation.value, vae.dtype, (), arguments, x.device if draws else None)
    if decision.sharded:
        options = CallOptions(decision.chunk, state.between, arguments)
        return run_sharded(
            state.groups, vae.spec, vae, operation, x, decision, broadcast=broadcast, facts=facts, options=options
        )
    given = dict(arguments)
    if decision.margin is not None:
        given["between"] = state.observe
    with vae.operator(operation, x, given) as operator:
        operator = dataclasses.replace(operator, merging=decision.merge)
        if decision.margin is not None:
            pieces = vae.spec.pieces(vae, operation, vae.spec.extents(x.shape), state.pieces, decision.margin)
            split, run = partial(vae.cut, operation=operation, grid=pieces), without_margins(operator.exec, pieces)
            operator = dataclasses.replace(operator, split=split, exec=run)
        return state.executor.execute(x, operator, broadcast_result=broadcast, facts=lambda: facts)
