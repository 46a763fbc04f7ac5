# SPDX-License-Identifier: Apache-2.0
"""One piece of a picture for each rank, with a margin of context that is dropped from what the piece yields."""

from __future__ import annotations

import dataclasses

from ..errors import GeometryError
from .partition import Partition
from .rank_grid import RankGrid
from .tiling import AxisScale, AxisTiling, Coord, TileGrid, Window

_SAME = AxisScale()


@dataclasses.dataclass(frozen=True, slots=True)
class AxisPieces:
    """An axis cut into ``parts`` pieces of whole latents, whose lengths differ by at most one latent.

    A piece reads up to `margin` latents beyond each inner edge. They are dropped from its output, so what remains of
    neighbouring pieces meets without overlap. The last piece takes what is beyond the last whole latent.

    >>> AxisPieces(2, margin=1, scale=AxisScale(down=8)).windows(61)[0]
    Window(start=0, stop=40, length=4, out_start=0, out_stop=4, skip=0, drop=0)
    >>> AxisPieces(2, margin=1, scale=AxisScale(down=8)).windows(61)[1]
    Window(start=24, stop=61, length=3, out_start=4, out_stop=7, skip=0, drop=1)

    Attributes:
        parts: Pieces.
        margin: Latents of context on each inner edge.
        scale: Growth of the axis from input to output; `AxisScale.down` input units make a latent.
        minimum: Fewest input units that a piece may read.
    """

    parts: int
    margin: int = 0
    scale: AxisScale = _SAME
    minimum: int = 1

    def __post_init__(self) -> None:
        if self.parts < 1 or self.margin < 0 or self.minimum < 1 or self.scale.causal:
            raise GeometryError(
                f"cannot cut an axis into {self.parts} pieces with a margin of {self.margin} that read {self.minimum} "
                "units or more; pieces and units must be at least 1, a margin at least 0, and causal time stays whole"
            )

    @property
    def blend(self) -> int:
        """Output units over which neighbouring pieces are blended: none."""
        return 0

    def windows(self, extent: int) -> tuple[Window, ...]:
        """Cut ``extent`` input units into pieces; their kept outputs cover the whole output exactly once.

        Raises:
            GeometryError: a piece would have no latent, or read fewer units than `minimum`.
        """
        unit = self.scale.down
        latents = Partition(extent // unit, self.parts)
        windows = tuple(self._window(latents, part, extent) for part in range(self.parts))
        thinnest = min(window.stop - window.start for window in windows)
        if min(latents.sizes) < 1 or thinnest < self.minimum:
            raise GeometryError(
                f"{latents.extent} latents cannot be cut into {self.parts} pieces of at least 1 that read, with a "
                f"margin of {self.margin}, at least {-(-self.minimum // unit)}"
            )
        return windows

    def _window(self, latents: Partition, part: int, extent: int) -> Window:
        unit = self.scale.down
        first, last = latents.scaled(unit).bounds(part)
        if part == self.parts - 1:
            last = extent
        start = max(0, first - self.margin * unit)
        stop = min(extent, last + self.margin * unit)
        kept = self.scale.length(first), self.scale.length(last)
        return Window(start, stop, kept[1] - kept[0], *kept, drop=self.scale.length(first - start))


def cut_for_ranks(
    tilings: tuple[AxisTiling, AxisTiling, AxisTiling], extents: Coord, ranks: int, margin: int
) -> TileGrid:
    """One piece for each of ``ranks`` ranks, on the squarest grid of ranks that the axes allow, ties to fewer rows.

    Args:
        tilings: Time, height and width as they are cut into tiles, for their scales and for what a tile must read.
            Time stays whole.
        extents: Input units of time, height and width.
        ranks: Pieces.
        margin: Latents of context on each inner edge.

    Raises:
        GeometryError: no grid of so many ranks gives each of them a piece.
    """
    time, height, width = tilings
    for grid in RankGrid.of_size(ranks):
        rows = AxisPieces(grid.rows, margin, height.scale, height.minimum)
        cols = AxisPieces(grid.cols, margin, width.scale, width.minimum)
        try:
            return TileGrid((AxisTiling(None, scale=time.scale), rows, cols), extents)
        except GeometryError:
            continue
    latents = "x".join(str(n // axis.scale.down) for n, axis in zip(extents[1:], (height, width), strict=True))
    least = "x".join(str(-(-axis.minimum // axis.scale.down)) for axis in (height, width))
    raise GeometryError(
        f"{latents} latents cannot give each of {ranks} ranks a piece of at least 1x1 that reads, with a margin of "
        f"{margin}, at least {least}"
    )
