# SPDX-License-Identifier: Apache-2.0
"""The noise that a tiled decode begins with, where the decoder denoises: the same on any number of ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from ..geometry import TileGrid
from ..geometry.tiling import Coord

Draw = Callable[[tuple[int, ...]], torch.Tensor]
"""Makes noise of a shape."""


class TileNoise(ABC):
    """What one loop over all tiles would draw, on every rank, whichever tiles it runs.

    Every rank draws everything, in the same order and the same pieces, and keeps what its tiles need. So ranks whose
    generators begin alike give each tile the noise that one rank gives it, and their generators end alike.
    """

    @abstractmethod
    def take(self, coord: Coord) -> torch.Tensor:
        """Noise for the output of the tile at ``coord``. Tiles come in the order of `TileGrid.coords`, each once."""

    @abstractmethod
    def finish(self) -> None:
        """Draw what is left; on every rank, also after a failure."""


class NoiseOfItsOwn(TileNoise):
    """Each tile draws for itself, in the order of `TileGrid.coords`.

    Args:
        grid: The tiles.
        batch, channels: Of the sample.
        draw: Called for every tile.
    """

    def __init__(self, grid: TileGrid, batch: int, channels: int, draw: Draw):
        self._draw = draw
        self._ahead = (
            (coord, (batch, channels, *(window.length for window in grid.cell(coord)))) for coord in grid.coords()
        )

    def take(self, coord: Coord) -> torch.Tensor:
        for place, shape in self._ahead:
            noise = self._draw(shape)
            if place == coord:
                return noise
        raise LookupError(f"the noise of tile {coord} has been drawn and dropped; tiles are run in order")

    def finish(self) -> None:
        for _, shape in self._ahead:
            self._draw(shape)


class NoiseOfOneCanvas(TileNoise):
    """All tiles are cut from one canvas, so that they begin alike where they overlap.

    Args:
        grid, batch, channels: As for `NoiseOfItsOwn`.
        draw: Called once.
    """

    def __init__(self, grid: TileGrid, batch: int, channels: int, draw: Draw):
        self._grid = grid
        self._shape = (batch, channels, *grid.out_extents)
        self._draw = draw
        self._canvas: torch.Tensor | None = None

    def take(self, coord: Coord) -> torch.Tensor:
        time, height, width = (slice(w.out_start, w.out_start + w.length) for w in self._grid.cell(coord))
        return self._whole()[:, :, time, height, width]

    def finish(self) -> None:
        self._whole()

    def _whole(self) -> torch.Tensor:
        if self._canvas is None:
            self._canvas = self._draw(self._shape)
        return self._canvas
