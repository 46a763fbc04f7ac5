# SPDX-License-Identifier: Apache-2.0
"""Deal independent tasks to ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..errors import GeometryError


@dataclasses.dataclass(frozen=True, slots=True)
class Assignment:
    """Which rank runs which task, and how even that is.

    Attributes:
        owners: Rank of each task.
        loads: Workload of each rank.
    """

    owners: tuple[int, ...]
    loads: tuple[int, ...]

    def tasks_of(self, rank: int) -> tuple[int, ...]:
        """Tasks of ``rank`` in ascending order."""
        return tuple(task for task, owner in enumerate(self.owners) if owner == rank)

    @property
    def idle_ranks(self) -> tuple[int, ...]:
        """Ranks without a task."""
        return tuple(rank for rank in range(len(self.loads)) if rank not in self.owners)

    @property
    def imbalance(self) -> float:
        """Load of the busiest rank over the mean load; 1.0 is even, and the speed-up is ``ranks / imbalance``."""
        return max(self.loads) * len(self.loads) / sum(self.loads)


def deal(workloads: Sequence[int], ranks: int) -> Assignment:
    """Give each task to the rank that has least to do, longest task first; ties go to the lower number.

    The order is a function of the arguments alone, so every rank computes the same assignment. The longest-first rule
    keeps the busiest rank within 4/3 of the best possible (Graham, 1969).

    Raises:
        GeometryError: no rank, no task, or a task without work.
    """
    if ranks < 1 or not workloads or min(workloads) < 1:
        raise GeometryError(f"cannot deal workloads {list(workloads)} to {ranks} ranks; both must be at least 1")
    owners = [0] * len(workloads)
    loads = [0] * ranks
    for task in sorted(range(len(workloads)), key=lambda t: (-workloads[t], t)):
        rank = min(range(ranks), key=lambda r: (loads[r], r))
        owners[task] = rank
        loads[rank] += workloads[task]
    return Assignment(tuple(owners), tuple(loads))
