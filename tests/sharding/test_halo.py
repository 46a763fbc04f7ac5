# SPDX-License-Identifier: Apache-2.0
"""A padded shard is the padded whole, cut where the layout cuts it."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sharding.spread import Ran, Spread, noise, results, worst
from vllm_omni_vae.distributed import LocalCommunicator
from vllm_omni_vae.errors import UnsupportedError
from vllm_omni_vae.sharding import SpatialShard
from vllm_omni_vae.sharding.halo import Edge, pad_with_halos

GRIDS = [(2, 1), (3, 1), (1, 2), (1, 4), (2, 2), (2, 3)]
NO_PAD = (0, 0)


def padded(
    spread: Spread, whole: torch.Tensor, height: Edge, width: Edge, mode: str = "constant", value: float = 0.0
) -> list[Ran]:
    return spread.each(
        lambda comm, shard: pad_with_halos(
            shard.shard(whole, spread.ratio(whole)), comm, shard.layout, height, width, mode=mode, value=value
        )
    )


def wanted(
    spread: Spread, whole: torch.Tensor, height: Edge, width: Edge, mode: str = "constant", value: float = 0.0
) -> list[torch.Tensor]:
    """Each rank's piece of the padded whole, with the rows around it that it asked for."""
    pad = [width.pad_before, width.pad_after, height.pad_before, height.pad_after]
    if mode == "constant":
        around = F.pad(whole, pad, value=value)
    else:
        around = F.pad(whole, pad + [0] * (2 * (whole.dim() - 4)), mode)
    pieces = []
    for rank in range(spread.size):
        layout = spread.layout(rank)
        cuts = []
        bounds = layout.bounds(rank, (whole.shape[-2], whole.shape[-1]), spread.ratio(whole))
        for dim, edge, cut in zip((-2, -1), (height, width), bounds, strict=True):
            before, after = layout.neighbours(dim)
            first = edge.pad_before if before is None else edge.before
            last = edge.pad_after if after is None else edge.after
            cuts.append(slice(cut.start + edge.pad_before - first, cut.stop + edge.pad_before + last))
        pieces.append(around[(..., *cuts)])
    return pieces


def expected_messages(spread: Spread, rank: int, height: Edge, width: Edge) -> int:
    layout = spread.layout(rank)
    count = 0
    for dim, edge in ((-2, height), (-1, width)):
        before, after = layout.neighbours(dim)
        count += (before is not None and edge.after > 0) + (after is not None and edge.before > 0)
    return count


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate"])
@pytest.mark.parametrize(("rows", "cols"), GRIDS)
def test_halos_are_the_neighbours_rows_and_corners_the_diagonal_ones(rows: int, cols: int, mode: str) -> None:
    spread = Spread(rows, cols, (7, 9))
    whole = noise(2, 3, 7, 9)
    one = Edge.same(1, 1)
    ran = padded(spread, whole, one, one, mode)
    assert worst(results(ran), wanted(spread, whole, one, one, mode)) == 0.0
    for rank, r in enumerate(ran):
        assert r.traffic.messages == expected_messages(spread, rank, one, one) <= 2 * ((rows > 1) + (cols > 1))
        assert r.traffic.collectives == {}


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate"])
@pytest.mark.parametrize(
    ("rows", "cols", "latents"), [(2, 1, (2, 5)), (3, 1, (3, 4)), (1, 4, (5, 4)), (2, 2, (2, 2)), (2, 3, (3, 4))]
)
def test_shards_of_one_row(rows: int, cols: int, latents: tuple[int, int], mode: str) -> None:
    spread = Spread(rows, cols, latents)
    whole = noise(1, 2, *latents)
    one = Edge.same(1, 1)
    assert worst(results(padded(spread, whole, one, one, mode)), wanted(spread, whole, one, one, mode)) == 0.0


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate"])
@pytest.mark.parametrize("pads", [((0, 1), (0, 1)), ((1, 0), (1, 0)), ((1, 2), (2, 1)), ((2, 0), NO_PAD)])
@pytest.mark.parametrize(("rows", "cols"), GRIDS)
def test_uneven_pads(rows: int, cols: int, pads: tuple[tuple[int, int], tuple[int, int]], mode: str) -> None:
    spread = Spread(rows, cols, (8, 10))
    whole = noise(1, 2, 8, 10)
    height, width = (Edge.same(*pad) for pad in pads)
    ran = padded(spread, whole, height, width, mode)
    assert worst(results(ran), wanted(spread, whole, height, width, mode)) == 0.0
    assert [r.traffic.messages for r in ran] == [expected_messages(spread, i, height, width) for i in range(len(ran))]


@pytest.mark.parametrize("pad", [(0, 1), (1, 0)])
@pytest.mark.parametrize(("rows", "cols", "latents"), [(2, 1, (2, 3)), (3, 1, (3, 3)), (1, 2, (3, 2))])
def test_a_row_reflected_beyond_a_shard_of_one_row_is_refused_or_right(
    rows: int, cols: int, latents: tuple[int, int], pad: tuple[int, int]
) -> None:
    """The row to reflect is the neighbour's, which a pad on one side alone does not bring."""
    spread = Spread(rows, cols, latents)
    whole = noise(1, 2, *latents)
    edge = Edge.same(*pad)
    height, width = (edge, Edge()) if rows > 1 else (Edge(), edge)
    ran = padded(spread, whole, height, width, "reflect")
    if any(r.error for r in ran):
        assert all(isinstance(r.error, UnsupportedError) for r in ran)
    else:
        assert worst(results(ran), wanted(spread, whole, height, width, "reflect")) == 0.0


@pytest.mark.parametrize(("rows", "cols", "shape"), [(2, 1, (4, 1)), (1, 2, (2, 6))])
def test_a_reflection_that_torch_refuses_on_the_whole_is_refused_on_a_shard(
    rows: int, cols: int, shape: tuple[int, int]
) -> None:
    """Along the axis that is not cut the whole extent is here, and too short to be reflected."""
    whole = noise(1, 2, *shape)
    edge = Edge.same(2, 2) if rows == 1 else Edge.same(1, 1)
    with pytest.raises(RuntimeError):
        F.pad(whole, [edge.pad_before, edge.pad_after] * 2, "reflect")
    ran = padded(Spread(rows, cols, shape), whole, edge, edge, "reflect")
    assert all(r.error for r in ran)


def test_neighbours_rows_and_padding_may_differ_in_number() -> None:
    spread = Spread(2, 2, (8, 8))
    whole = noise(1, 2, 8, 8)
    edge = Edge(before=1, after=0, pad_before=1, pad_after=1)
    wide = Edge(before=2, after=1, pad_before=1, pad_after=3)
    ran = padded(spread, whole, edge, wide, value=-3.5)
    assert worst(results(ran), wanted(spread, whole, edge, wide, value=-3.5)) == 0.0


@pytest.mark.parametrize("outer", [(2, 0), (1, 2, 0, 3)])
@pytest.mark.parametrize(("rows", "cols"), [(2, 1), (1, 3), (2, 2)])
def test_outer_dims_are_padded_in_the_same_buffer(rows: int, cols: int, outer: tuple[int, ...]) -> None:
    spread = Spread(rows, cols, (5, 6))
    whole = noise(2, 3, 4, 5, 6)
    one = Edge.same(1, 1)

    def body(comm: LocalCommunicator, shard: SpatialShard) -> torch.Tensor:
        return pad_with_halos(shard.shard(whole), comm, shard.layout, one, one, outer=outer, value=2.5)

    around = F.pad(whole, [0, 0, 0, 0, *outer], value=2.5)
    assert worst(results(spread.each(body)), wanted(spread, around, one, one, value=2.5)) == 0.0


@pytest.mark.parametrize(
    ("shape", "memory_format"), [((2, 3, 6, 5), torch.channels_last), ((2, 3, 2, 6, 5), torch.channels_last_3d)]
)
@pytest.mark.parametrize("mode", ["constant", "replicate"])
def test_the_memory_format_is_kept(shape: tuple[int, ...], memory_format: torch.memory_format, mode: str) -> None:
    spread = Spread(2, 2, (6, 5))
    one = Edge.same(1, 1)
    dense = noise(*shape)
    whole = dense.contiguous(memory_format=memory_format)
    got = results(padded(spread, whole, one, one, mode))
    assert worst(got, wanted(spread, dense, one, one, mode)) == 0.0
    assert all(g.is_contiguous(memory_format=memory_format) for g in got)
    assert all(g.is_contiguous() for g in results(padded(spread, dense, one, one, mode)))


def test_views_with_gaps_arrive_as_they_are() -> None:
    spread = Spread(2, 2, (6, 5))
    one = Edge.same(1, 1)
    whole = noise(1, 6, 5, 3, 2).permute(0, 3, 4, 1, 2)

    def body(comm: LocalCommunicator, shard: SpatialShard) -> torch.Tensor:
        rows, cols = shard.layout.bounds(shard.layout.rank, (6, 5), 1)
        return pad_with_halos(whole[..., rows, cols], comm, shard.layout, one, one)

    assert worst(results(spread.each(body)), wanted(spread, whole, one, one)) == 0.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_values_travel_in_their_own_type(dtype: torch.dtype) -> None:
    spread = Spread(1, 2, (3, 5))
    whole = (noise(1, 2, 3, 5) * 100).to(dtype)
    one = Edge.same(1, 1)
    ran = padded(spread, whole, one, one)
    assert all(r.dtype == dtype for r in results(ran))
    assert worst(results(ran), wanted(spread, whole, one, one)) == 0.0
    assert [r.traffic.bytes for r in ran] == [2 * 5 * whole.element_size()] * 2


def test_the_input_is_not_written_to() -> None:
    whole = noise(1, 2, 6, 6)
    one = Edge.same(2, 2)

    def body(comm: LocalCommunicator, shard: SpatialShard) -> bool:
        mine = shard.shard(whole)
        kept = mine.clone()
        pad_with_halos(mine, comm, shard.layout, one, one, value=7.0)
        return torch.equal(mine, kept)

    assert all(results(Spread(2, 2, (6, 6)).each(body)))


def test_nothing_is_sent_where_nothing_is_cut_or_asked_for() -> None:
    whole = noise(1, 2, 6, 6)
    for spread, height, width in (
        (Spread(2, 1, (6, 6)), Edge(), Edge.same(1, 1)),
        (Spread(1, 2, (6, 6)), Edge.same(2, 2), Edge()),
        (Spread(2, 2, (6, 6)), Edge(), Edge()),
        (Spread(1, 1, (6, 6)), Edge.same(1, 1), Edge.same(1, 1)),
        (Spread(2, 2, (6, 6)), Edge(pad_before=1), Edge(pad_after=2)),
    ):
        ran = padded(spread, whole, height, width)
        assert worst(results(ran), wanted(spread, whole, height, width)) == 0.0
        assert [r.traffic.messages for r in ran] == [0] * spread.size


@pytest.mark.parametrize(
    ("rows", "cols", "latents", "edge", "scale"),
    [
        (2, 1, (3, 4), Edge.same(2, 2), 1),
        (3, 1, (5, 4), Edge.same(0, 2), 1),
        (1, 4, (4, 6), Edge.same(2, 0), 1),
        (2, 2, (5, 3), Edge.same(2, 2), 1),
        (2, 1, (3, 4), Edge.same(5, 5), 4),
    ],
)
def test_a_halo_wider_than_the_thinnest_shard_is_refused_on_all_ranks_alike(
    rows: int, cols: int, latents: tuple[int, int], edge: Edge, scale: int
) -> None:
    whole = noise(1, 2, latents[0] * scale, latents[1] * scale)
    ran = padded(Spread(rows, cols, latents), whole, edge, edge)
    assert {type(r.error) for r in ran} == {UnsupportedError}
    assert len({str(r.error) for r in ran}) == 1
    assert str(ran[0].error).startswith(f"a halo of {max(edge.before, edge.after)} rows is wider than the thinnest")
    assert [r.traffic.messages for r in ran] == [0] * len(ran)


def test_a_halo_as_wide_as_the_thinnest_shard_is_exact() -> None:
    spread = Spread(3, 1, (7, 4))
    whole = noise(1, 2, 14, 8)
    edge = Edge.same(4, 4)
    assert worst(results(padded(spread, whole, edge, Edge())), wanted(spread, whole, edge, Edge())) == 0.0


@pytest.mark.parametrize("halo", [8, 9, 12])
def test_a_remainder_on_the_last_shard_does_not_change_what_is_refused(halo: int) -> None:
    """One latent of 8 rows and 4 more are 12 rows there, yet the thinnest shard has 8."""
    spread = Spread(2, 1, (2, 1))
    whole = noise(1, 1, 20, 8)
    edge = Edge.same(halo, halo)

    def body(comm: LocalCommunicator, shard: SpatialShard) -> torch.Tensor:
        return pad_with_halos(shard.shard(whole, 8), comm, shard.layout, edge, Edge())

    if halo > 8:
        ran = spread.each(body)
        assert {type(r.error) for r in ran} == {UnsupportedError}
        assert len({str(r.error) for r in ran}) == 1
    else:
        around = F.pad(whole, [0, 0, halo, halo])
        assert worst(results(spread.each(body)), [around[..., :24, :], around[..., 8:, :]]) == 0.0


@st.composite
def cases(draw: st.DrawFn) -> tuple[Spread, torch.Tensor, Edge, Edge, str]:
    rows, cols = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    latents = draw(st.integers(max(2, rows), 8)), draw(st.integers(max(2, cols), 8))
    mode = draw(st.sampled_from(["constant", "reflect", "replicate"]))
    scale = draw(st.sampled_from([1, 1, 2]))
    edges = []
    for parts, extent in zip((rows, cols), latents, strict=True):
        thinnest = extent // parts * scale
        widest = min(3, thinnest) if mode != "reflect" else min(3, thinnest - 1)
        widths = [draw(st.integers(0, widest)) for _ in range(4)]
        edges.append(Edge(*widths) if mode == "constant" else Edge.same(*widths[:2]))
    head = draw(st.sampled_from([(1, 2), (2, 1, 2)]))
    whole = noise(*head, latents[0] * scale, latents[1] * scale, seed=draw(st.integers(0, 99)))
    return Spread(rows, cols, latents), whole, *edges, mode


@settings(max_examples=60)
@given(case=cases())
def test_any_grid_any_edge_any_mode(case: tuple[Spread, torch.Tensor, Edge, Edge, str]) -> None:
    spread, whole, height, width, mode = case
    ran = padded(spread, whole, height, width, mode, value=1.5)
    assert worst(results(ran), wanted(spread, whole, height, width, mode, value=1.5)) == 0.0
    assert [r.traffic.messages for r in ran] == [expected_messages(spread, i, height, width) for i in range(len(ran))]
