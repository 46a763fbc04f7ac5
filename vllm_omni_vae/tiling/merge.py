# SPDX-License-Identifier: Apache-2.0
"""Put overlapping tiles together again, with the bits that diffusers' loops give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..geometry import TileGrid, Window

_TIME, _HEIGHT, _WIDTH = -3, -2, -1


def blend(before: torch.Tensor, after: torch.Tensor, extent: int, dim: int) -> None:
    """Fade from the end of ``before`` into the start of ``after``, in place on ``after``.

    Bit-equal to the row-by-row loop of diffusers' ``blend_v`` and ``blend_h``
    (``b[y] = a[-n + y] * (1 - y / n) + b[y] * (y / n)``), but over the whole overlap at once: the loop's Python scalars
    act in float32 on half types and each product is rounded to the tensor's type, so this does the same.

    Args:
        before, after: Neighbouring tiles of equal shape outside ``dim``.
        extent: Overlap in units of ``dim``; cut to the thinner tile.
        dim: The dim along which they meet.
    """
    extent = min(before.shape[dim], after.shape[dim], extent)
    if extent < 1:
        return
    wide = torch.promote_types(after.dtype, torch.float32)
    ramp = torch.arange(extent, dtype=torch.float64) / extent
    shape = [1] * after.dim()
    shape[dim] = extent
    rising = ramp.to(wide).view(shape).to(after.device)
    falling = (1 - ramp).to(wide).view(shape).to(after.device)
    tail = before.narrow(dim, before.shape[dim] - extent, extent)
    head = after.narrow(dim, 0, extent)
    head.copy_((tail * falling).to(after.dtype) + (head * rising).to(after.dtype))


def merge_tiles(tiles: Mapping[tuple[int, ...], torch.Tensor], grid: TileGrid) -> torch.Tensor:
    """Blend the tiles of ``grid`` and return the whole.

    Order as in diffusers: each tile is blended with the one above it and then with the one on its left, row by row,
    against neighbours that are blended already; each stretch of time, once it is whole, is then blended with the one
    before it. What a window skips is dropped before anything else.

    Args:
        tiles: Output of every tile by (time, height, width); the last dims are [time,] height, width. Overwritten.
        grid: Where they lie.

    Returns:
        A new tensor of the grid's output extents.
    """
    time, height, width = grid.windows
    tiles = {coord: _without_skip(tiles[coord], grid.cell(coord)) for coord in grid.coords()}
    before = _merge_plane(tiles, grid, 0, height, width)
    if len(time) == 1:
        return before
    whole = before.new_empty((*before.shape[:_TIME], *grid.out_extents))
    for t, window in enumerate(time):
        if t > 0:
            after = _merge_plane(tiles, grid, t, height, width)
            blend(before, after, grid.tilings[0].blend, _TIME)
            before = after
        kept = window.out_stop - window.out_start
        whole.narrow(_TIME, window.out_start, kept).copy_(before.narrow(_TIME, 0, kept))
    return whole


def _without_skip(tile: torch.Tensor, cell: tuple[Window, Window, Window]) -> torch.Tensor:
    for dim, window in zip((_TIME, _HEIGHT, _WIDTH), cell, strict=True):
        if window.skip:
            tile = tile.narrow(dim, window.skip, tile.shape[dim] - window.skip)
    return tile


def _merge_plane(
    tiles: Mapping[tuple[int, ...], torch.Tensor],
    grid: TileGrid,
    t: int,
    rows: Sequence[Window],
    cols: Sequence[Window],
) -> torch.Tensor:
    first = tiles[t, 0, 0]
    plane = first.new_empty((*first.shape[:_HEIGHT], rows[-1].out_stop, cols[-1].out_stop))
    for i, row in enumerate(rows):
        for j, col in enumerate(cols):
            tile = tiles[t, i, j]
            if i > 0:
                blend(tiles[t, i - 1, j], tile, grid.tilings[1].blend, _HEIGHT)
            if j > 0:
                blend(tiles[t, i, j - 1], tile, grid.tilings[2].blend, _WIDTH)
            kept = tile[..., : row.out_stop - row.out_start, : col.out_stop - col.out_start]
            plane[..., row.out_start : row.out_stop, col.out_start : col.out_stop] = kept
    return plane
