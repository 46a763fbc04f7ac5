# SPDX-License-Identifier: Apache-2.0
"""Which piece of a feature map each rank of a grid holds."""

from __future__ import annotations

import dataclasses

import torch

from ..errors import GeometryError, UnsupportedError
from ..geometry import Partition, RankGrid


@dataclasses.dataclass(frozen=True, slots=True)
class ShardLayout:
    """A grid of ranks laid over the latent rows and columns of one feature map.

    Attributes:
        grid: The ranks.
        height, width: Latent rows and columns; one part for each row and column of ranks.
        rank: This rank in the grid.
        remainder: Whether the input goes beyond its last whole latent. Above latent scale the last pieces may then hold
            more than their latents, and how much more no other rank can tell.
    """

    grid: RankGrid
    height: Partition
    width: Partition
    rank: int
    remainder: bool = False

    def __post_init__(self) -> None:
        if (self.height.parts, self.width.parts) != (self.grid.rows, self.grid.cols):
            raise GeometryError(f"{self.height} and {self.width} do not fit {self.grid}")
        if min(self.height.row_sizes) < 1 or min(self.width.row_sizes) < 1:
            raise GeometryError(
                f"{self.height.extent}x{self.width.extent} latents cannot give each of "
                f"{self.grid.rows}x{self.grid.cols} ranks at least one"
            )

    @property
    def latents(self) -> tuple[int, int]:
        """Latent rows and columns of this rank."""
        row, col = self.grid.coords(self.rank)
        return self.height.row_sizes[row], self.width.row_sizes[col]

    def sharded(self, dim: int) -> bool:
        """Whether the axis of ``dim`` (-2: height, -1: width) is cut."""
        return (self.grid.rows if dim == -2 else self.grid.cols) > 1

    def neighbours(self, dim: int) -> tuple[int | None, int | None]:
        """Ranks that hold the piece before and after this one along ``dim``; None at a true edge."""
        if dim == -2:
            return self.grid.neighbour(self.rank, down=-1), self.grid.neighbour(self.rank, down=1)
        return self.grid.neighbour(self.rank, right=-1), self.grid.neighbour(self.rank, right=1)

    def extents(self, dim: int, height: int, width: int) -> list[int]:
        """Units that each part holds along ``dim``, remainder aside, where this rank's piece is ``height`` x ``width``.

        Arithmetic, not a message: every rank comes to the same. A last piece with a remainder leaves several numbers of
        units a latent; autoencoders double, so the power of two is meant.
        """
        shared = sorted(self._scales(height, -2) & self._scales(width, -1))
        rows, local = (self.height, height) if dim == -2 else (self.width, width)
        other = shared[-1] if shared else local // self.latents[0 if dim == -2 else 1]
        scale = next((s for s in shared if s & (s - 1) == 0), other)
        return [size * scale for size in rows.row_sizes]

    def bounds(self, rank: int, extents: tuple[int, int], ratio: int) -> tuple[slice, slice]:
        """Rows and columns of ``rank`` in a whole of ``extents``, ``ratio`` units a latent; the last takes the rest."""
        row, col = self.grid.coords(rank)
        return _cut(self.height, row, extents[0], ratio), _cut(self.width, col, extents[1], ratio)

    def local(self, x: torch.Tensor, ratio: int) -> torch.Tensor:
        """This rank's piece of the whole ``x``, as a tensor of its own; ``ratio`` units of ``x`` make a latent."""
        rows, cols = self.bounds(self.rank, (x.shape[-2], x.shape[-1]), ratio)
        return x[..., rows, cols].clone(memory_format=torch.preserve_format)

    def spatial_dims(self, x: torch.Tensor) -> tuple[int, int] | None:
        """The dims of ``x`` that are height and width, told by its sizes: channels first or last; None if neither.

        Where both fit, channels are last if the dim before them lies closest in memory: they were moved there.
        """
        places = ((-2, -1), (-3, -2)) if x.dim() >= 4 else ()
        fitting = [dims for dims in places if self._matches(x.shape[dims[0]], x.shape[dims[1]])]
        if not fitting:
            return None
        moved = x.stride(-2) == 1 < x.stride(-1)
        height, width = fitting[-1 if moved else 0]
        return x.dim() + height, x.dim() + width

    def cut_dims(self, x: torch.Tensor) -> set[int]:
        """The dims of ``x`` of which this rank holds only a piece."""
        spatial = self.spatial_dims(x)
        if spatial is None:
            return set()
        return {dim for dim, axis in zip(spatial, (-2, -1), strict=True) if self.sharded(axis)}

    def _matches(self, height: int, width: int) -> bool:
        """Whether some number of units a latent gives both sizes; the last pieces may hold a remainder besides."""
        scales = [self._scales(local, dim) for local, dim in ((height, -2), (width, -1))]
        return bool(scales[0] & scales[1])

    def _scales(self, local: int, dim: int) -> set[int]:
        mine = self.latents[0 if dim == -2 else 1]
        if self.neighbours(dim)[1] is None:
            return set(range(local // (mine + 1) + 1, local // mine + 1))
        return {local // mine} if local and local % mine == 0 else set()

    def positions(self, local: int) -> list[int]:
        """Flattened positions that each rank holds, where this one holds ``local``.

        Raises:
            GeometryError: ``local`` is no number of positions that this rank can hold.
            UnsupportedError: it cannot be told what other ranks hold, on every rank alike.
        """
        rows, cols = self.latents
        if self.remainder and local != rows * cols:
            raise UnsupportedError(
                f"attention over {local} positions of {rows}x{cols} latents is not known on a shard of an input that "
                "is no whole number of latents; crop or pad it to one"
            )
        scale, rest = divmod(local, rows * cols)
        if rest or scale < 1:
            raise GeometryError(f"{local} positions do not come from a shard of {rows}x{cols} latents")
        areas = [h * w for h in self.height.row_sizes for w in self.width.row_sizes]
        return [area * scale for area in areas]


def _cut(partition: Partition, part: int, extent: int, ratio: int) -> slice:
    start, stop = partition.scaled(ratio).bounds(part)
    return slice(start, extent if part == partition.parts - 1 else stop)
