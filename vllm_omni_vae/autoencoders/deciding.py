# SPDX-License-Identifier: Apache-2.0
"""The strategy for one call of one distributed autoencoder: `select_strategy` with what its family and state say."""

from __future__ import annotations

import dataclasses
from math import prod
from typing import Any

from ..config import IN_TILES, VaeParallelMode, VaeTileMerge
from ..errors import GeometryError
from .memory import within_budget
from .policy import Decision, Pieces, Strategy, select_strategy
from .spec import FamilySpec, Operation
from .state import ParallelState


def decide(
    vae: Any,
    state: ParallelState,
    operation: Operation,
    seen: tuple[int, int, int] | None,
    batch: int,
    mode: VaeParallelMode | None,
) -> Decision:
    """The strategy for one call. Not collective; arguments as for `DistributedVaeMixin.decide`."""
    spec: FamilySpec = vae.spec
    splits, mode = (state.splits, state.mode) if mode is None else (IN_TILES, mode)
    if seen is None:
        untiled = "not larger than one tile" if vae.use_tiling else "tiling is switched off"
        return select_strategy(operation, mode, None, state.size, untiled=untiled)
    tiles = spec.grid(vae, operation, seen)
    pieces = _pieces(vae, operation, seen, state.pieces, splits.margin(operation))

    def select(refusal: str = "") -> Decision:
        return select_strategy(
            operation,
            mode,
            tiles,
            state.size,
            latents=spec.latents(vae, operation, seen[1:]),
            can_shard=VaeParallelMode.SPATIAL_SHARD_GRID in spec.modes,
            chunked=spec.chunked,
            refusal=refusal,
            thinnest=spec.least_latents(vae, operation)[1:],
            pieces=pieces,
        )

    decision = select()
    if not decision.sharded:
        return _with_merge(vae, state, decision, seen, batch)
    if state.chunk is not None:
        return dataclasses.replace(decision, chunk=state.chunk)
    if state.budget is None:
        return decision
    shape = spec.seen_shape(vae, operation, seen, batch)
    return within_budget(vae, state, state.budget, decision, shape, select)


def _pieces(
    vae: Any, operation: Operation, seen: tuple[int, int, int], count: int, margin: int | None
) -> Pieces | None:
    if margin is None:
        return None
    try:
        return Pieces(margin, vae.spec.pieces(vae, operation, seen, count, margin))
    except GeometryError as error:
        return Pieces(margin, None, str(error))


def _with_merge(vae: Any, state: ParallelState, decision: Decision, seen: tuple[int, int, int], batch: int) -> Decision:
    if state.merge is VaeTileMerge.BLEND or decision.strategy is not Strategy.TILE:
        return decision
    spec, operation = vae.spec, decision.operation
    whole = spec.shape(batch, spec.channels(vae, operation), spec.grid(vae, operation, seen).out_extents)
    return dataclasses.replace(decision, merge=state.merge, sent_bytes=prod(whole) * vae.dtype.itemsize)
