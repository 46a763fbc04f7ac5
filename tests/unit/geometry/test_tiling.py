# SPDX-License-Identifier: Apache-2.0
"""Windows that cover, grids of known shape, and geometries that are refused."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_vae.errors import ConfigurationError, GeometryError
from vllm_omni_vae.geometry import AxisScale, AxisTiling, TileGrid, Window, deal

WHOLE = AxisTiling(None)


@st.composite
def encode_axes(draw: Callable[..., int]) -> AxisTiling:
    """Pixels to latents: sizes and strides are whole latents, a window has at least one latent."""
    ratio = draw(st.sampled_from([1, 2, 4, 8, 16]))
    stride = draw(st.integers(1, 9))
    size = stride + draw(st.integers(0, 9))
    return AxisTiling(size * ratio, stride * ratio, AxisScale(down=ratio), minimum=ratio)


@st.composite
def decode_axes(draw: Callable[..., int]) -> AxisTiling:
    """Latents to pixels."""
    stride = draw(st.integers(1, 9))
    return AxisTiling(stride + draw(st.integers(0, 9)), stride, AxisScale(up=draw(st.sampled_from([1, 2, 8, 16]))))


@st.composite
def time_axes(draw: Callable[..., int]) -> AxisTiling:
    """Axes whose windows begin with a lead: causal time, and others that take context ahead, both ways through."""
    causal, ratio = draw(st.booleans()), draw(st.sampled_from([1, 2, 4, 8]))
    stride = draw(st.integers(1, 6))
    size, lead = stride + draw(st.integers(0, 6)), draw(st.integers(0 if causal else 1, 2))
    if draw(st.booleans()):
        return AxisTiling(size, stride, AxisScale(up=ratio, causal=causal), lead=lead + causal)
    scale = AxisScale(down=ratio, causal=causal)
    return AxisTiling(size * ratio, stride * ratio, scale, minimum=ratio, lead=lead * ratio + causal)


def assert_covers(tiling: AxisTiling, extent: int) -> None:
    windows = tiling.windows(extent)
    first = tiling.scale.length(tiling.lead)
    assert windows[0].start == windows[0].out_start == windows[0].skip == 0
    assert windows[-1].stop == extent
    assert windows[-1].out_stop == tiling.scale.length(extent)
    for before, after in pairwise(windows):
        assert after.start - before.start == tiling.stride
        assert after.start <= before.stop - tiling.lead, "no input is skipped"
        assert before.stop <= after.stop
        assert before.out_stop == after.out_start, "every output unit is kept exactly once"
        assert before.out_stop - before.out_start == tiling.keep + (first if before.start == 0 else 0)
        assert after.skip == first
    for window in windows:
        assert window.length == tiling.scale.length(window.stop - window.start) >= 1
        assert window.out_stop - window.out_start >= 1
        assert window.out_stop - window.out_start <= window.length - window.skip, "only what it yields is kept"
        assert window.stop - window.start >= (tiling.minimum if len(windows) > 1 or not tiling.lead else 1)
        assert window.stop - window.start < tiling.lead + (tiling.size or extent) + tiling.minimum


@given(encode_axes(), st.integers(1, 600))
def test_encode_windows_cover_exactly_once(tiling: AxisTiling, extent: int) -> None:
    assert_covers(tiling, max(extent, tiling.minimum))


@given(decode_axes(), st.integers(1, 120))
def test_decode_windows_cover_exactly_once(tiling: AxisTiling, extent: int) -> None:
    assert_covers(tiling, extent)


@given(time_axes(), st.integers(1, 80))
def test_windows_with_a_lead_cover_exactly_once(tiling: AxisTiling, units: int) -> None:
    assert_covers(tiling, int(tiling.scale.causal) + (units - tiling.scale.causal) * tiling.scale.down)


@given(time_axes(), st.integers(1, 80))
def test_what_a_window_with_a_lead_keeps_lies_where_it_belongs(tiling: AxisTiling, units: int) -> None:
    # Output unit n of a causal axis comes of the input up to unit n * down // up, so where what a window yields without
    # what it skips begins is known from where its own input begins.
    scale, alone = tiling.scale, int(tiling.scale.causal)
    windows = tiling.windows(alone + (units - alone) * scale.down)
    for window in windows:
        own = window.start + tiling.lead if window.start else 0
        assert scale.length(own) == window.out_start
        assert scale.length(window.stop) == window.out_start + window.length - window.skip
    for before, after in pairwise(windows):
        both = min(tiling.blend, after.length - after.skip)
        assert scale.length(before.stop) - after.out_start == both, "what is blended is the same part of the whole"


@given(st.integers(1, 6), st.integers(0, 6), st.sampled_from([1, 2, 4]), st.integers(1, 6), st.integers(1, 80))
def test_a_network_that_is_told_where_a_window_lies_needs_no_lead(
    stride: int, more: int, ratio: int, minimum: int, units: int
) -> None:
    scale = AxisScale(up=ratio, causal=True)
    tiling = AxisTiling(stride + more, stride, scale, minimum=minimum, placed=True)
    windows = tiling.windows(max(units, minimum))
    assert windows[-1].out_stop == scale.length(windows[-1].stop)
    for window in windows:
        assert window.skip == 0
        assert window.out_start == scale.length(window.start)
        assert window.out_start + window.length == scale.length(window.stop), "every unit is yielded in full"
    for before, after in pairwise(windows):
        assert before.out_stop == after.out_start < after.out_start + after.length
        both = scale.length(before.stop) - after.out_start
        assert both == min(tiling.blend, after.length), "what is blended is the same part of the whole"


def test_a_known_time_axis() -> None:
    decode = AxisTiling(2, 1, AxisScale(up=8, causal=True), lead=1)
    assert (decode.keep, decode.blend) == (8, 8)
    assert decode.windows(4) == (Window(0, 3, 17, 0, 9), Window(1, 4, 17, 9, 17, 1), Window(2, 4, 9, 17, 25, 1))
    assert decode.windows(1) == (Window(0, 1, 1, 0, 1),)
    encode = AxisTiling(16, 8, AxisScale(down=8, causal=True), minimum=8, lead=1)
    assert (encode.keep, encode.blend) == (1, 1)
    assert encode.windows(25) == (Window(0, 17, 3, 0, 2), Window(8, 25, 3, 2, 3, 1), Window(16, 25, 2, 3, 4, 1))
    assert encode.windows(1) == (Window(0, 1, 1, 0, 1),)


@given(encode_axes(), st.integers(1, 9), st.sampled_from([1, 2, 4, 8, 16]))
def test_sizes_just_above_a_whole_number_of_strides(tiling: AxisTiling, strides: int, beyond: int) -> None:
    extent = tiling.stride * strides + beyond
    assert_covers(tiling, max(extent, tiling.minimum))
    if tiling.minimum <= beyond <= tiling.stride:
        assert len(tiling.windows(extent)) == strides + 1
    elif beyond < tiling.minimum:
        assert len(tiling.windows(extent)) == strides, "the leftover joins the window before it"
        assert tiling.windows(extent)[-1].stop == extent


@given(st.one_of(encode_axes(), decode_axes()), st.integers(1, 300))
def test_where_diffusers_does_not_crash_the_windows_are_its_loops(tiling: AxisTiling, extent: int) -> None:
    starts = range(0, extent, tiling.stride)
    if extent - starts[-1] < tiling.minimum:
        return
    found = [(w.start, w.stop) for w in tiling.windows(extent)]
    assert found == [(start, min(start + (tiling.size or 0), extent)) for start in starts]


@given(st.one_of(encode_axes(), decode_axes()))
def test_what_is_blended_is_what_two_whole_neighbours_both_yield(tiling: AxisTiling) -> None:
    assert tiling.blend == tiling.scale.length(tiling.size or 0) - tiling.keep


def test_a_known_axis() -> None:
    tiling = AxisTiling(32, 24, AxisScale(down=8), minimum=8)
    assert (tiling.keep, tiling.blend) == (3, 1)
    assert tiling.windows(56) == (Window(0, 32, 4, 0, 3), Window(24, 56, 4, 3, 6), Window(48, 56, 1, 6, 7))
    assert tiling.windows(52) == (Window(0, 32, 4, 0, 3), Window(24, 52, 3, 3, 6))
    decode = AxisTiling(4, 3, AxisScale(up=8))
    assert (decode.keep, decode.blend) == (24, 8)
    assert decode.windows(5) == (Window(0, 4, 32, 0, 24), Window(3, 5, 16, 24, 40))


@given(st.integers(1, 200), st.integers(1, 16), st.integers(1, 16))
def test_an_axis_that_is_not_tiled_is_one_window(extent: int, up: int, down: int) -> None:
    for scale in (AxisScale(up=up), AxisScale(down=down), AxisScale(up=up, causal=True)):
        tiling = AxisTiling(None, scale=scale)
        assert tiling.blend == 0
        if scale.length(extent) < 1:
            with pytest.raises(GeometryError, match="too short"):
                tiling.windows(extent)
        else:
            length = scale.length(extent)
            assert tiling.windows(extent) == (Window(0, extent, length, 0, length),)


@pytest.mark.parametrize(
    ("scale", "extent", "length"),
    [
        (AxisScale(), 7, 7),
        (AxisScale(down=8), 61, 7),
        (AxisScale(down=8), 7, 0),
        (AxisScale(up=8), 7, 56),
        (AxisScale(up=4, causal=True), 1, 1),
        (AxisScale(up=4, causal=True), 21, 81),
        (AxisScale(down=4, causal=True), 81, 21),
        (AxisScale(down=4, causal=True), 1, 1),
        (AxisScale(down=4, causal=True), 4, 1),
        (AxisScale(down=2, causal=True), 5, 3),
        (AxisScale(), 0, 0),
        (AxisScale(up=4, causal=True), 0, 0),
    ],
)
def test_lengths(scale: AxisScale, extent: int, length: int) -> None:
    assert scale.length(extent) == length


@given(st.integers(1, 100), st.sampled_from([2, 4, 8]))
def test_time_there_and_back(latents: int, ratio: int) -> None:
    frames = AxisScale(up=ratio, causal=True).length(latents)
    assert frames == 1 + (latents - 1) * ratio
    assert AxisScale(down=ratio, causal=True).length(frames) == latents


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        # The size alone was changed: 320 pixels would come back as 256.
        ((128, 192, AxisScale(down=8)), "tile stride 192 is larger than the tile size 128, .* gaps"),
        ((16, 24, AxisScale(up=8)), "tile stride 24 is larger than the tile size 16"),
        # 10 x 10 latents instead of 12 x 12, or shifted content.
        ((100, 96, AxisScale(down=8)), "tile size 100 is not a multiple of the compression ratio 8, .* nearest: 96"),
        ((96, 76, AxisScale(down=8)), "tile stride 76 is not a multiple of the compression ratio 8, .* nearest: 72"),
        ((5, 5, AxisScale(down=8)), "nearest: 8"),
        ((0, 1, AxisScale()), "tile size 0 and stride 1 must be at least 1"),
        ((8, 0, AxisScale()), "must be at least 1"),
        ((-8, -8, AxisScale(down=8)), "must be at least 1"),
        ((8, 8, AxisScale(), 0), "at least 1"),
        ((2, 1, AxisScale(up=8, causal=True)), "a lead of 0 would shift the picture; it must be 1 or more"),
        ((16, 8, AxisScale(down=8, causal=True), 8, 8), "it must be 1 or more by whole multiples of .* ratio 8"),
        ((16, 8, AxisScale(down=8), 8, 1), "a lead of 1 would shift the picture; it must be 0 or more"),
    ],
)
def test_geometries_that_would_cut_or_shift_the_picture(arguments: tuple[int, int, AxisScale], reason: str) -> None:
    with pytest.raises(GeometryError, match=reason) as caught:
        AxisTiling(*arguments)
    assert isinstance(caught.value, ConfigurationError)


def test_an_axis_that_is_too_short() -> None:
    encode = AxisTiling(32, 24, AxisScale(down=8), minimum=8)
    for extent in (0, 7):
        with pytest.raises(GeometryError, match=f"an axis of {extent} units is too short; it takes at least 8"):
            encode.windows(extent)
    assert encode.windows(8) == (Window(0, 8, 1, 0, 1),)
    with pytest.raises(GeometryError, match="too short"):
        AxisTiling(4, 3).windows(0)


@pytest.mark.parametrize(
    ("height", "width", "shape"),
    [
        (720, 1280, (1, 4, 7)),
        (480, 832, (1, 3, 5)),
        (1080, 1920, (1, 6, 10)),
        (256, 256, (1, 2, 2)),
        (192, 192, (1, 1, 1)),
        (1280, 720, (1, 7, 4)),
    ],
)
def test_grids_of_wan_s_default_geometry(height: int, width: int, shape: tuple[int, int, int]) -> None:
    # Units are pixels for encode and latents for decode, never mixed: 40 tiles must not become 3124.
    axis = AxisTiling(256, 192, AxisScale(down=8), minimum=8)
    decode = AxisTiling(32, 24, AxisScale(up=8))
    encoded = TileGrid((WHOLE, axis, axis), (1, height, width))
    decoded = TileGrid((WHOLE, decode, decode), (1, height // 8, width // 8))
    assert encoded.shape == decoded.shape == shape
    assert len(encoded) == len(decoded) == shape[1] * shape[2]
    assert encoded.out_extents == (1, height // 8, width // 8)
    assert decoded.out_extents == (1, height, width)


def test_the_cost_of_720p_on_8_ranks() -> None:
    decode = AxisTiling(32, 24, AxisScale(up=8))
    time = AxisTiling(None, scale=AxisScale(up=4, causal=True))
    grid = TileGrid((time, decode, decode), (21, 90, 160))
    workloads = [grid.workload(coord) for coord in grid.coords()]
    assert (grid.shape, len(grid), grid.out_extents) == ((1, 4, 7), 28, (81, 720, 1280))
    assert grid.coverage == pytest.approx(1.65, abs=0.005)
    assert sum(workloads) == pytest.approx(grid.coverage * 21 * 90 * 160)
    assignment = deal(workloads, 8)
    assert assignment.idle_ranks == ()
    assert sum(len(assignment.tasks_of(rank)) for rank in range(8)) == 28
    assert 1.0 <= assignment.imbalance < 1.1


def test_27_and_28_tiles_over_8_ranks() -> None:
    even = deal([1] * 27, 8)
    assert sorted(even.loads, reverse=True) == [4, 4, 4, 3, 3, 3, 3, 3]
    assert even.imbalance == pytest.approx(32 / 27)
    assert sorted(deal([1] * 28, 8).loads, reverse=True) == [4, 4, 4, 4, 3, 3, 3, 3]


@given(decode_axes(), decode_axes(), st.integers(1, 30), st.integers(1, 30), st.integers(1, 5))
def test_a_grid_is_the_product_of_its_axes(
    high: AxisTiling, wide: AxisTiling, height: int, width: int, time: int
) -> None:
    grid = TileGrid((WHOLE, high, wide), (time, height, width))
    coords = list(grid.coords())
    assert coords == sorted(coords)
    assert len(coords) == len(grid) == len(high.windows(height)) * len(wide.windows(width))
    assert grid.cell((0, 0, 0)) == (WHOLE.windows(time)[0], high.windows(height)[0], wide.windows(width)[0])
    assert grid.coverage >= 1.0
    kept = sum(
        (h.out_stop - h.out_start) * (w.out_stop - w.out_start) for _, h, w in (grid.cell(coord) for coord in coords)
    )
    assert kept == grid.out_extents[1] * grid.out_extents[2]
    turned = TileGrid((WHOLE, wide, high), (time, width, height))
    assert turned.shape == (grid.shape[0], grid.shape[2], grid.shape[1])
    assert turned.coverage == pytest.approx(grid.coverage)


def test_grids_are_equal_by_value() -> None:
    axis = AxisTiling(4, 3)
    assert TileGrid((WHOLE, axis, axis), (1, 9, 9)) == TileGrid((WHOLE, axis, axis), (1, 9, 9))
    assert str(TileGrid((WHOLE, axis, axis), (1, 9, 9))) == str(TileGrid((WHOLE, axis, axis), (1, 9, 9)))
    assert TileGrid((WHOLE, axis, axis), (1, 9, 9)) != TileGrid((WHOLE, axis, AxisTiling(4, 2)), (1, 9, 9))
