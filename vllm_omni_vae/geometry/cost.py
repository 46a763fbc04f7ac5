# SPDX-License-Identifier: Apache-2.0
"""What dividing one encode or decode among ranks costs: work, messages and bytes, by arithmetic alone."""

from __future__ import annotations

import dataclasses
from math import prod

from .balance import Assignment
from .tiling import TileGrid


@dataclasses.dataclass(frozen=True, slots=True)
class RankCost:
    """What one rank computes and sends.

    Attributes:
        work: Input positions that it runs through the network: batch x time x height x width.
        messages: Point-to-point messages that it sends.
        bytes: Their bytes.
        broadcast_bytes: Bytes of the result, on the rank that broadcasts it.
        reduced_bytes: Bytes that it brings to a sum over the ranks of which others get the result.
    """

    work: int
    messages: int = 0
    bytes: int = 0
    broadcast_bytes: int = 0
    reduced_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """What all ranks compute and send.

    Attributes:
        whole: Input positions of the request, each counted once.
        ranks: Each rank's part.
    """

    whole: int
    ranks: tuple[RankCost, ...]

    @property
    def work(self) -> int:
        """Input positions that all ranks compute together."""
        return sum(rank.work for rank in self.ranks)

    @property
    def coverage(self) -> float:
        """`work` over `whole`; 1.0 when nothing is computed twice."""
        return self.work / self.whole

    @property
    def redundant_share(self) -> float:
        """Part of `work` that another rank or tile computes too, from 0 to 1."""
        return 1 - self.whole / self.work

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank over the mean; 1.0 is even."""
        return self.busiest * len(self.ranks) / self.work

    @property
    def busiest(self) -> int:
        """Input positions of the rank that has most to do."""
        return max(rank.work for rank in self.ranks)

    @property
    def largest_share(self) -> float:
        """Work of the busiest rank over `whole`."""
        return self.busiest / self.whole

    @property
    def speed_up_limit(self) -> float:
        """How many times faster than the whole on one rank this can be, if time goes with work and sending is free."""
        return self.whole / self.busiest

    @property
    def messages(self) -> int:
        """Point-to-point messages of all ranks."""
        return sum(rank.messages for rank in self.ranks)

    @property
    def bytes(self) -> int:
        """Bytes of these messages."""
        return sum(rank.bytes for rank in self.ranks)

    @property
    def broadcast_bytes(self) -> int:
        """Bytes of the broadcast result, counted once."""
        return sum(rank.broadcast_bytes for rank in self.ranks)

    @property
    def reduced_bytes(self) -> int:
        """Bytes that all ranks bring to a sum."""
        return sum(rank.reduced_bytes for rank in self.ranks)


def whole_cost(extents: tuple[int, int, int], ranks: int, batch: int = 1) -> Cost:
    """Every rank does all of it by itself."""
    whole = batch * prod(extents)
    return Cost(whole, (RankCost(whole),) * ranks)


def tile_cost(
    grid: TileGrid,
    assignment: Assignment,
    *,
    channels: int,
    element_size: int,
    batch: int = 1,
    output: int = 0,
    broadcast: bool = False,
    summed: bool = False,
) -> Cost:
    """Each rank runs its tiles and sends their outputs to the output rank in one message, or sums them with the others.

    The few integers with which ranks agree before and after are not counted.

    Args:
        grid: The tiles.
        assignment: Which rank runs which.
        channels: Channels of a tile's output.
        element_size: Bytes of one value.
        batch: Items in the batch.
        output: Rank that merges.
        broadcast: Whether every rank gets the merged result; finishing it must not change how many values it has.
        summed: Whether the ranks reduce a sum of the whole's size instead of sending tiles.
    """
    work = [0] * len(assignment.loads)
    sent = [0] * len(assignment.loads)
    value = batch * channels * element_size
    for coord, owner in zip(grid.coords(), assignment.owners, strict=True):
        work[owner] += batch * grid.workload(coord)
        if owner != output and not summed:
            sent[owner] += value * prod(window.length for window in grid.cell(coord))
    whole = value * prod(grid.out_extents)
    ranks = tuple(
        RankCost(
            work[rank],
            int(sent[rank] > 0),
            sent[rank],
            whole if broadcast and rank == output and not summed else 0,
            whole if summed and (broadcast or rank != output) else 0,
        )
        for rank in range(len(work))
    )
    return Cost(batch * prod(grid.extents), ranks)
