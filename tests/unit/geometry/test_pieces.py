# SPDX-License-Identifier: Apache-2.0
"""Pieces for ranks: they cover, meet without overlap, and come together again as what was cut."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.vaes import RELEASED, VAES, tiny_vae
from vllm_omni_vae.autoencoders import Operation, distributed_class
from vllm_omni_vae.errors import GeometryError
from vllm_omni_vae.geometry import AxisPieces, AxisScale, AxisTiling, Partition, RankGrid, TileGrid, cut_for_ranks, deal
from vllm_omni_vae.tiling import TileTask, merge_tiles, without_margins

WHOLE = AxisTiling(None)


@st.composite
def axes(draw: Callable[..., Any]) -> tuple[AxisPieces, int]:
    """Pixels to latents or back, and an extent that is long enough; not always a whole number of latents."""
    ratio, parts, margin = draw(st.sampled_from([1, 2, 8, 16, 32])), draw(st.integers(1, 9)), draw(st.integers(0, 9))
    latents = parts + draw(st.integers(0, 40))
    if draw(st.booleans()):
        return AxisPieces(parts, margin, AxisScale(up=ratio)), latents
    return AxisPieces(parts, margin, AxisScale(down=ratio)), latents * ratio + draw(st.integers(0, ratio - 1))


@given(axes())
def test_pieces_cover_once_with_a_margin_on_inner_edges(axis: tuple[AxisPieces, int]) -> None:
    pieces, extent = axis
    windows, unit, up = pieces.windows(extent), pieces.scale.down, pieces.scale.up
    owned = Partition(extent // unit, pieces.parts)
    assert [window.length for window in windows] == [rows * up for rows in owned.row_sizes]
    assert (windows[0].start, windows[0].out_start, windows[-1].stop) == (0, 0, extent)
    assert windows[-1].out_stop == pieces.scale.length(extent)
    for before, after in pairwise(windows):
        assert before.out_stop == after.out_start
    for part, window in enumerate(windows):
        first, last = owned.scaled(unit).bounds(part)
        assert window.start == max(0, first - pieces.margin * unit)
        assert window.stop == (extent if part == pieces.parts - 1 else min(extent, last + pieces.margin * unit))
        assert (window.start % unit, window.skip) == (0, 0)
        assert window.drop == (first - window.start) // unit * up
        assert pieces.scale.length(window.stop - window.start) >= window.drop + window.length


@pytest.mark.parametrize(
    ("parts", "minimum", "extent"), [(3, 1, 2), (2, 4, 6), (0, 1, 8), (2, 0, 8)], ids=["few", "thin", "none", "zero"]
)
def test_what_cannot_be_cut_is_refused(parts: int, minimum: int, extent: int) -> None:
    with pytest.raises(GeometryError):
        AxisPieces(parts, minimum=minimum).windows(extent)


def test_a_margin_may_make_a_piece_thick_enough() -> None:
    assert [w.stop - w.start for w in AxisPieces(3, 1, minimum=2).windows(3)] == [2, 3, 2]
    with pytest.raises(GeometryError, match="3 latents cannot be cut into 3 pieces of at least 1 that read, with a"):
        AxisPieces(3, 0, minimum=2).windows(3)


def test_causal_time_and_a_negative_margin_are_refused() -> None:
    for bad in ({"scale": AxisScale(up=8, causal=True)}, {"margin": -1}):
        with pytest.raises(GeometryError, match="causal time stays whole"):
            AxisPieces(2, **bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "latents", "expected"),
    [
        (8, (90, 160), (2, 4)),
        (8, (160, 90), (2, 4)),
        (6, (90, 160), (2, 3)),
        (6, (3, 2), (3, 2)),
        (4, (1, 9), (1, 4)),
        (4, (9, 1), (4, 1)),
        (7, (90, 160), (1, 7)),
        (7, (90, 5), (7, 1)),
        (1, (1, 1), (1, 1)),
    ],
)
def test_the_squarest_grid_that_fits(ranks: int, latents: tuple[int, int], expected: tuple[int, int]) -> None:
    grid = cut_for_ranks((WHOLE, AxisTiling(4, 3), AxisTiling(4, 3)), (5, *latents), ranks, 2)
    assert grid.shape == (1, *expected)


def test_no_grid_fits() -> None:
    with pytest.raises(GeometryError, match="2x1 latents cannot give each of 4 ranks a piece of at least 1x1"):
        cut_for_ranks((WHOLE, AxisTiling(4, 3), AxisTiling(4, 3)), (1, 2, 1), 4, 0)


@given(st.integers(1, 64))
def test_grids_of_ranks_from_the_squarest_on(size: int) -> None:
    grids = RankGrid.of_size(size)
    assert {grid.size for grid in grids} == {size}
    assert grids[0] == RankGrid.squarest(size)
    assert len(set(grids)) == len(grids) == sum(size % n == 0 for n in range(1, size + 1))
    for one, other in pairwise(grids):
        assert (abs(one.rows - one.cols), one.rows) < (abs(other.rows - other.cols), other.rows)


@given(st.integers(1, 12), st.integers(1, 40), st.integers(1, 40), st.integers(0, 5))
def test_one_piece_for_each_rank(ranks: int, rows: int, cols: int, margin: int) -> None:
    try:
        grid = cut_for_ranks((WHOLE, AxisTiling(4, 3), AxisTiling(4, 3)), (1, rows, cols), ranks, margin)
    except GeometryError:
        assert not any(g.rows <= rows and g.cols <= cols for g in RankGrid.of_size(ranks))
        return
    assert len(grid) == ranks
    assert sorted(deal([grid.workload(coord) for coord in grid.coords()], ranks).owners) == list(range(ranks))
    assert grid.coverage >= 1
    assert (grid.coverage == 1) == (margin == 0 or ranks == 1)


def local(operation: Operation, x: torch.Tensor, ratio: int, extents: tuple[int, int]) -> torch.Tensor:
    """Something that is local to a latent: the sum of its pixels, or as many pixels with its value plus their place."""
    if operation is Operation.DECODE:
        grown = x.repeat_interleave(ratio, -2).repeat_interleave(ratio, -1)
        place = torch.arange(ratio).repeat(x.shape[-1])
        return grown * 100 + place
    cells = x[..., : extents[0] * ratio, : extents[1] * ratio].unflatten(-1, (-1, ratio)).unflatten(-3, (-1, ratio))
    return cells.sum((-3, -1))


@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize("margin", [0, 1, 2])
@pytest.mark.parametrize("name", RELEASED)
def test_split_and_merge_is_the_whole_for_what_is_local_to_a_latent(
    name: str, margin: int, parts: int, operation: Operation
) -> None:
    vae = tiny_vae(name)
    vae.__class__ = distributed_class(vae)
    spec, ratio = vae.spec, vae.spec.tiling(vae, Operation.ENCODE)[1].scale.down
    leftover = 5 if operation is Operation.ENCODE and VAES[name].unit == 1 else 0
    rows, cols = 9, 13
    extents = (3 if spec.has_time else 1, rows, cols)
    if operation is Operation.ENCODE:
        extents = (extents[0], rows * ratio + leftover, cols * ratio)
    grid = spec.pieces(vae, operation, extents, parts, margin)
    x = torch.randint(0, 1000, (2, 3, *(extents if spec.has_time else extents[1:])))

    def run(task: TileTask) -> torch.Tensor:
        high, wide = (n // (ratio if operation is Operation.ENCODE else 1) for n in task.tensor.shape[-2:])
        return local(operation, task.tensor, ratio, (high, wide))

    exec = without_margins(run, grid)
    tiles = {c: exec(TileTask(0, c, spec.cut(x, grid.cell(c)))) for c in grid.coords()}
    assert torch.equal(merge_tiles(tiles, TileGrid(grid.tilings, extents)), local(operation, x, ratio, (rows, cols)))
