# SPDX-License-Identifier: Apache-2.0
"""How much memory a rank has, and how many latent frames at a time a shard may take in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from math import prod
from typing import Any

import psutil
import torch

from ..config import VaeParallelMode
from ..distributed import Communicator, StagedCommunicator, VaeGroups
from .cost import Forecaster
from .policy import Decision, gib
from .state import ParallelState
from .twin import switches, twin_of

_PER_BYTE = 1024
"""Bytes that a network holds at once for each byte of its input or output, at the very most."""


def free_bytes(device: torch.device) -> int | None:
    """Bytes that this process can still allocate on ``device``; None where nobody says."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    return psutil.virtual_memory().available if device.type == "cpu" else None


def agreed_budget(groups: VaeGroups, device: torch.device) -> int | None:
    """Collective over the domain. Bytes that every working rank has free; None unless all of them know.

    The CPU's memory is one for all ranks of a machine, and a card's for those that share it, so each counts on its
    share.
    """
    comm: Communicator = groups.domain
    free = free_bytes(device)
    shared = device.type == "cpu" or isinstance(comm, StagedCommunicator)
    mine = -1 if free is None else free // (comm.size if shared else 1)
    told = torch.tensor([mine], dtype=torch.int64, device=comm.control_device)
    everyone = comm.all_gather(told).flatten().tolist()
    least = min(everyone[rank] for rank in groups.workers)
    return None if least < 0 else least


def within_budget(
    vae: Any,
    state: ParallelState,
    budget: int,
    decision: Decision,
    seen: tuple[int, ...],
    select: Callable[[str], Decision],
) -> Decision:
    """A sharded ``decision`` with as many latent frames at a time as fit into ``budget``.

    Where not even one fits, `auto` takes what ``select`` gives with that refusal; a forced mode is taken all the same.
    Pictures that are far too small to matter are not forecast. The same on every rank.

    Args:
        vae, state: The distributed autoencoder, and how it shares its work.
        budget: Bytes; `ParallelState.budget`.
        decision: Without regard to memory.
        seen: Shape of what the tiled function sees of one network call.
        select: The decision with a reason why `auto` may not take a shard.
    """
    made = vae.spec.whole_shape(vae, decision.operation, seen)
    if max(prod(seen), prod(made)) * vae.dtype.itemsize * _PER_BYTE <= budget:
        return decision
    shape = vae.spec.public_shape(vae, decision.operation, seen)
    key = (decision, shape, vae.dtype, tuple(sorted(switches(vae).items())))
    return state.remember(key, lambda: _fit(vae, shape, state, decision, budget, select))


def _fit(
    vae: Any,
    shape: tuple[int, ...],
    state: ParallelState,
    decision: Decision,
    budget: int,
    select: Callable[[str], Decision],
) -> Decision:
    twin, mode, chunk = twin_of(vae), VaeParallelMode(decision.strategy.value), decision.chunk
    while True:
        forecast = Forecaster(twin, decision.operation, shape, chunk).forecast(mode, state.size)
        sent = max(use.bytes for use in forecast.uses)
        fitted = dataclasses.replace(decision, chunk=chunk, peak_bytes=forecast.peak_bytes, sent_bytes=sent)
        if forecast.peak_bytes <= budget:
            return fitted
        if chunk == 1:
            break
        chunk //= 2
    reason = f"a shard would take {gib(forecast.peak_bytes)} of the {gib(budget)} that are free on a rank"
    if state.mode is VaeParallelMode.AUTO:
        return select(reason)
    return dataclasses.replace(fitted, reason=f"{fitted.reason}, though {reason}")
