# SPDX-License-Identifier: Apache-2.0
"""Add tiles up, each times its weights: what blending them in order gives, in any order and on any rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..geometry import TileGrid, Window

_TIME, _HEIGHT, _WIDTH = -3, -2, -1


def sum_shape(tile: Sequence[int], grid: TileGrid) -> tuple[int, ...]:
    """Shape of the sum of the tiles of ``grid``, of which one has the shape ``tile``."""
    time, height, width = grid.out_extents
    if len(grid.windows[0]) == 1:
        return (*tile[:_HEIGHT], height, width)
    return (*tile[:_TIME], time, height, width)


def add_tile(total: torch.Tensor, tile: torch.Tensor, grid: TileGrid, coord: tuple[int, ...]) -> None:
    """Add the output ``tile`` at ``coord`` times its weights to ``total``, in place.

    Once every tile of the grid was added to zeros, ``total`` is what `merge_tiles` makes of them, up to the order of
    additions: the weights at each position sum to 1.

    Args:
        total: Of `sum_shape`.
        tile: Output of one tile; the last dims are [time,] height, width. Not changed.
        grid: Where the tiles lie.
        coord: Which one it is, (time, height, width).
    """
    weights = tile_weights(grid, coord, torch.promote_types(total.dtype, torch.float32), total.device)
    cell = zip((_TIME, _HEIGHT, _WIDTH), grid.windows, coord, strict=True)
    for dim, windows, index in cell:
        if dim == _TIME and len(windows) == 1:
            continue
        window = windows[index]
        total = total.narrow(dim, window.out_start, _length(window))
        tile = tile.narrow(dim, window.skip, _length(window))
    total.addcmul_(tile, weights)


def tile_weights(
    grid: TileGrid, coord: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """Weights of the tile at ``coord``, made on ``device`` out of one ramp for each axis.

    Blending in order is linear, so there are weights that give the same; they follow from where the windows lie. Along
    time, and along height, they are the ramps of the tile and, beyond the start of each later window, what those leave
    of it. Along width the same, but once for the tile's own row and once more for each row below that has begun by
    then: a row is blended from its left after the one above, itself blended from its left, was blended into it. So
    where four tiles meet, the two upper ones share by the square of the ramp and not by the ramp.

    Returns:
        (H, W) of what the tile yields, or (T, H, W) of what is not skipped of it where time is cut.
    """
    (times, rows, cols), (t, i, j) = grid.windows, coord
    time, height, width = (tiling.blend for tiling in grid.tilings)
    own = torch.arange(_length(rows[i]), dtype=dtype, device=device)
    begun = torch.zeros_like(own, dtype=torch.int64)
    later = _overlapping(rows, i)
    for row in later:
        begun += own >= row.out_start - rows[i].out_start
    across = _shares(cols, j, width, 1 + len(later), dtype, device)
    plane = _shares(rows, i, height, 1, dtype, device)[0].unsqueeze(-1) * across[begun]
    if len(times) == 1:
        return plane
    return _shares(times, t, time, 1, dtype, device)[0].view(-1, 1, 1) * plane


def _length(window: Window) -> int:
    return window.length - window.skip


def _overlapping(windows: Sequence[Window], index: int) -> Sequence[Window]:
    """Later windows that begin within window ``index``."""
    stop = windows[index].out_start + _length(windows[index])
    return [window for window in windows[index + 1 :] if window.out_start < stop]


def _shares(
    windows: Sequence[Window], index: int, blend: int, times: int, dtype: torch.dtype, device: torch.device | None
) -> torch.Tensor:
    """Share that window ``index`` has at each of its positions, (times, length): after 1, 2, ... blends along the axis.

    Every blend goes through the windows in order and takes what the last one that has begun holds.
    """
    place = torch.arange(_length(windows[index]), dtype=dtype, device=device)
    last = index + len(_overlapping(windows, index))
    rises = [_rise(windows, k, blend, place + windows[index].out_start) for k in range(index, last + 1)]
    held = [torch.ones_like(place), *(torch.zeros_like(place) for _ in rises[1:])]
    found = []
    for _ in range(times):
        held[0] = held[0] * rises[0]
        for k in range(1, len(held)):
            held[k] = (1 - rises[k]) * held[k - 1] + rises[k] * held[k]
        found.append(held[-1])
    return torch.stack(found)


def _rise(windows: Sequence[Window], index: int, blend: int, place: torch.Tensor) -> torch.Tensor:
    """What window ``index`` takes of itself at ``place``, and not of the one before: 0 before it begins, 1 at last."""
    if index == 0:
        return torch.ones_like(place)
    before, own = windows[index - 1], windows[index]
    extent = min(_length(before), _length(own), blend)
    if extent < 1:
        return (place >= own.out_start).to(place.dtype)
    return ((place - own.out_start) / extent).clamp(0, 1)
