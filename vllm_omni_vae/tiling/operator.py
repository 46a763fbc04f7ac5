# SPDX-License-Identifier: Apache-2.0
"""What a model gives the executor: how to split, run and merge."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch

from ..config import VaeTileMerge
from ..geometry import TileGrid


@dataclasses.dataclass(slots=True)
class TileTask:
    """One tile to run.

    Attributes:
        tile_id: Index of the task in its list.
        grid_coord: Place of the tile in the grid, (time, height, width).
        tensor: What the tile reads; a view of the input.
        workload: Cost relative to the other tasks.
        output_shape: Shape that running the tile yields, if it can be predicted; None makes the ranks tell each other.
    """

    tile_id: int
    grid_coord: tuple[int, ...]
    tensor: torch.Tensor
    workload: int = 1
    output_shape: tuple[int, ...] | None = None


@dataclasses.dataclass(slots=True)
class GridSpec:
    """The grid that the tasks form and what the merge yields.

    Attributes:
        grid: Windows of the tiles and their outputs.
        output_dtype: Type of each tile's output and of the merged result.
        output_shape: Shape of the merged result, if it can be predicted; None makes the output rank tell the others
            when it is broadcast.
    """

    grid: TileGrid
    output_dtype: torch.dtype
    output_shape: tuple[int, ...] | None = None

    @property
    def grid_shape(self) -> tuple[int, int, int]:
        """Tiles along time, height and width."""
        return self.grid.shape

    @property
    def split_dims(self) -> tuple[int, ...]:
        """Tensor dims that are cut, counted from the last."""
        return tuple(dim for dim, count in zip((-3, -2, -1), self.grid.shape, strict=True) if count > 1)


def as_it_is(whole: torch.Tensor, spec: GridSpec) -> torch.Tensor:
    """Finish nothing."""
    return whole


@dataclasses.dataclass(frozen=True, slots=True)
class DistributedOperator:
    """The functions of one tiled operation. Each runs without communication.

    Attributes:
        split: Input to tasks and their grid; every rank calls it and must get the same.
        exec: Runs one task; called on the rank that owns it.
        merge: Outputs by grid coordinate to the result; called on the output rank only. It may overwrite the outputs.
        merging: How the tiles become one: by ``merge``, or by a sum over the ranks, to which ``finish`` is applied.
        finish: Sum of all tiles times their weights to the result; called on every rank that gets one.
    """

    split: Callable[[torch.Tensor], tuple[list[TileTask], GridSpec]]
    exec: Callable[[TileTask], torch.Tensor]
    merge: Callable[[Mapping[tuple[int, ...], torch.Tensor], GridSpec], torch.Tensor]
    merging: VaeTileMerge = VaeTileMerge.BLEND
    finish: Callable[[torch.Tensor, GridSpec], torch.Tensor] = as_it_is
