# SPDX-License-Identifier: Apache-2.0
"""Ranks laid out on height x width."""

from __future__ import annotations

import dataclasses

from ..errors import GeometryError


@dataclasses.dataclass(frozen=True, slots=True)
class RankGrid:
    """``rows * cols`` ranks, numbered row by row.

    >>> RankGrid.squarest(8)
    RankGrid(rows=2, cols=4)
    >>> RankGrid(2, 4).neighbour(1, down=1)
    5
    """

    rows: int
    cols: int

    def __post_init__(self) -> None:
        if self.rows < 1 or self.cols < 1:
            raise GeometryError(f"a rank grid of {self.rows} x {self.cols} has no ranks; both must be at least 1")

    @classmethod
    def squarest(cls, size: int) -> RankGrid:
        """The grid of ``size`` ranks whose sides are nearest to each other, with no more rows than columns."""
        return cls.of_size(size)[0]

    @classmethod
    def of_size(cls, size: int) -> tuple[RankGrid, ...]:
        """Every grid of ``size`` ranks, the squarest first; of two that are as square, the one with fewer rows.

        >>> [(grid.rows, grid.cols) for grid in RankGrid.of_size(6)]
        [(2, 3), (3, 2), (1, 6), (6, 1)]
        """
        if size < 1:
            raise GeometryError(f"{size} ranks make no grid; give at least 1")
        grids = (cls(rows, size // rows) for rows in range(1, size + 1) if size % rows == 0)
        return tuple(sorted(grids, key=lambda grid: (abs(grid.rows - grid.cols), grid.rows)))

    @property
    def size(self) -> int:
        """Ranks in the grid."""
        return self.rows * self.cols

    def coords(self, rank: int) -> tuple[int, int]:
        """(row, column) of ``rank``."""
        if not 0 <= rank < self.size:
            raise GeometryError(f"rank {rank} is not in a grid of {self.rows} x {self.cols}")
        return divmod(rank, self.cols)

    def rank(self, row: int, col: int) -> int | None:
        """The rank at (row, col), or None outside the grid."""
        inside = 0 <= row < self.rows and 0 <= col < self.cols
        return row * self.cols + col if inside else None

    def neighbour(self, rank: int, *, down: int = 0, right: int = 0) -> int | None:
        """The rank that many steps below and to the right of ``rank``, or None beyond the edge."""
        row, col = self.coords(rank)
        return self.rank(row + down, col + right)
