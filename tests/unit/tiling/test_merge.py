# SPDX-License-Identifier: Apache-2.0
"""Blending has the bits of diffusers' loops, and tiles that fit become the whole again."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from diffusers import AutoencoderKLWan
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.vaes import noise
from vllm_omni_vae.geometry import AxisScale, AxisTiling, TileGrid
from vllm_omni_vae.tiling import blend, merge_tiles

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NOBODY = SimpleNamespace()  # the loops are methods that use nothing of their VAE
LOOPS: dict[int, Callable[..., torch.Tensor]] = {
    -2: lambda a, b, n: AutoencoderKLWan.blend_v(NOBODY, a, b, n),
    -1: lambda a, b, n: AutoencoderKLWan.blend_h(NOBODY, a, b, n),
}
WHOLE = AxisTiling(None)


@pytest.mark.parametrize("dim", [-2, -1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("extent", [0, 1, 2, 3, 5, 7, 8, 11, 64])
def test_blending_has_the_bits_of_diffusers_loops(dim: int, dtype: torch.dtype, extent: int) -> None:
    before, after = noise(2, 3, 2, 8, 8, dtype=dtype), noise(2, 3, 2, 8, 8, seed=1, dtype=dtype)
    expected = LOOPS[dim](before.clone(), after.clone(), extent)
    kept, found = before.clone(), after.clone()
    blend(kept, found, extent, dim)
    assert torch.equal(found, expected)
    assert torch.equal(kept, before)
    assert torch.equal(found, after) == (extent == 0)


@given(
    st.sampled_from([-2, -1]),
    st.sampled_from(DTYPES),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(0, 50),
    st.floats(1e-3, 1e3),
)
@settings(max_examples=150)
def test_also_for_tiles_thinner_than_the_overlap(
    dim: int, dtype: torch.dtype, thick: int, thin: int, extent: int, scale: float
) -> None:
    shapes = [(1, 2, 1, 3, n) if dim == -1 else (1, 2, 1, n, 3) for n in (thick, thin)]
    before, after = (noise(*s, seed=n, dtype=torch.float32).mul(scale).to(dtype) for n, s in enumerate(shapes))
    expected = LOOPS[dim](before, after.clone(), extent)
    blend(before, after, extent, dim)
    assert torch.equal(after, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_blending_a_view_in_place(dtype: torch.dtype) -> None:
    room = noise(1, 2, 1, 8, 20, dtype=dtype)
    expected = LOOPS[-1](room[..., :8].clone(), room[..., 8:16].clone(), 3)
    untouched = room[..., 16:].clone()
    blend(room[..., :8], room[..., 8:16], 3, -1)
    assert torch.equal(room[..., 8:16], expected)
    assert torch.equal(room[..., 16:], untouched)


def test_infinities_and_nans_stay_where_the_loops_leave_them() -> None:
    before, after = noise(1, 1, 1, 4, 4), noise(1, 1, 1, 4, 4, seed=1)
    before[..., 3], after[..., 0, 0] = float("inf"), float("nan")
    expected = LOOPS[-1](before, after.clone(), 2)
    blend(before, after, 2, -1)
    assert torch.equal(after.nan_to_num(7), expected.nan_to_num(7))


def test_blending_in_time() -> None:
    before, after = torch.zeros(1, 1, 4, 2, 2), torch.ones(1, 1, 4, 2, 2)
    blend(before, after, 4, -3)
    assert after[0, 0, :, 0, 0].tolist() == [0.0, 0.25, 0.5, 0.75]


@st.composite
def grids(draw: Callable[..., int]) -> TileGrid:
    """Grids over height and width, sometimes time, whose output has the input's resolution."""
    axes, extents = [], []
    for tiled in (draw(st.booleans()), True, True):
        stride, lead = draw(st.integers(1, 6)), draw(st.integers(0, 2))
        axes.append(AxisTiling(stride + draw(st.integers(0, 6)), stride, lead=lead) if tiled else WHOLE)
        extents.append(draw(st.integers(1, 14)))
    return TileGrid((axes[0], axes[1], axes[2]), (extents[0], extents[1], extents[2]))


def cut(x: torch.Tensor, grid: TileGrid) -> dict[tuple[int, ...], torch.Tensor]:
    tiles = {}
    for coord in grid.coords():
        t, h, w = (slice(window.start, window.stop) for window in grid.cell(coord))
        tiles[coord] = x[..., t, h, w].clone()
    return tiles


@given(grids())
def test_what_is_cut_and_not_changed_merges_to_the_same(grid: TileGrid) -> None:
    x = noise(2, 1, *grid.extents, dtype=torch.float64)
    assert torch.allclose(merge_tiles(cut(x, grid), grid), x, rtol=0, atol=1e-13)


@given(grids(), st.sampled_from([torch.float64, torch.float32]), st.sampled_from([1.0, -0.25, 0.1]))
def test_a_constant_stays_constant_through_any_grid(grid: TileGrid, dtype: torch.dtype, value: float) -> None:
    # Each blend may round once more, and along an axis of 14 tiles each is blended against one that is blended already.
    x = torch.full((1, 2, *grid.extents), value, dtype=dtype)
    merged = merge_tiles(cut(x, grid), grid)
    tolerance = 64 * torch.finfo(dtype).eps * abs(value)
    assert merged.shape == x.shape
    assert float((merged - x).abs().max()) <= tolerance


@given(grids())
def test_what_does_not_overlap_is_copied(grid: TileGrid) -> None:
    time, high, wide = (AxisTiling(t.size and t.stride, t.stride, lead=t.lead) for t in grid.tilings)
    tight = TileGrid((time, high, wide), grid.extents)
    x = noise(1, 1, *grid.extents, dtype=torch.bfloat16)
    assert torch.equal(merge_tiles(cut(x, tight), tight), x)


def test_what_windows_skip_is_never_seen() -> None:
    time = AxisTiling(2, 1, AxisScale(up=4, causal=True), lead=1)
    axis = AxisTiling(4, 3)
    grid = TileGrid((time, axis, axis), (4, 5, 6))
    x = noise(1, 2, 13, 5, 6, dtype=torch.float64)
    tiles = {}
    for coord in grid.coords():
        t, h, w = grid.cell(coord)
        whole = torch.full((1, 2, *(window.length for window in (t, h, w))), torch.nan, dtype=x.dtype)
        begin = t.out_start
        own = x[..., begin : begin + t.length - t.skip, h.start : h.stop, w.start : w.stop]
        whole[:, :, t.skip :] = own
        tiles[coord] = whole
    assert grid.shape == (3, 2, 2)
    assert torch.allclose(merge_tiles(tiles, grid), x, rtol=0, atol=1e-13)


def test_corners_where_four_tiles_meet() -> None:
    # Each tile has its own value; the order is above first, then left, against what is blended already.
    axis = AxisTiling(4, 2)
    grid = TileGrid((WHOLE, axis, axis), (1, 5, 5))
    tiles = {
        coord: torch.full((1, 1, 1, *(w.length for w in grid.cell(coord)[1:])), float(n))
        for n, coord in enumerate(grid.coords())
    }
    by_loop = {coord: tile.clone() for coord, tile in tiles.items()}
    rows = []
    for i in range(grid.shape[1]):
        row = []
        for j in range(grid.shape[2]):
            tile = by_loop[0, i, j]
            if i:
                tile = LOOPS[-2](by_loop[0, i - 1, j], tile, 2)
            if j:
                tile = LOOPS[-1](by_loop[0, i, j - 1], tile, 2)
            row.append(tile[..., :2, :2])
        rows.append(torch.cat(row, -1))
    expected = torch.cat(rows, -2)[..., :5, :5]
    assert torch.equal(merge_tiles(tiles, grid), expected)


def test_images_without_a_time_dim() -> None:
    axis = AxisTiling(4, 3, AxisScale(up=2))
    grid = TileGrid((WHOLE, axis, axis), (1, 5, 7))
    x = noise(2, 3, 10, 14, dtype=torch.float64)
    tiles = {
        coord: x[..., 2 * h.start : 2 * h.stop, 2 * w.start : 2 * w.stop].clone()
        for coord in grid.coords()
        for _, h, w in [grid.cell(coord)]
    }
    assert torch.allclose(merge_tiles(tiles, grid), x, rtol=0, atol=1e-13)


def test_the_result_is_a_new_tensor() -> None:
    for extents in ((1, 3, 3), (1, 9, 9)):
        axis = AxisTiling(4, 3)
        grid = TileGrid((WHOLE, axis, axis), extents)
        tiles = cut(noise(1, 1, *extents), grid)
        merged = merge_tiles(tiles, grid)
        assert merged.is_contiguous()
        assert merged.data_ptr() not in {tile.data_ptr() for tile in tiles.values()}
