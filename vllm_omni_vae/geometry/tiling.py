# SPDX-License-Identifier: Apache-2.0
"""Overlapping windows over height, width and time, and what comes out of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Protocol

from ..errors import GeometryError

Coord = tuple[int, int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class AxisScale:
    """How an axis grows or shrinks through the autoencoder.

    A causal time axis keeps its first frame for itself: ``1 + (n - 1) * up // down``.

    >>> AxisScale(down=8).length(61)
    7
    >>> AxisScale(up=4, causal=True).length(3)
    9

    Attributes:
        up: Output units for each input unit (decode).
        down: Input units for each output unit (encode).
        causal: Whether the first unit stands alone.
    """

    up: int = 1
    down: int = 1
    causal: bool = False

    def length(self, extent: int) -> int:
        """Output length of ``extent`` input units."""
        if extent < 1:
            return 0
        alone = int(self.causal)
        return alone + (extent - alone) * self.up // self.down


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """One tile along one axis.

    Attributes:
        start, stop: Input units that the tile reads.
        length: Output units that the tile yields.
        out_start, out_stop: Output units of the whole that are kept from it.
        skip: Output units at the start of what it yields that are dropped before it meets the window before it.
        drop: Output units that the network makes of it before those that it yields; what is beyond them it makes too.
    """

    start: int
    stop: int
    length: int
    out_start: int
    out_stop: int
    skip: int = 0
    drop: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class AxisTiling:
    """Windows of ``size`` input units every ``stride``, and how their outputs meet.

    Neighbouring outputs overlap by `blend` units, over which they are blended; `keep` units of each tile remain.

    The unit with which a window begins stands alone on a causal axis, so a window in the middle would yield too little
    of it. There every window begins with a `lead`, and later windows drop what it yields:

    >>> AxisTiling(2, 1, AxisScale(up=8, causal=True), lead=1).windows(4)[1]
    Window(start=1, stop=4, length=17, out_start=9, out_stop=17, skip=1, drop=0)

    A network that is told where a window lies needs none:

    >>> AxisTiling(2, 1, AxisScale(up=8, causal=True), placed=True).windows(4)[1]
    Window(start=1, stop=3, length=16, out_start=1, out_stop=9, skip=0, drop=0)

    Attributes:
        size: Input units of a window besides its lead; None: the axis is not tiled.
        stride: Input units between the starts of neighbouring windows.
        scale: Growth of the axis from input to output.
        minimum: Fewest input units that a window may have besides its lead. A shorter leftover is merged into the
            window before it.
        lead: Input units that every window reads ahead of its `size`. They are the first window's own; to a later one
            they belong to the window before it.
        placed: Whether the network is told that a window is not the first, and yields all of that window's first unit.

    Raises:
        GeometryError: the windows would leave gaps, or do not begin on whole output units.
    """

    size: int | None
    stride: int = 1
    scale: AxisScale = AxisScale()
    minimum: int = 1
    lead: int = 0
    placed: bool = False

    def __post_init__(self) -> None:
        if self.size is None:
            return
        alone = int(self.scale.causal and not self.placed)
        if self.lead < alone or (self.lead - alone) % self.scale.down:
            raise GeometryError(
                f"windows with a lead of {self.lead} would shift the picture; it must be {alone} or more by whole "
                f"multiples of the compression ratio {self.scale.down}"
            )
        if self.size < 1 or self.stride < 1 or self.minimum < 1:
            raise GeometryError(f"tile size {self.size} and stride {self.stride} must be at least 1")
        if self.stride > self.size:
            raise GeometryError(
                f"tile stride {self.stride} is larger than the tile size {self.size}, which would leave gaps in the "
                "picture; make the stride at most the size"
            )
        for name, value in (("size", self.size), ("stride", self.stride)):
            if value % self.scale.down:
                raise GeometryError(
                    f"tile {name} {value} is not a multiple of the compression ratio {self.scale.down}, which would "
                    f"shift the picture; nearest: {value // self.scale.down * self.scale.down or self.scale.down}"
                )

    @property
    def keep(self) -> int:
        """Output units that remain of a tile which has a neighbour after it."""
        return self.stride * self.scale.up // self.scale.down

    @property
    def blend(self) -> int:
        """Output units over which neighbouring tiles are blended."""
        if self.size is None:
            return 0
        return self.size * self.scale.up // self.scale.down - self.keep

    def windows(self, extent: int) -> tuple[Window, ...]:
        """Cut ``extent`` input units into windows; their kept outputs cover the whole output exactly once.

        Raises:
            GeometryError: the axis is shorter than `minimum`.
        """
        least = 1 if self.lead else self.minimum
        if extent < least or self.scale.length(extent) < 1:
            raise GeometryError(f"an axis of {extent} units is too short; it takes at least {least}")
        if self.size is None:
            return (self._window(0, extent, 0, self.scale.length(extent)),)
        after_lead, skip = extent - self.lead, self.scale.length(self.lead)
        starts = [s for s in range(0, max(1, after_lead), self.stride) if s == 0 or after_lead - s >= self.minimum]
        stops = [min(start + self.lead + self.size, extent) for start in starts[:-1]] + [extent]
        kept = [0] + [self.scale.length(self.lead + start) for start in starts[1:]] + [self.scale.length(extent)]
        return tuple(
            self._window(start, stop, kept[i], kept[i + 1], skip if i else 0)
            for i, (start, stop) in enumerate(zip(starts, stops, strict=True))
        )

    def _window(self, start: int, stop: int, out_start: int, out_stop: int, skip: int = 0) -> Window:
        length = self.scale.length(stop - start)
        if self.placed and start:
            length = (stop - start) * self.scale.up // self.scale.down
        return Window(start, stop, length, out_start, out_stop, skip)


class AxisCut(Protocol):
    """How an axis is cut: `AxisTiling`, or `AxisPieces`."""

    @property
    def blend(self) -> int:
        """Output units over which neighbours are blended."""
        ...

    def windows(self, extent: int) -> tuple[Window, ...]:
        """Cut ``extent`` input units into windows; their kept outputs cover the whole output exactly once."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class TileGrid:
    """A grid of tiles over (time, height, width) and the output that they make together.

    Attributes:
        tilings: How time, height and width are cut.
        extents: Input units of time, height and width.
    """

    tilings: tuple[AxisCut, AxisCut, AxisCut]
    extents: Coord
    windows: tuple[tuple[Window, ...], ...] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        windows = tuple(t.windows(e) for t, e in zip(self.tilings, self.extents, strict=True))
        object.__setattr__(self, "windows", windows)

    @property
    def shape(self) -> Coord:
        """Tiles along time, height and width."""
        time, height, width = (len(w) for w in self.windows)
        return time, height, width

    @property
    def out_extents(self) -> Coord:
        """Output units along time, height and width."""
        time, height, width = (w[-1].out_stop for w in self.windows)
        return time, height, width

    def __len__(self) -> int:
        return prod(self.shape)

    def coords(self) -> Iterator[Coord]:
        """Tile coordinates in row-major order, time outermost: the order in which tiles are merged."""
        time, height, width = (range(n) for n in self.shape)
        return product(time, height, width)

    def cell(self, coord: Coord) -> tuple[Window, Window, Window]:
        """Windows of the tile at ``coord`` along time, height and width."""
        time, height, width = (w[i] for w, i in zip(self.windows, coord, strict=True))
        return time, height, width

    def workload(self, coord: Coord) -> int:
        """Input volume of the tile at ``coord``."""
        return prod(w.stop - w.start for w in self.cell(coord))

    @property
    def coverage(self) -> float:
        """Input volume of all tiles over that of the whole: the redundant work, 1.0 for none."""
        return sum(self.workload(c) for c in self.coords()) / prod(self.extents)
