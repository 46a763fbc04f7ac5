# SPDX-License-Identifier: Apache-2.0
"""What its owner does with the output of a piece before it goes anywhere: it drops the margin."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..geometry import TileGrid
from .executor import memory_order
from .operator import TileTask

Exec = Callable[[TileTask], torch.Tensor]


def without_margins(exec: Exec, grid: TileGrid) -> Exec:
    """As ``exec``, and of what a piece of ``grid`` yields only what is kept, in its order in memory."""

    def run(task: TileTask) -> torch.Tensor:
        whole = kept = exec(task)
        _, row, col = grid.windows
        for dim, window in ((-2, row[task.grid_coord[1]]), (-1, col[task.grid_coord[2]])):
            kept = kept.narrow(dim, window.drop, window.length)
        return whole if kept.shape == whole.shape else kept.contiguous(memory_format=memory_order(whole))

    return run
