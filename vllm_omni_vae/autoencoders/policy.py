# SPDX-License-Identifier: Apache-2.0
"""Which strategy a request gets: a function of shapes and configuration alone, equal on every rank."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from typing import Any

from ..config import VaeParallelMode, VaeTileMerge, splits
from ..geometry import Partition, RankGrid, TileGrid, deal
from .spec import Operation


class Strategy(StrEnum):
    """What really runs."""

    DIRECT = "direct"
    TILE = "tile"
    RANK_SPLIT = splits.RANK_SPLIT
    SPATIAL_SHARD_HEIGHT = "spatial_shard_height"
    SPATIAL_SHARD_WIDTH = "spatial_shard_width"
    SPATIAL_SHARD_GRID = "spatial_shard_grid"


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """The strategy chosen for one encode or decode, and why.

    Attributes:
        operation: Encode or decode.
        strategy: What runs.
        reason: Why, in words.
        fallback: A forced mode could not be had, for the reason given.
        grid: Tiles along time, height and width, or pieces of a rank split; all 1 unless either runs.
        tiles_per_rank: Tiles, or pieces, that each VAE rank runs; empty unless either runs.
        imbalance: Load of the busiest rank over the mean.
        coverage: Input volume of all tiles or pieces over that of the whole; above 1 is redundant work.
        rank_grid: Rows and columns of ranks that one feature map is spread over.
        chunk: Latent frames that a sharded network takes at a time after the first.
        peak_bytes: Bytes of tensors, weights aside, that will exist at one time on the rank that holds most; None where
            they were not forecast: for tiles, and for what fits in any case.
        sent_bytes: Bytes that the rank which sends most will send; likewise. Of tiles that are summed, bytes of the sum
            that every rank brings to the reduction.
        merge: How tiles become one result.
        margin: Latent rows and columns of context on the inner edges of a piece of a rank split; None for all others.
        owners: Rank that makes each part of the result, row by row, time outermost; empty where it is not divided.
        edges: Along time, height and width where each part begins and the last one ends: of tiles what is kept, in
            units of the result; of a shard in latents.
    """

    operation: Operation
    strategy: Strategy
    reason: str
    fallback: bool = False
    grid: tuple[int, int, int] = (1, 1, 1)
    tiles_per_rank: tuple[int, ...] = ()
    imbalance: float = 1.0
    coverage: float = 1.0
    rank_grid: tuple[int, int] = (1, 1)
    chunk: int = 1
    peak_bytes: int | None = None
    sent_bytes: int | None = None
    merge: VaeTileMerge = VaeTileMerge.BLEND
    margin: int | None = None
    # Two requests that differ in nothing else are one decision: it is logged and reported once.
    owners: tuple[int, ...] = dataclasses.field(default=(), compare=False)
    edges: tuple[tuple[int, ...], ...] = dataclasses.field(default=(), compare=False)

    @property
    def sharded(self) -> bool:
        """Whether one feature map is spread over the ranks."""
        return self.rank_grid != (1, 1)

    @property
    def idle_ranks(self) -> tuple[int, ...]:
        """VAE ranks that have no tile or piece."""
        return tuple(rank for rank, tiles in enumerate(self.tiles_per_rank) if not tiles)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready values of every field."""
        plain = {name: getattr(self, name).value for name in ("operation", "strategy", "merge")}
        return dataclasses.asdict(self) | plain

    def __str__(self) -> str:
        if self.strategy is Strategy.DIRECT:
            return f"{self.operation}: direct ({self.reason})"
        if self.sharded:
            ranks = "x".join(map(str, self.rank_grid))
            frames = f"{self.chunk} latent frames at a time, " if self.chunk > 1 else ""
            known = "" if self.peak_bytes is None else f"peak {gib(self.peak_bytes)} a rank, "
            return (
                f"{self.operation}: {self.strategy} on {ranks} ranks (height x width), {frames}{known}"
                f"imbalance {self.imbalance:.2f} ({self.reason})"
            )
        grid = "x".join(map(str, self.grid))
        if self.margin is not None:
            return (
                f"{self.operation}: {self.strategy} {grid} (time x height x width), margin {self.margin}, pieces per "
                f"rank {list(self.tiles_per_rank)}, imbalance {self.imbalance:.2f}, coverage {self.coverage:.2f}, "
                f"approximate: near the un-tiled result ({self.reason})"
            )
        summed = ""
        if self.merge is VaeTileMerge.SUM:
            summed = f"summed over the ranks with {(self.sent_bytes or 0) / 1e6:.1f} MB from each, "
        return (
            f"{self.operation}: {self.strategy} {grid} (time x height x width), tiles per rank "
            f"{list(self.tiles_per_rank)}, {summed}imbalance {self.imbalance:.2f}, coverage {self.coverage:.2f} "
            f"({self.reason})"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Pieces:
    """What a rank split would run for one request in the place of tiles.

    Attributes:
        margin: Latent rows and columns of context on inner edges.
        grid: One piece for each rank; None where the request is too small.
        refusal: Why there is none.
    """

    margin: int
    grid: TileGrid | None
    refusal: str = ""


def gib(count: int) -> str:
    """``count`` bytes in words."""
    return f"{count / 2**30:.1f} GiB"


def select_strategy(
    operation: Operation,
    mode: VaeParallelMode,
    tiles: TileGrid | None,
    ranks: int,
    latents: tuple[int, int] = (0, 0),
    can_shard: bool = False,
    untiled: str = "not larger than one tile",
    chunked: bool = True,
    refusal: str = "",
    thinnest: tuple[int, int] = (1, 1),
    pieces: Pieces | None = None,
) -> Decision:
    """Choose for one request.

    Args:
        operation: Encode or decode.
        mode: What the configuration asks for; the family has accepted it.
        tiles: The request's tiles, or None where diffusers would not tile it.
        ranks: Ranks that share the work.
        latents: Latent rows and columns of the request.
        can_shard: Whether the family can spread one feature map over ranks.
        untiled: Why there are no tiles, where there are none.
        chunked: Whether the family's networks take a clip a few latent frames at a time.
        refusal: Why `auto` may not take a shard, if it may not.
        thinnest: Latent rows and columns that each rank must have of an axis that is cut.
        pieces: What takes the place of tiles, where this operation is split by rank.
    """
    if tiles is None:
        return Decision(operation, Strategy.DIRECT, untiled)
    if mode is VaeParallelMode.TILE:
        return _cut(operation, tiles, pieces, ranks, "as configured")
    if mode is VaeParallelMode.AUTO and (refusal or not can_shard):
        reason = f"auto: {refusal if can_shard else 'tile is what this family can run'}"
        return _cut(operation, tiles, pieces, ranks, reason)
    chunked = chunked and tiles.extents[0] > 1
    shard, reason = _try_shard(operation, mode, ranks, latents, chunked, thinnest)
    return shard or _cut(operation, tiles, pieces, ranks, reason, fallback=mode is not VaeParallelMode.AUTO)


def select_untiled(operation: Operation, mode: VaeParallelMode, ranks: int, latents: tuple[int, int]) -> Decision:
    """Choose for one request of a family that has no tiles.

    Args:
        operation, mode, ranks, latents: As for `select_strategy`.
    """
    shard, reason = _try_shard(operation, mode, ranks, latents, chunked=False)
    return shard or Decision(operation, Strategy.DIRECT, reason, fallback=mode is not VaeParallelMode.AUTO)


def _try_shard(
    operation: Operation,
    mode: VaeParallelMode,
    ranks: int,
    latents: tuple[int, int],
    chunked: bool,
    thinnest: tuple[int, int] = (1, 1),
) -> tuple[Decision | None, str]:
    """The shard that ``mode`` takes, and why it or none."""
    if mode is VaeParallelMode.AUTO:
        grid, reason, forced = _best_grid(ranks, latents, thinnest), "auto: no redundant work", None
    else:
        grid, reason, forced = _forced_grid(mode, ranks, latents, thinnest), "as configured", mode
    if grid is None:
        piece = "a row or column" if thinnest == (1, 1) else f"{thinnest[0]} rows or {thinnest[1]} columns"
        return None, f"{mode}: {latents[0]}x{latents[1]} latents cannot give each of {ranks} ranks {piece}"
    return _shard(operation, grid, latents, chunked, reason, forced), reason


def _cut(
    operation: Operation, tiles: TileGrid, pieces: Pieces | None, ranks: int, reason: str, fallback: bool = False
) -> Decision:
    """Pieces where there are any, else tiles."""
    if pieces is None:
        return _tile(operation, tiles, ranks, reason, fallback)
    if pieces.grid is None:
        return _tile(operation, tiles, ranks, f"split by rank: {pieces.refusal}; {reason}", fallback=True)
    taken = _tile(operation, pieces.grid, ranks, reason, fallback)
    return dataclasses.replace(taken, strategy=Strategy.RANK_SPLIT, margin=pieces.margin)


def _tile(operation: Operation, tiles: TileGrid, ranks: int, reason: str, fallback: bool = False) -> Decision:
    assignment = deal([tiles.workload(coord) for coord in tiles.coords()], ranks)
    return Decision(
        operation,
        Strategy.TILE,
        reason,
        fallback,
        tiles.shape,
        tuple(assignment.owners.count(rank) for rank in range(ranks)),
        round(assignment.imbalance, 4),
        round(tiles.coverage, 4),
        owners=assignment.owners,
        edges=tuple((*(window.out_start for window in axis), axis[-1].out_stop) for axis in tiles.windows),
    )


def _shard(
    operation: Operation,
    grid: RankGrid,
    latents: tuple[int, int],
    chunked: bool,
    reason: str,
    mode: VaeParallelMode | None = None,
) -> Decision:
    height, width = -(-latents[0] // grid.rows), -(-latents[1] // grid.cols)
    if mode is None:
        mode = VaeParallelMode.SPATIAL_SHARD_GRID
        if grid.rows == 1:
            mode = VaeParallelMode.SPATIAL_SHARD_WIDTH
        elif grid.cols == 1:
            mode = VaeParallelMode.SPATIAL_SHARD_HEIGHT
    return Decision(
        operation,
        Strategy(mode.value),
        reason,
        imbalance=round(height * width * grid.size / (latents[0] * latents[1]), 4),
        rank_grid=(grid.rows, grid.cols),
        chunk=_chunk(height * width, grid.size) if chunked else 1,
        owners=tuple(range(grid.size)),
        edges=((0, 1), *(_edges(extent, parts) for extent, parts in zip(latents, (grid.rows, grid.cols), strict=True))),
    )


def _edges(extent: int, parts: int) -> tuple[int, ...]:
    return (*Partition(extent, parts).starts, extent)


_ENOUGH_POSITIONS = 128


def _chunk(positions: int, ranks: int) -> int:
    """Latent frames at a time: small shards need several, or convolutions cost more for each position.

    What a network holds grows by half of itself with every further frame at a time, so that on ``ranks`` ranks only
    fewer than twice as many stay below what one rank holds of the whole.
    """
    wanted = next((k for k in (1, 2) if positions * k >= _ENOUGH_POSITIONS), 4)
    return wanted if wanted < 2 * ranks else 2


def _forced_grid(
    mode: VaeParallelMode, ranks: int, latents: tuple[int, int], thinnest: tuple[int, int]
) -> RankGrid | None:
    if mode is VaeParallelMode.SPATIAL_SHARD_HEIGHT:
        return _fit(RankGrid(ranks, 1), latents, thinnest)
    if mode is VaeParallelMode.SPATIAL_SHARD_WIDTH:
        return _fit(RankGrid(1, ranks), latents, thinnest)
    return next((grid for grid in RankGrid.of_size(ranks) if _fit(grid, latents, thinnest)), None)


def _fit(grid: RankGrid, latents: tuple[int, int], thinnest: tuple[int, int]) -> RankGrid | None:
    cuts = zip((grid.rows, grid.cols), latents, thinnest, strict=True)
    return grid if all(parts == 1 or extent // parts >= least for parts, extent, least in cuts) else None


def _best_grid(ranks: int, latents: tuple[int, int], thinnest: tuple[int, int]) -> RankGrid | None:
    """The longer axis that can serve every rank, width on a tie; from 4 ranks on a grid if it has shorter seams."""
    height, width = latents
    lines = [RankGrid(1, ranks), RankGrid(ranks, 1)] if width >= height else [RankGrid(ranks, 1), RankGrid(1, ranks)]
    line = next((grid for grid in lines if _fit(grid, latents, thinnest)), None)
    square = _forced_grid(VaeParallelMode.SPATIAL_SHARD_GRID, ranks, latents, thinnest) if ranks >= 4 else None
    if line is None or square is None:
        return line or square
    return square if _seams(square, latents) < _seams(line, latents) else line


def _seams(grid: RankGrid, latents: tuple[int, int]) -> int:
    """Latents along all interior edges; halo bytes grow with it."""
    return (grid.rows - 1) * latents[1] + (grid.cols - 1) * latents[0]
