# SPDX-License-Identifier: Apache-2.0
"""Overlapping tiles dealt to ranks, and their merge."""

from .executor import DistributedVaeExecutor, TileObserver
from .merge import blend, merge_tiles
from .operator import DistributedOperator, GridSpec, TileTask
from .pieces import without_margins
from .weights import add_tile, sum_shape, tile_weights

__all__ = [
    "DistributedOperator",
    "DistributedVaeExecutor",
    "GridSpec",
    "TileObserver",
    "TileTask",
    "add_tile",
    "blend",
    "merge_tiles",
    "sum_shape",
    "tile_weights",
    "without_margins",
]
