# SPDX-License-Identifier: Apache-2.0
"""Run one encode or decode as a spatial shard: the same agreement and placement as the tile executor's."""

from __future__ import annotations

from typing import Any

import torch

from ..distributed import Communicator, VaeGroups, agree, agree_on, fingerprint
from ..errors import Cancelled, RankError, UnsupportedError
from ..geometry import Partition, RankGrid
from ..sharding import ShardLayout, SpatialShard
from .policy import Decision
from .spec import CallOptions, FamilySpec, Operation, output_dtype


def run_sharded(
    groups: VaeGroups,
    spec: FamilySpec,
    vae: Any,
    operation: Operation,
    x: torch.Tensor,
    decision: Decision,
    *,
    broadcast: bool,
    facts: dict[str, object],
    options: CallOptions,
) -> torch.Tensor | None:
    """Collective over the working ranks, and over all calling ranks when the result is broadcast.

    Args:
        groups: The ranks. Halos travel in `VaeGroups.halo`, agreement among all that take part.
        spec, vae, operation: What runs.
        x: The whole input as the tiled function sees it, the same on every rank.
        decision: The rank grid.
        broadcast: Whether every calling rank gets the result.
        facts: Further values that must be equal on all ranks, by name.
        options: How the networks are called. What ``between`` raises must be raised on every working rank.

    Returns:
        The whole result on the output rank, and everywhere with ``broadcast``; else None.

    Raises:
        RankError, Cancelled: a rank failed or was told to stop.
        DisagreementError: ranks came with different inputs.
    """
    comm = groups.domain if broadcast else groups.work
    if comm is None:
        return None
    known = {"shape": tuple(x.shape), "dtype": x.dtype, "decision": decision, "settings": sorted(facts.items())}
    error: Exception | None = None
    content = None
    try:
        content = fingerprint(x)
    except Exception as e:
        error = e
    agree_on(comm, known | {"content": content}, error)
    whole = spec.whole_shape(vae, operation, tuple(x.shape))
    extents = (whole[-2], whole[-1])
    piece: torch.Tensor | None = None
    shard: SpatialShard | None = None
    room: tuple[list[torch.Tensor], torch.Tensor] | None = None
    everywhere: torch.Tensor | None = None
    halo = groups.halo or groups.work
    try:
        if halo is not None and groups.work is not None:
            halo.renew()
            shard = _shard(halo, spec, vae, operation, x, decision)
            piece = _run_piece(shard, spec, vae, operation, x, options)
            shard.check(piece, extents)
            room = shard.room(piece, extents, groups.work, groups.output)
        if broadcast and room is None:
            everywhere = x.new_empty(whole, dtype=output_dtype(x))
    except Exception as e:
        error = e
        if halo is not None:
            halo.abandon()
    try:
        agree(comm, error)
    except (RankError, Cancelled):
        if groups.halo is not None:
            groups.halo.abandon()
        raise
    result: torch.Tensor | None = None
    if groups.work is not None and shard is not None and piece is not None:
        result = shard.gather(piece, extents, groups.work, groups.output, room)
    filled = everywhere if result is None else result
    if broadcast and filled is not None:
        comm.broadcast(filled, groups.workers[groups.output])
    return filled


def _shard(
    halo: Communicator, spec: FamilySpec, vae: Any, operation: Operation, x: torch.Tensor, decision: Decision
) -> SpatialShard:
    grid = RankGrid(*decision.rank_grid)
    extents, ratio = (x.shape[-2], x.shape[-1]), spec.ratio(vae, operation)
    rows, cols = spec.latents(vae, operation, extents)
    remainder = (rows * ratio, cols * ratio) != extents
    layout = ShardLayout(grid, Partition(rows, grid.rows), Partition(cols, grid.cols), halo.rank, remainder)
    return SpatialShard(halo, layout)


def _run_piece(
    shard: SpatialShard,
    spec: FamilySpec,
    vae: Any,
    operation: Operation,
    x: torch.Tensor,
    options: CallOptions,
) -> torch.Tensor:
    """Collective over the working ranks. This rank's piece of the finished result."""
    mine = shard.shard(x, spec.ratio(vae, operation))
    piece = spec.run_piece(vae, operation, shard, mine, options)
    if spec.attends(vae) and not shard.operators.attention_calls:
        raise UnsupportedError(f"{spec.name} attends over space in a way that a shard does not see")
    return piece
