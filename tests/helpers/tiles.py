# SPDX-License-Identifier: Apache-2.0
"""Tiles cut, run and blended one by one, where diffusers' own loop fails at a thin leftover."""

from collections.abc import Callable
from typing import Any

import torch


def tiles_by_hand(
    plain: Any,
    run: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    sizes: tuple[int, int],
    strides: tuple[int, int],
    least: int,
    out: Callable[[int], int],
) -> torch.Tensor:
    """Every tile of ``x`` by itself, a leftover thinner than ``least`` joined to the one before; blended as diffusers.

    Args:
        plain: A VAE of diffusers, for its blending.
        run: Makes the output of one tile.
        x: ``(..., H, W)``.
        sizes, strides: Height and width, in units of ``x``.
        least: Units of ``x`` that a tile must have.
        out: Units of the output that so many of ``x`` make.
    """
    overlaps = [out(size - stride) for size, stride in zip(sizes, strides, strict=True)]
    cuts = []
    for extent, size, stride in zip(x.shape[-2:], sizes, strides, strict=True):
        starts = [start for start in range(0, extent, stride) if extent - start >= least]
        stops = [min(start + size, extent) for start in starts[:-1]] + [extent]
        kept = [out(stride)] * (len(starts) - 1) + [out(extent)]
        cuts.append(list(zip(starts, stops, kept, strict=True)))
    rows: list[list[torch.Tensor]] = []
    whole = []
    for i, (top, bottom, kept_height) in enumerate(cuts[0]):
        rows.append([])
        kept_row = []
        for j, (left, right, kept_width) in enumerate(cuts[1]):
            tile = run(x[..., top:bottom, left:right])
            if i:
                tile = plain.blend_v(rows[i - 1][j], tile, overlaps[0])
            if j:
                tile = plain.blend_h(rows[i][j - 1], tile, overlaps[1])
            rows[i].append(tile)
            kept_row.append(tile[..., :kept_height, :kept_width])
        whole.append(torch.cat(kept_row, -1))
    return torch.cat(whole, -2)
