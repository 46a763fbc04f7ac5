# SPDX-License-Identifier: Apache-2.0
"""Which strategy a request gets: a function of shapes and configuration alone, equal on every rank."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from typing import Any

from ..config import VaeParallelMode
from ..geometry import TileGrid, deal
from .spec import Operation


class Strategy(StrEnum):
    """What really runs."""

    DIRECT = "direct"
    TILE = "tile"


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """The strategy chosen for one encode or decode, and why.

    Attributes:
        operation: Encode or decode.
        strategy: What runs.
        reason: Why, in words.
        grid: Tiles along time, height and width; all 1 when direct.
        tiles_per_rank: Tiles that each VAE rank runs.
        imbalance: Load of the busiest rank over the mean.
        coverage: Input volume of all tiles over that of the whole; above 1 is redundant work.
    """

    operation: Operation
    strategy: Strategy
    reason: str
    grid: tuple[int, int, int] = (1, 1, 1)
    tiles_per_rank: tuple[int, ...] = ()
    imbalance: float = 1.0
    coverage: float = 1.0

    @property
    def idle_ranks(self) -> tuple[int, ...]:
        """VAE ranks that have nothing to do."""
        return tuple(rank for rank, tiles in enumerate(self.tiles_per_rank) if not tiles)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready values of every field."""
        return dataclasses.asdict(self) | {"operation": self.operation.value, "strategy": self.strategy.value}

    def __str__(self) -> str:
        if self.strategy is Strategy.DIRECT:
            return f"{self.operation}: direct ({self.reason})"
        grid = "x".join(map(str, self.grid))
        return (
            f"{self.operation}: {self.strategy} {grid} (time x height x width), tiles per rank "
            f"{list(self.tiles_per_rank)}, imbalance {self.imbalance:.2f}, coverage {self.coverage:.2f} ({self.reason})"
        )


def select_strategy(operation: Operation, mode: VaeParallelMode, grid: TileGrid | None, ranks: int) -> Decision:
    """Choose for one request.

    Args:
        operation: Encode or decode.
        mode: What the configuration asks for; the family has accepted it.
        grid: The request's tiles, or None where diffusers would not tile it.
        ranks: Ranks that share the work.
    """
    if grid is None:
        return Decision(operation, Strategy.DIRECT, "not larger than one tile")
    assignment = deal([grid.workload(coord) for coord in grid.coords()], ranks)
    reason = "as configured" if mode is VaeParallelMode.TILE else "auto: tile is what this family can run"
    return Decision(
        operation,
        Strategy.TILE,
        reason,
        grid.shape,
        tuple(assignment.owners.count(rank) for rank in range(ranks)),
        round(assignment.imbalance, 4),
        round(grid.coverage, 4),
    )
