# SPDX-License-Identifier: Apache-2.0
"""Who holds what: every unit exactly once, and the same answer on every rank."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.sharding.spread import Spread, noise, results
from vllm_omni_vae.distributed import NullCommunicator
from vllm_omni_vae.errors import GeometryError, UnsupportedError
from vllm_omni_vae.geometry import Partition, RankGrid
from vllm_omni_vae.sharding import ShardLayout, SpatialShard


@st.composite
def spreads(draw: st.DrawFn) -> Spread:
    rows, cols = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return Spread(rows, cols, (draw(st.integers(rows, 9)), draw(st.integers(cols, 9))))


@given(spread=spreads(), ratio=st.sampled_from([1, 4, 8]), rest=st.tuples(st.integers(0, 7), st.integers(0, 7)))
def test_pieces_cover_the_whole_exactly_once(spread: Spread, ratio: int, rest: tuple[int, int]) -> None:
    extents = tuple(n * ratio + r % ratio for n, r in zip(spread.latents, rest, strict=True))
    held = torch.zeros(extents, dtype=torch.int64)
    for rank in range(spread.size):
        layout = spread.layout(rank)
        bounds = layout.bounds(rank, extents, ratio)
        held[bounds] += 1
        assert all(spread.layout(other).bounds(rank, extents, ratio) == bounds for other in range(spread.size))
        row, col = layout.grid.coords(rank)
        for cut, latents, extent, last in zip(
            bounds, layout.latents, extents, (row == spread.rows - 1, col == spread.cols - 1), strict=True
        ):
            assert cut.start % ratio == 0
            assert cut.stop - cut.start == latents * ratio + (extent % ratio if last else 0)
    assert bool((held == 1).all())


@given(spread=spreads(), scale=st.sampled_from([1, 2, 4, 8]))
def test_facts_about_other_ranks_are_arithmetic(spread: Spread, scale: int) -> None:
    layouts = [spread.layout(rank) for rank in range(spread.size)]
    areas = [rows * cols for rows, cols in (layout.latents for layout in layouts)]
    for layout in layouts:
        rows, cols = layout.latents
        assert layout.positions(rows * cols * scale) == [area * scale for area in areas]
        for dim, axis in ((-2, 0), (-1, 1)):
            thinnest = min(other.latents[axis] for other in layouts)
            assert min(layout.extents(dim, rows * scale, cols * scale)) == thinnest * scale
            assert layout.sharded(dim) == ((spread.rows, spread.cols)[axis] > 1)


@pytest.mark.parametrize(
    ("rank", "height", "width"),
    [(0, (None, 3), (None, 1)), (1, (None, 4), (0, 2)), (2, (None, 5), (1, None)), (4, (1, None), (3, 5))],
)
def test_neighbours(rank: int, height: tuple[int | None, int | None], width: tuple[int | None, int | None]) -> None:
    layout = Spread(2, 3, (5, 7)).layout(rank)
    assert layout.neighbours(-2) == height
    assert layout.neighbours(-1) == width


def test_positions_above_latent_scale_are_refused_on_every_rank_where_the_last_pieces_hold_a_remainder() -> None:
    for rank in range(6):
        layout = dataclasses.replace(Spread(2, 3, (5, 7)).layout(rank), remainder=True)
        rows, cols = layout.latents
        assert layout.positions(rows * cols) == [9, 6, 6, 6, 4, 4]
        for height, width in ((2 * rows, 2 * cols), (2 * rows + 1, 2 * cols), (3 * rows, 3 * cols), (rows, cols + 1)):
            with pytest.raises(UnsupportedError, match="is no whole number of latents; crop or pad it to one"):
                layout.positions(height * width)


def test_positions_that_a_shard_cannot_hold_are_refused() -> None:
    layout = Spread(2, 1, (5, 4)).layout(0)
    for local in (0, 11, 13):
        with pytest.raises(GeometryError, match=f"{local} positions do not come from a shard of 3x4 latents"):
            layout.positions(local)


@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((2, 4, 3, 2), (2, 3)),
        ((2, 4, 5, 6, 4), (3, 4)),
        ((2, 4, 24, 16), (2, 3)),
        ((2, 3, 2, 4), (1, 2)),
        ((2, 5, 6, 4, 7), (2, 3)),
        ((2, 4, 3, 4), None),
        ((2, 4, 5, 2), None),
        ((4, 3, 2), None),
        ((4, 6), None),
    ],
)
def test_spatial_dims_are_told_by_their_sizes(shape: tuple[int, ...], dims: tuple[int, int] | None) -> None:
    assert Spread(2, 2, (5, 3)).layout(0).spatial_dims(torch.empty(shape)) == dims


def test_channels_that_were_moved_last_are_not_taken_for_columns_of_the_same_size() -> None:
    for rank in range(4):
        layout = Spread(2, 2, (2, 2)).layout(rank)
        maps = torch.empty(1, 4, 3, 4, 4)
        assert layout.cut_dims(maps) == {3, 4}
        assert layout.cut_dims(maps.contiguous(memory_format=torch.channels_last_3d)) == {3, 4}
        assert layout.cut_dims(maps.movedim(1, -1)) == {2, 3}
        assert layout.cut_dims(torch.empty(1, 3, 4, 4, 4)) == {3, 4}, "refused rather than taken for local"


def test_a_piece_is_a_tensor_of_its_own_in_the_format_of_the_whole() -> None:
    whole = noise(2, 3, 6, 5).contiguous(memory_format=torch.channels_last)
    kept = whole.clone()
    for piece in Spread(3, 2, (6, 5)).pieces(whole):
        assert piece.is_contiguous(memory_format=torch.channels_last)
        piece.zero_()
    assert torch.equal(whole, kept)


@pytest.mark.parametrize(("height", "width"), [(Partition(4, 2), Partition(4, 2)), (Partition(4, 3), Partition(4, 1))])
def test_partitions_that_do_not_fit_the_grid_are_refused(height: Partition, width: Partition) -> None:
    with pytest.raises(GeometryError, match="do not fit"):
        ShardLayout(RankGrid(2, 1), height, width, 0)


@pytest.mark.parametrize(("rows", "cols", "latents"), [(3, 1, (2, 9)), (1, 4, (9, 3)), (2, 2, (1, 9))])
def test_a_rank_without_a_latent_is_refused(rows: int, cols: int, latents: tuple[int, int]) -> None:
    with pytest.raises(GeometryError, match=f"{latents[0]}x{latents[1]} latents cannot give each of {rows}x{cols}"):
        Spread(rows, cols, latents).layout(0)


@pytest.mark.parametrize(("rank", "size"), [(1, 2), (0, 3), (0, 1)])
def test_a_communicator_of_other_ranks_is_refused(rank: int, size: int) -> None:
    with pytest.raises(GeometryError, match=f"rank {rank} of {size} is not rank 0"):
        SpatialShard(NullCommunicator(rank, size), Spread(2, 1, (4, 4)).layout(0))


@pytest.mark.parametrize("dst", [0, 3])
@pytest.mark.parametrize("scale", [1, 3])
def test_gather_puts_uneven_pieces_together_on_one_rank(dst: int, scale: int) -> None:
    spread = Spread(2, 2, (5, 3))
    whole = noise(2, 3, 2, 5 * scale, 3 * scale)
    extents = (5 * scale, 3 * scale)
    ran = spread.each(lambda comm, shard: shard.gather(shard.shard(whole, scale), extents, comm, dst))
    for rank, got in enumerate(results(ran)):
        if rank == dst:
            assert torch.equal(got, whole)
        else:
            assert got is None
        assert ran[rank].traffic.messages == (rank != dst)
        assert ran[rank].traffic.bytes == (0 if rank == dst else spread.pieces(whole)[rank].nbytes)


def test_gather_takes_pieces_that_are_not_contiguous() -> None:
    whole = noise(1, 4, 6, 5).contiguous(memory_format=torch.channels_last)
    ran = Spread(1, 2, (6, 5)).each(lambda comm, shard: shard.gather(shard.shard(whole), (6, 5), comm, 0))
    assert torch.equal(results(ran)[0], whole)


@pytest.mark.parametrize("shape", [(1, 4, 3, 5), (1, 4, 2, 5), (1, 4, 6, 10)])
def test_a_piece_that_is_not_where_it_was_cut_is_refused(shape: tuple[int, ...]) -> None:
    shard = SpatialShard(NullCommunicator(1, 2), Spread(2, 1, (7, 5)).layout(1))
    if shape[-2] == 3:
        shard.check(torch.empty(shape), (7, 5))
        return
    with pytest.raises(GeometryError, match=r"came out as .* instead of \(1, 4, 3, 5\)"):
        shard.check(torch.empty(shape), (7, 5))
