# SPDX-License-Identifier: Apache-2.0
"""Tiles that are added up times their weights make what blending them in order makes, on every grid."""

import random
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.vaes import noise
from tests.unit.tiling.test_merge import DTYPES, WHOLE, grids
from vllm_omni_vae.geometry import AxisScale, AxisTiling, TileGrid
from vllm_omni_vae.tiling import add_tile, merge_tiles, sum_shape, tile_weights

Tiles = Mapping[tuple[int, ...], torch.Tensor]
EPSILONS = 8
"""What `Comparison` allows between the two merges, in epsilons of the largest value."""


def unlike_tiles(
    grid: TileGrid, dtype: torch.dtype = torch.float64, *, has_time: bool = True
) -> dict[tuple[int, ...], torch.Tensor]:
    """Noise of its own for every tile, so that no weight can hide behind equal values."""
    found = {}
    for number, coord in enumerate(grid.coords()):
        lengths = [window.length for window in grid.cell(coord)]
        found[coord] = noise(2, 3, *lengths[0 if has_time else 1 :], seed=number, dtype=torch.float64).to(dtype)
    return found


def summed(tiles: Tiles, grid: TileGrid, seed: int = 0) -> torch.Tensor:
    """The sum, with the tiles in an order of its own."""
    first = tiles[0, 0, 0]
    total = first.new_zeros(sum_shape(first.shape, grid))
    coords = list(grid.coords())
    random.Random(seed).shuffle(coords)
    for coord in coords:
        add_tile(total, tiles[coord], grid, coord)
    return total


def blended(tiles: Tiles, grid: TileGrid) -> torch.Tensor:
    return merge_tiles({coord: tile.clone() for coord, tile in tiles.items()}, grid)


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    assert one.shape == other.shape
    return float((one.double() - other.double()).abs().max() / other.double().abs().max())


@given(grids(), st.integers(0, 3))
def test_any_grid_in_any_order(grid: TileGrid, seed: int) -> None:
    tiles = unlike_tiles(grid)
    assert apart(summed(tiles, grid, seed), blended(tiles, grid)) <= 1e-12


@given(grids(), st.sampled_from(DTYPES))
def test_in_every_type_within_what_rounding_explains(grid: TileGrid, dtype: torch.dtype) -> None:
    tiles = unlike_tiles(grid, dtype)
    assert apart(summed(tiles, grid), blended(tiles, grid)) <= EPSILONS * torch.finfo(dtype).eps


@given(grids())
def test_weights_sum_to_one_so_a_constant_stays_constant(grid: TileGrid) -> None:
    tiles = {coord: torch.ones_like(tile) for coord, tile in unlike_tiles(grid).items()}
    assert torch.allclose(summed(tiles, grid), torch.ones(()).double(), rtol=0, atol=1e-14)
    for coord in grid.coords():
        weights = tile_weights(grid, coord, torch.float64)
        assert float(weights.min()) >= 0
        assert float(weights.max()) <= 1


@pytest.mark.parametrize(
    ("size", "stride", "extent"),
    [(4, 3, 10), (4, 3, 11), (4, 3, 13), (6, 3, 16), (6, 2, 13), (7, 2, 15), (9, 1, 12), (5, 5, 12), (8, 6, 8)],
)
def test_overlaps_of_two_three_and_many_tiles_and_every_leftover(size: int, stride: int, extent: int) -> None:
    time = AxisTiling(2, 1, AxisScale(up=4, causal=True), lead=1)
    for least in (1, 2):
        rows = AxisTiling(size, stride, AxisScale(up=2), minimum=least)
        grid = TileGrid((time, rows, AxisTiling(4, 3, AxisScale(up=2))), (4, extent, 9))
        assert grid.shape[0] == 3
        tiles = unlike_tiles(grid)
        assert apart(summed(tiles, grid), blended(tiles, grid)) <= 1e-12


def test_corners_where_four_tiles_meet() -> None:
    # Blending in order takes the two upper tiles from the left a second time, when the lower row is: they share by the
    # square of the ramp. A plain product of ramps is not what diffusers makes.
    axis = AxisTiling(6, 4)
    grid = TileGrid((WHOLE, axis, axis), (1, 8, 8))
    assert grid.shape == (1, 2, 2)
    v, h = (torch.tensor([0.0, 0.5]).double().view(shape) for shape in ((2, 1), (1, 2)))
    corner = {
        (0, 0, 0): (1 - v) * (1 - h**2),
        (0, 0, 1): (1 - v) * h**2,
        (0, 1, 0): v * (1 - h),
        (0, 1, 1): v * h,
    }
    for coord, wanted in corner.items():
        _, i, j = coord
        weights = tile_weights(grid, coord, torch.float64)
        found = weights[0 if i else 4 :, 0 if j else 4 :][:2, :2]
        assert torch.equal(found, wanted), coord
    product = tile_weights(grid, (0, 0, 1), torch.float64)[4:, :2]
    assert not torch.equal(product, (1 - v) * h)


def test_what_windows_skip_is_never_seen() -> None:
    time = AxisTiling(2, 1, AxisScale(up=4, causal=True), lead=1)
    grid = TileGrid((time, AxisTiling(4, 3), AxisTiling(4, 3)), (4, 5, 6))
    tiles = unlike_tiles(grid)
    expected = blended(tiles, grid)
    for (t, i, j), tile in tiles.items():
        tile[:, :, : grid.cell((t, i, j))[0].skip] = torch.nan
    assert apart(summed(tiles, grid), expected) <= 1e-12


def test_pictures_without_a_time_dim() -> None:
    axis = AxisTiling(4, 3, AxisScale(up=2))
    grid = TileGrid((WHOLE, axis, axis), (1, 5, 7))
    tiles = unlike_tiles(grid, has_time=False)
    found = summed(tiles, grid)
    assert found.shape == (2, 3, 10, 14)
    assert apart(found, blended(tiles, grid)) <= 1e-12


def test_a_tile_is_left_as_it_is_and_only_its_place_is_written() -> None:
    grid = TileGrid((WHOLE, AxisTiling(4, 3), AxisTiling(4, 3)), (1, 8, 8))
    tile = noise(1, 2, 1, 4, 4)
    before, total = tile.clone(), torch.full((1, 2, 1, 8, 8), 7.0)
    add_tile(total, tile, grid, (0, 1, 1))
    assert torch.equal(tile, before)
    total[..., 3:7, 3:7] = 7
    assert torch.equal(total, torch.full_like(total, 7))


def test_weights_are_made_on_the_device() -> None:
    axis = AxisTiling(4, 2)
    grid = TileGrid((axis, axis, axis), (6, 6, 6))
    weights = tile_weights(grid, (1, 1, 1), torch.float32, torch.device("meta"))
    assert (weights.device.type, weights.shape) == ("meta", (4, 4, 4))
    total = torch.zeros(1, 3, 6, 6, 6, device="meta", dtype=torch.bfloat16)
    add_tile(total, torch.zeros(1, 3, 4, 4, 4, device="meta", dtype=torch.bfloat16), grid, (0, 0, 0))
