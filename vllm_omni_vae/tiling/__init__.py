# SPDX-License-Identifier: Apache-2.0
"""Overlapping tiles dealt to ranks, and their merge."""

from .executor import DistributedVaeExecutor, TileObserver
from .merge import blend, merge_tiles
from .operator import DistributedOperator, GridSpec, TileTask

__all__ = [
    "DistributedOperator",
    "DistributedVaeExecutor",
    "GridSpec",
    "TileObserver",
    "TileTask",
    "blend",
    "merge_tiles",
]
