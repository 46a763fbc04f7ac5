# SPDX-License-Identifier: Apache-2.0
"""Who owns which rows of one axis."""

from __future__ import annotations

import dataclasses
from itertools import accumulate

from ..errors import GeometryError


@dataclasses.dataclass(frozen=True, slots=True)
class Partition:
    """One axis cut into contiguous pieces that cover it, are disjoint and differ by at most one row.

    The first ``extent % parts`` pieces hold the extra row. A piece may be empty when there are more parts than rows.

    >>> Partition(7, 3).sizes
    (3, 2, 2)
    >>> Partition(7, 3).scaled(8).bounds(1)
    (24, 40)

    Attributes:
        extent: Global length in rows (latent rows, usually).
        parts: Pieces.
        ratio: Units per row; `scaled` sets it, so that pixels are cut where latent rows are.
    """

    extent: int
    parts: int
    ratio: int = 1

    def __post_init__(self) -> None:
        if self.extent < 0 or self.parts < 1 or self.ratio < 1:
            raise GeometryError(
                f"cannot cut {self.extent} rows into {self.parts} parts of {self.ratio} units a row; "
                "rows must be at least 0, parts and units at least 1"
            )

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """Rows of each piece."""
        base, extra = divmod(self.extent, self.parts)
        return tuple(base + (part < extra) for part in range(self.parts))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Units of each piece."""
        return tuple(rows * self.ratio for rows in self.row_sizes)

    @property
    def starts(self) -> tuple[int, ...]:
        """First unit of each piece."""
        return (0, *accumulate(self.sizes[:-1]))

    def bounds(self, part: int) -> tuple[int, int]:
        """First unit of piece ``part`` and the unit after its last."""
        start = self.starts[part]
        return start, start + self.sizes[part]

    def owner(self, unit: int) -> int:
        """The piece that holds ``unit``.

        Raises:
            GeometryError: the axis has no such unit.
        """
        for part in range(self.parts):
            start, stop = self.bounds(part)
            if start <= unit < stop:
                return part
        raise GeometryError(f"unit {unit} is outside 0..{self.extent * self.ratio - 1}")

    def scaled(self, ratio: int) -> Partition:
        """The same cut counted in units of which each present unit holds ``ratio``."""
        return Partition(self.extent, self.parts, self.ratio * ratio)
