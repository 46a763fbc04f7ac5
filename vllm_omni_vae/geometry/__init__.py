# SPDX-License-Identifier: Apache-2.0
"""Who owns which part of the work: integer arithmetic alone, the same on every rank."""

from .balance import Assignment, deal
from .partition import Partition
from .pieces import AxisPieces, cut_for_ranks
from .rank_grid import RankGrid
from .tiling import AxisScale, AxisTiling, TileGrid, Window

__all__ = [
    "Assignment",
    "AxisPieces",
    "AxisScale",
    "AxisTiling",
    "Partition",
    "RankGrid",
    "TileGrid",
    "Window",
    "cut_for_ranks",
    "deal",
]
