# SPDX-License-Identifier: Apache-2.0
"""Each operator on a shard against the same operator on the whole map; what a shard cannot do is refused by name."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.sharding.spread import Ran, Spread, noise, results, worst
from vllm_omni_vae.errors import DeadlockError, UnsupportedError

GRIDS = [(2, 1), (3, 1), (1, 2), (1, 3), (2, 2)]
EXACT = 1e-12


def equal(
    spread: Spread,
    operator: Callable[..., torch.Tensor],
    whole: torch.Tensor,
    *,
    ratio: int | None = None,
    out_ratio: int | None = None,
    tolerance: float = EXACT,
) -> list[Ran]:
    """Every rank's result is its share of what ``operator`` makes of the whole, which is left as it was."""
    kept = whole.clone()
    wanted = operator(whole)
    ran = spread.run(operator, whole, ratio=ratio)
    error = worst(results(ran), spread.pieces(wanted, out_ratio))
    assert error <= tolerance * max(1.0, float(wanted.abs().max())), error
    assert torch.equal(whole, kept)
    return ran


def messages(ran: list[Ran]) -> list[int]:
    return [r.traffic.messages for r in ran]


def neighbours(spread: Spread, rank: int) -> int:
    layout = spread.layout(rank)
    return sum(peer is not None for dim in (-2, -1) for peer in layout.neighbours(dim))


class TestConvolution:
    @pytest.mark.parametrize(("rows", "cols"), GRIDS)
    @pytest.mark.parametrize("kernel", [1, 3, 5])
    @pytest.mark.parametrize("padding", ["zero", "same", "number"])
    def test_shape_preserving_2d(self, kernel: int, padding: str, rows: int, cols: int) -> None:
        spread = Spread(rows, cols, (7, 8))
        layer = nn.Conv2d(3, 4, kernel, padding="same" if padding == "same" else kernel // 2, dtype=torch.float64)
        if padding == "zero" and kernel > 1:
            layer.padding = (0, 0)
            full = nn.Sequential(nn.ZeroPad2d(kernel // 2), layer)
        else:
            full = nn.Sequential(layer)
        ran = equal(spread, full, noise(2, 3, 7, 8))
        assert messages(ran) == [neighbours(spread, r) * (kernel > 1) for r in range(spread.size)]

    @pytest.mark.parametrize(("rows", "cols"), GRIDS)
    @pytest.mark.parametrize("kernel", [(3, 3, 3), (3, 1, 1), (1, 3, 3), (1, 5, 3), (1, 1, 1)])
    def test_shape_preserving_3d(self, kernel: tuple[int, int, int], rows: int, cols: int) -> None:
        spread = Spread(rows, cols, (7, 8))
        layer = nn.Conv3d(2, 3, kernel, padding=tuple(k // 2 for k in kernel), dtype=torch.float64)
        ran = equal(spread, layer, noise(2, 2, 3, 7, 8))
        halo = [(-2, kernel[1] > 1), (-1, kernel[2] > 1)]
        for rank, count in enumerate(messages(ran)):
            layout = spread.layout(rank)
            assert count == sum(p is not None for dim, sent in halo if sent for p in layout.neighbours(dim))

    @pytest.mark.parametrize(("rows", "cols"), [(2, 1), (1, 2), (2, 2)])
    @pytest.mark.parametrize("padding", [0, "valid"])
    def test_a_kernel_of_one_needs_no_padding(self, padding: Any, rows: int, cols: int) -> None:
        weight = noise(4, 3, 1, 1)
        ran = equal(Spread(rows, cols, (5, 6)), lambda x: F.conv2d(x, weight, padding=padding), noise(1, 3, 5, 6))
        assert messages(ran) == [0] * len(ran)

    @pytest.mark.parametrize(("rows", "cols"), GRIDS)
    @pytest.mark.parametrize(
        ("kernel", "stride", "padding"),
        [(3, 2, 1), (4, 2, 1), (2, 2, 0), (5, 2, 2), (1, 2, 0), (5, 4, 1), (4, 4, 0), (3, 4, 1)],
    )
    def test_strides(self, kernel: int, stride: int, padding: int, rows: int, cols: int) -> None:
        spread = Spread(rows, cols, (5, 6))
        weight = noise(2, 3, kernel, kernel)
        whole = noise(2, 3, 5 * stride, 6 * stride)
        equal(spread, lambda x: F.conv2d(x, weight, stride=stride, padding=padding), whole)

    @pytest.mark.parametrize(("rows", "cols"), [(2, 1), (1, 3), (2, 2)])
    @pytest.mark.parametrize(
        "arguments",
        [
            {"dilation": 2, "padding": 2},
            {"dilation": 2, "padding": "same"},
            {"dilation": (1, 2), "padding": (1, 2)},
            {"groups": 2, "padding": 1},
            {"stride": (1, 2), "padding": 1},
            {"stride": [2, 1], "padding": [1, 1]},
            {"stride": (2,), "padding": (1,)},
        ],
    )
    def test_other_arguments(self, arguments: dict[str, Any], rows: int, cols: int) -> None:
        spread = Spread(rows, cols, (4, 5))
        weight = noise(4, 4 // arguments.get("groups", 1), 3, 3)
        bias = noise(4, seed=1)
        ran = spread.run(lambda x: F.conv2d(x, weight, bias, **arguments), whole := noise(2, 4, 8, 10))
        wanted = F.conv2d(whole, weight, bias, **arguments)
        cuts = []
        for rank in range(spread.size):
            layout = spread.layout(rank)
            rows_of, cols_of = layout.grid.coords(rank)
            height = layout.height.scaled(wanted.shape[-2] // 4).bounds(rows_of)
            width = layout.width.scaled(wanted.shape[-1] // 5).bounds(cols_of)
            cuts.append(wanted[..., slice(*height), slice(*width)])
        assert worst(results(ran), cuts) <= EXACT * float(wanted.abs().max())

    def test_without_a_batch(self) -> None:
        weight = noise(2, 3, 3, 3)
        equal(Spread(2, 2, (5, 6)), lambda x: F.conv2d(x, weight, padding=1), noise(3, 5, 6))

    @pytest.mark.parametrize(("rows", "cols"), [(2, 1), (1, 3), (2, 2)])
    @pytest.mark.parametrize("dims", [2, 3])
    def test_channels_last(self, dims: int, rows: int, cols: int) -> None:
        memory_format = torch.channels_last if dims == 2 else torch.channels_last_3d
        kind = nn.Conv2d if dims == 2 else nn.Conv3d
        layer = kind(4, 6, 3, padding=1).to(memory_format=memory_format)
        shape = (2, 4, 5, 6) if dims == 2 else (2, 4, 2, 5, 6)
        whole = noise(*shape, dtype=torch.float32).contiguous(memory_format=memory_format)
        ran = equal(Spread(rows, cols, (5, 6)), layer, whole, tolerance=1e-6)
        assert all(r.is_contiguous(memory_format=memory_format) for r in results(ran))

    @pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
    def test_other_types(self, dtype: torch.dtype, tolerance: float) -> None:
        weight = noise(4, 3, 3, 3).to(dtype)
        whole = noise(2, 3, 5, 6).to(dtype)
        ran = equal(Spread(2, 2, (5, 6)), lambda x: F.conv2d(x, weight, padding=1), whole, tolerance=tolerance)
        assert all(r.dtype == dtype for r in results(ran))

    @pytest.mark.parametrize(
        ("name", "operator"),
        [
            ("conv2d", lambda x: F.conv2d(x, noise(2, 2, 3, 3))),
            ("conv2d", lambda x: F.conv2d(x, noise(2, 2, 3, 3), padding="valid")),
            ("conv2d", lambda x: F.conv2d(x, noise(2, 2, 3, 3), stride=2)),
            ("conv2d", lambda x: F.conv2d(x, noise(2, 2, 5, 5), padding=1)),
            ("conv2d", lambda x: F.conv2d(x, noise(2, 2, 3, 3), dilation=2, padding=1)),
            ("conv2d", lambda x: F.conv2d(x, noise(2, 2, 3, 3), padding=2)),
            ("conv2d", lambda x: F.conv2d(x, noise(2, 2, 1, 1), padding=1)),
            ("conv2d", lambda x: F.conv2d(x, noise(2, 2, 2, 2), padding=1)),
            ("conv2d", lambda x: F.conv2d(x, noise(2, 2, 4, 4), padding=2)),
            ("conv3d", lambda x: F.conv3d(x[:, :, None], noise(2, 2, 1, 3, 3))),
            ("conv3d", lambda x: F.conv3d(x[:, :, None], noise(2, 2, 1, 3, 3), padding=(0, 2, 2))),
            ("'same' and an even reach", lambda x: F.conv2d(x, noise(2, 2, 4, 4), padding="same")),
            ("conv1d", lambda x: F.conv1d(x.flatten(2), noise(2, 2, 3), padding=1)),
            ("conv_transpose1d", lambda x: F.conv_transpose1d(x.flatten(2), noise(2, 2, 2), stride=2)),
            ("conv_transpose2d", lambda x: F.conv_transpose2d(x, noise(2, 2, 3, 3), stride=2)),
            ("conv_transpose2d", nn.ConvTranspose2d(2, 2, 4, 2, 1, dtype=torch.float64)),
            ("conv_transpose3d", lambda x: F.conv_transpose3d(x[:, :, None], noise(2, 2, 1, 2, 2))),
        ],
    )
    @pytest.mark.parametrize(("rows", "cols"), [(2, 1), (1, 2), (2, 2)])
    def test_what_does_not_keep_the_cut_is_refused(
        self, name: str, operator: Callable[[torch.Tensor], torch.Tensor], rows: int, cols: int
    ) -> None:
        refused(Spread(rows, cols, (6, 8)), operator, noise(1, 2, 6, 8), name)

    @pytest.mark.parametrize(("rows", "cols"), [(2, 1), (1, 2)])
    def test_what_changes_only_the_other_axis_is_allowed(self, rows: int, cols: int) -> None:
        spread = Spread(rows, cols, (6, 6))
        padding = (1, 0) if cols == 1 else (0, 1)
        weight = noise(2, 2, 3, 3)
        whole = noise(1, 2, 6, 6)
        wanted = F.conv2d(whole, weight, padding=padding)
        got = results(spread.run(lambda x: F.conv2d(x, weight, padding=padding), whole))
        joined = torch.cat(got, dim=-2 if rows == 2 else -1)
        assert worst([joined], [wanted]) <= EXACT * float(wanted.abs().max())

    @pytest.mark.parametrize("function", ["convolution", "pad and convolution"])
    @pytest.mark.parametrize(("rows", "cols"), [(2, 1), (1, 2)])
    def test_a_stride_that_is_not_aligned_with_the_cut_is_refused(self, rows: int, cols: int, function: str) -> None:
        """Three rows a shard: the second shard begins on an odd row, between two strides."""
        weight = noise(2, 2, 3, 3)

        def operator(x: torch.Tensor) -> torch.Tensor:
            if function == "convolution":
                return F.conv2d(x, weight, stride=2, padding=1)
            return F.conv2d(F.pad(x, (0, 1, 0, 1)), weight, stride=2)

        ran = Spread(rows, cols, (6, 6)).run(operator, noise(1, 2, 6, 6))
        assert all(isinstance(r.error, UnsupportedError) for r in ran)


class TestPad:
    @pytest.mark.parametrize(("rows", "cols"), GRIDS)
    @pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate"])
    def test_before_a_convolution_its_halo_is_used_once(self, mode: str, rows: int, cols: int) -> None:
        spread = Spread(rows, cols, (6, 7))
        layer = nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode, dtype=torch.float64)
        ran = equal(spread, layer, noise(2, 2, 6, 7))
        assert messages(ran) == [neighbours(spread, r) for r in range(spread.size)]

    @pytest.mark.parametrize(("rows", "cols"), GRIDS)
    @pytest.mark.parametrize("mode", ["reflect", "replicate"])
    def test_in_three_dims(self, mode: str, rows: int, cols: int) -> None:
        layer = nn.Conv3d(2, 3, 3, padding=1, padding_mode=mode, dtype=torch.float64)
        equal(Spread(rows, cols, (6, 7)), layer, noise(2, 2, 3, 6, 7))

    @pytest.mark.parametrize(("rows", "cols"), GRIDS)
    def test_causal_in_time(self, rows: int, cols: int) -> None:
        weight = noise(3, 2, 3, 3, 3)
        spread = Spread(rows, cols, (6, 7))
        ran = equal(spread, lambda x: F.conv3d(F.pad(x, (1, 1, 1, 1, 2, 0)), weight), noise(2, 2, 3, 6, 7))
        assert messages(ran) == [neighbours(spread, r) for r in range(spread.size)]

    @pytest.mark.parametrize(("rows", "cols"), [(2, 1), (1, 2), (2, 2)])
    def test_in_time_alone_it_is_local(self, rows: int, cols: int) -> None:
        weight = noise(3, 2, 3, 1, 1)
        ran = equal(
            Spread(rows, cols, (3, 4)),
            lambda x: F.conv3d(F.pad(x, (0, 0, 0, 0, 2, 0), value=0.5), weight),
            noise(2, 2, 3, 3, 4),
        )
        assert messages(ran) == [0] * len(ran)

    @pytest.mark.parametrize(("rows", "cols"), GRIDS)
    @pytest.mark.parametrize("extents", [(12, 14), (13, 15), (13, 14), (15, 17)])
    def test_before_a_stride_of_two_with_the_remainder_on_the_last_shard(
        self, extents: tuple[int, int], rows: int, cols: int
    ) -> None:
        spread = Spread(rows, cols, (extents[0] // 4, extents[1] // 4))
        first, second = noise(3, 2, 3, 3), noise(2, 3, 3, 3, seed=1)

        def halve(x: torch.Tensor) -> torch.Tensor:
            return F.conv2d(F.pad(x, (0, 1, 0, 1)), first, stride=2)

        def quarter(x: torch.Tensor) -> torch.Tensor:
            return F.conv2d(F.pad(halve(x), (0, 1, 0, 1)), second, stride=2)

        whole = noise(2, 2, *extents)
        ran = equal(spread, halve, whole, ratio=4, out_ratio=2)
        before = [sum(spread.layout(r).neighbours(dim)[0] is not None for dim in (-2, -1)) for r in range(spread.size)]
        assert messages(ran) == before
        ran = equal(spread, quarter, whole, ratio=4, out_ratio=1)
        assert messages(ran) == [2 * n for n in before]

    def test_height_and_width_one_after_the_other(self) -> None:
        weight = noise(3, 2, 3, 3)
        operator = lambda x: F.conv2d(F.pad(F.pad(x, (0, 0, 1, 1)), (1, 1, 0, 0)), weight)  # noqa: E731
        equal(Spread(2, 2, (5, 6)), operator, noise(1, 2, 5, 6))

    def test_the_mark_of_a_padded_map_does_not_outlive_the_convolution(self) -> None:
        weights = noise(2, 2, 3, 3), noise(2, 2, 3, 3, seed=1)
        operator = lambda x: F.conv2d(F.conv2d(F.pad(x, (1, 1, 1, 1)), weights[0]), weights[1], padding=1)  # noqa: E731
        equal(Spread(2, 2, (5, 6)), operator, noise(1, 2, 5, 6))

    @pytest.mark.parametrize(
        "operator",
        [
            lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1)), noise(2, 2, 5, 5), padding=1),
            lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1)), noise(2, 2, 3, 3), padding=1),
            lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1)), noise(2, 2, 1, 1)),
            lambda x: F.conv2d(F.pad(x, (0, 1, 0, 1)), noise(2, 2, 3, 3)),
            lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1)), noise(2, 2, 5, 5)),
            lambda x: F.conv2d(F.pad(F.pad(x, (1, 1, 1, 1)), (1, 1, 1, 1)), noise(2, 2, 5, 5)),
            lambda x: F.conv2d(F.silu(F.pad(x, (1, 1, 1, 1))), noise(2, 2, 3, 3)),
        ],
        ids=["pad to same", "pad twice", "pad and 1", "one row short", "two rows short", "two pads", "in between"],
    )
    @pytest.mark.parametrize(("rows", "cols"), [(2, 1), (1, 2), (2, 2)])
    def test_a_convolution_that_its_halo_does_not_fit_is_right_or_refused(
        self, operator: Callable[[torch.Tensor], torch.Tensor], rows: int, cols: int
    ) -> None:
        spread = Spread(rows, cols, (6, 8))
        ran = spread.run(operator, whole := noise(1, 2, 6, 8))
        if any(r.error for r in ran):
            assert all(isinstance(r.error, UnsupportedError) for r in ran)
        else:
            wanted = operator(whole)
            assert tuple(wanted.shape) == tuple(whole.shape), "no shard holds such a map"
            assert worst(results(ran), spread.pieces(wanted)) <= EXACT * float(wanted.abs().max())

    @pytest.mark.parametrize(
        ("pad", "mode"),
        [
            ((1, 1, 1, 1), "circular"),
            ((-1, 0, -1, 0), "constant"),
            ((0, -1, 0, -1), "constant"),
            ((-1, 1, -1, 1), "constant"),
            ((-1, -1, 1, 1), "constant"),
        ],
    )
    def test_wrapping_and_cutting_are_refused(self, pad: tuple[int, ...], mode: str) -> None:
        refused(Spread(2, 2, (6, 6)), lambda x: F.pad(x, pad, mode), noise(1, 2, 6, 6), "F.pad")

    @pytest.mark.parametrize("pad", [(1, 1), (0, 0, 1, 1)])
    def test_wrapping_along_the_other_axis_is_local(self, pad: tuple[int, ...]) -> None:
        spread = Spread(2, 1, (4, 4)) if len(pad) == 2 else Spread(1, 2, (4, 4))
        full = (*pad, 0, 0) if len(pad) == 2 else pad
        whole = noise(1, 2, 4, 4)
        ran = spread.run(lambda x: F.pad(x, full, "circular"), whole)
        wanted = F.pad(whole, full, "circular")
        assert worst([torch.cat(results(ran), -2 if len(pad) == 2 else -1)], [wanted]) == 0.0
        assert messages(ran) == [0, 0]


class TestGroupNorm:
    @pytest.mark.parametrize(("rows", "cols"), GRIDS)
    @pytest.mark.parametrize("affine", [True, False])
    def test_statistics_are_those_of_the_whole(self, affine: bool, rows: int, cols: int) -> None:
        weight, bias = (noise(6, seed=s) if affine else None for s in (1, 2))
        whole = noise(2, 6, 7, 8) * torch.linspace(1, 9, 8, dtype=torch.float64) + 3
        ran = equal(Spread(rows, cols, (7, 8)), lambda x: F.group_norm(x, 3, weight, bias, 1e-6), whole)
        assert [r.traffic.collectives for r in ran] == [{"all_gather": 1}] * len(ran)
        assert messages(ran) == [0] * len(ran)

    @pytest.mark.parametrize("shape", [(2, 6, 3, 7, 8), (2, 6, 14, 16)])
    def test_other_shapes(self, shape: tuple[int, ...]) -> None:
        equal(Spread(3, 2, (7, 8)), nn.GroupNorm(2, 6, dtype=torch.float64), noise(*shape))

    def test_positions_in_one_dim(self) -> None:
        layer = nn.GroupNorm(2, 6, dtype=torch.float64)
        spread = Spread(2, 2, (5, 6))
        whole = noise(2, 6, 5, 6)
        ran = spread.run(lambda x: layer(x.flatten(2)), whole)
        assert worst(results(ran), [piece.flatten(2) for piece in spread.pieces(layer(whole))]) <= EXACT
        assert [r.traffic.collectives for r in ran] == [{"all_gather": 1}] * len(ran)

    def test_by_torchs_other_name_it_is_the_same_or_refused(self) -> None:
        spread, whole = Spread(2, 1, (4, 4)), noise(1, 4, 4, 4)
        ran = spread.run(lambda x: torch.group_norm(x, 2), whole)
        if any(r.error for r in ran):
            assert all(isinstance(r.error, UnsupportedError) for r in ran)
        else:
            assert worst(results(ran), spread.pieces(torch.group_norm(whole, 2))) <= EXACT

    def test_a_remainder_on_the_last_shard(self) -> None:
        equal(Spread(2, 1, (3, 4)), nn.GroupNorm(2, 4, dtype=torch.float64), noise(1, 4, 14, 16), ratio=4, out_ratio=4)

    @pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
    def test_memory_formats(self, memory_format: torch.memory_format) -> None:
        whole = noise(2, 4, 5, 6).contiguous(memory_format=memory_format)
        equal(Spread(2, 2, (5, 6)), nn.GroupNorm(2, 4, dtype=torch.float64), whole)

    @pytest.mark.parametrize(
        ("mean", "deviation", "dtype"),
        [
            (0.0, 1.0, torch.float32),
            (1e3, 1.0, torch.float32),
            (1e4, 0.1, torch.float32),
            (-1e6, 1e-3, torch.float64),
            (0.0, 1.0, torch.bfloat16),
            (100.0, 2.0, torch.bfloat16),
            (0.0, 1.0, torch.float16),
        ],
    )
    def test_no_worse_than_one_rank_when_the_mean_is_large(
        self, mean: float, deviation: float, dtype: torch.dtype
    ) -> None:
        """Each rank's variance is taken about its own mean, so only the mean's own rounding is left."""
        spread = Spread(3, 2, (7, 8))
        layer = nn.GroupNorm(2, 4, dtype=torch.float64)
        whole = (noise(2, 4, 14, 16) * deviation + mean).to(dtype)
        reference = layer(whole.double())
        alone = float((layer.to(dtype)(whole).double() - reference).abs().max())
        got = results(spread.run(layer, whole))
        assert all(g.dtype == dtype for g in got)
        rounding = torch.finfo(dtype).eps * (1 + abs(mean) / deviation if dtype == torch.float64 else 1)
        assert worst(got, spread.pieces(reference)) <= 2 * alone + 2 * rounding

    def test_a_constant_map_stays_constant_across_ranks(self) -> None:
        values = [
            r.unique() for r in results(Spread(3, 2, (5, 7)).run(nn.GroupNorm(2, 4), torch.full((1, 4, 5, 7), 3.1)))
        ]
        assert all(v.numel() == 1 and torch.equal(v, values[0]) for v in values)
        assert abs(float(values[0])) <= 1e-3


def heads(x: torch.Tensor, count: int = 1) -> torch.Tensor:
    """(B, C, H, W) or (B, C, T, H, W) as (B or B*T, heads, positions, channels of a head)."""
    if x.dim() == 5:
        x = x.permute(0, 2, 1, 3, 4).flatten(0, 1)
    return x.flatten(2).transpose(1, 2).unflatten(-1, (count, -1)).transpose(1, 2)


class TestAttention:
    @pytest.mark.parametrize(("rows", "cols"), GRIDS)
    @pytest.mark.parametrize(
        ("shape", "count"), [((1, 4, 7, 8), 1), ((2, 4, 7, 8), 2), ((2, 4, 3, 7, 8), 1), ((1, 4, 14, 16), 1)]
    )
    def test_queries_stay_and_keys_come(self, shape: tuple[int, ...], count: int, rows: int, cols: int) -> None:
        spread = Spread(rows, cols, (7, 8))
        whole = noise(*shape)

        def attend(x: torch.Tensor) -> torch.Tensor:
            q = heads(x, count)
            return F.scaled_dot_product_attention(q, 2 * q - 0.5, q * q, scale=0.7)

        ran = spread.run(attend, whole)
        positions = torch.arange(whole.shape[-2] * whole.shape[-1]).view(whole.shape[-2:])
        wanted = attend(whole)
        cuts = [wanted[:, :, piece.flatten()] for piece in spread.pieces(positions)]
        assert worst(results(ran), cuts) <= EXACT * float(wanted.abs().max())
        for r in ran:
            assert r.traffic.collectives == {"all_gather_uneven": 1}
            assert r.traffic.messages == spread.size - 1
            assert r.shard.operators.attention_calls == 1
            mine = whole.numel() * 8 // (whole.shape[-2] * whole.shape[-1]) * r.result.shape[-2]
            assert r.traffic.bytes == 2 * mine * (spread.size - 1)

    def test_other_types(self) -> None:
        spread = Spread(2, 1, (3, 4))
        whole = noise(1, 8, 3, 4, dtype=torch.bfloat16)
        ran = spread.run(lambda x: F.scaled_dot_product_attention(*[heads(x)] * 3), whole)
        wanted = F.scaled_dot_product_attention(*[heads(whole)] * 3)
        assert all(r.dtype == torch.bfloat16 for r in results(ran))
        assert worst([torch.cat(results(ran), -2)], [wanted]) <= 2e-2

    @pytest.mark.parametrize(
        "arguments",
        [
            {"is_causal": True},
            {"attn_mask": torch.ones(9, 9, dtype=torch.bool).tril()},
            {"positional mask": torch.arange(81, dtype=torch.float64).view(9, 9)},
        ],
        ids=["causal", "mask", "positional mask"],
    )
    def test_an_order_of_keys_is_refused(self, arguments: dict[str, Any]) -> None:
        def attend(x: torch.Tensor) -> torch.Tensor:
            q = heads(x)
            if "positional mask" in arguments:
                return F.scaled_dot_product_attention(q, q, q, arguments["positional mask"])
            return F.scaled_dot_product_attention(q, q, q, **arguments)

        ran = refused(Spread(2, 1, (6, 3)), attend, noise(1, 4, 6, 3), "attention whose mask")
        assert [r.shard.operators.attention_calls for r in ran] == [0, 0]

    @pytest.mark.parametrize("layer", ["attention", "encoder layer"])
    def test_attention_inside_of_torchs_own_layers_is_refused(self, layer: str) -> None:
        if layer == "attention":
            module: nn.Module = nn.MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64).eval()
        else:
            module = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dtype=torch.float64).eval()

        def attend(x: torch.Tensor) -> Any:
            tokens = x.flatten(2).transpose(1, 2)
            return module(tokens, tokens, tokens) if layer == "attention" else module(tokens)

        refused(Spread(2, 1, (4, 4)), attend, noise(1, 4, 4, 4), "multi_head_attention_forward")


class TestLocal:
    """What needs no other rank sends nothing."""

    @pytest.mark.parametrize(("rows", "cols"), [(2, 1), (1, 3), (2, 2)])
    @pytest.mark.parametrize(
        "operator",
        [
            lambda x: F.interpolate(x, scale_factor=2),
            lambda x: F.interpolate(x, scale_factor=(2.0, 2.0), mode="nearest-exact"),
            lambda x: F.interpolate(x, scale_factor=3.0, mode="nearest"),
            nn.Upsample(scale_factor=2, mode="nearest"),
            lambda x: F.pixel_shuffle(x, 2),
            lambda x: F.silu(x) * x + 1,
            lambda x: F.normalize(x, dim=1),
            lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (4,)).permute(0, 3, 1, 2),
            lambda x: F.rms_norm(x.permute(0, 2, 3, 1), (4,)).permute(0, 3, 1, 2),
            nn.Sequential(nn.Conv2d(4, 8, 1, dtype=torch.float64), nn.SiLU()),
            lambda x: F.conv1d(x.flatten(2), noise(4, 4, 1)).view(x.shape),
            lambda x: F.linear(x.movedim(1, -1), noise(3, 4)).movedim(-1, 1),
            lambda x: F.batch_norm(x, torch.zeros(4).double(), torch.ones(4).double(), training=False),
            nn.Dropout(0.5).eval(),
            lambda x: x.repeat_interleave(2, dim=1),
            lambda x: torch.cat([x, x.flip(1)], dim=1),
        ],
    )
    def test_equal_and_silent(self, operator: Callable[[torch.Tensor], torch.Tensor], rows: int, cols: int) -> None:
        ran = equal(Spread(rows, cols, (4, 6)), operator, noise(2, 4, 4, 6))
        assert messages(ran) == [0] * len(ran)
        assert all(r.traffic.collectives == {} for r in ran)

    def test_nearest_interpolation_of_a_clip(self) -> None:
        equal(Spread(2, 2, (3, 4)), lambda x: F.interpolate(x, scale_factor=(1, 2, 2)), noise(1, 2, 3, 3, 4))

    @pytest.mark.parametrize("function", [F.avg_pool2d, F.max_pool2d])
    @pytest.mark.parametrize(("rows", "cols"), [(2, 1), (1, 2), (2, 2)])
    def test_pools_within_a_latent(self, function: Callable[..., torch.Tensor], rows: int, cols: int) -> None:
        spread = Spread(rows, cols, (3, 4))
        for arguments in ({"kernel_size": 2}, {"kernel_size": (2, 2), "stride": 2, "padding": 0}):
            equal(spread, lambda x, a=arguments: function(x, **a), noise(2, 3, 12, 16))

    @pytest.mark.parametrize(
        "operator",
        [
            lambda x: x.mean(dim=1, keepdim=True),
            lambda x: torch.mean(x, 2, keepdim=True),
            lambda x: x.sum((1, 2), keepdim=True),
            lambda x: torch.softmax(x, dim=1),
            lambda x: x.softmax(2),
            lambda x: F.log_softmax(x, dim=-4),
            lambda x: nn.Softmax2d()(x[:, :, 0])[:, :, None],
            lambda x: torch.cumsum(x, dim=2),
            lambda x: x.flip(2),
            lambda x: torch.roll(x, shifts=1, dims=2),
            lambda x: x.amax(1, keepdim=True),
            lambda x: x.max(dim=1, keepdim=True).values,
            lambda x: torch.maximum(x, -x),
            lambda x: torch.max(x, -x),
            lambda x: x.var(dim=1, keepdim=True),
            lambda x: x.norm(dim=1, keepdim=True),
            lambda x: x.sort(dim=1).values,
        ],
    )
    def test_over_channels_or_time(self, operator: Callable[[torch.Tensor], torch.Tensor]) -> None:
        ran = equal(Spread(2, 2, (5, 7)), operator, noise(2, 4, 3, 5, 7))
        assert messages(ran) == [0] * 4

    @pytest.mark.parametrize(
        "operator",
        [
            lambda x: x.mean(dim=-1, keepdim=True),
            lambda x: x.softmax(-1),
            lambda x: x.sum(1, keepdim=True),
            lambda x: x.flip(-1),
        ],
    )
    def test_over_channels_or_time_that_come_last_or_first(
        self, operator: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        def viewed(x: torch.Tensor) -> torch.Tensor:
            return operator(x.permute(0, 2, 3, 4, 1)).permute(0, 4, 1, 2, 3)

        equal(Spread(2, 2, (5, 7)), viewed, noise(2, 4, 3, 5, 7))

    def test_over_an_axis_that_is_not_cut(self) -> None:
        whole = noise(1, 2, 4, 5)
        for spread, dim in ((Spread(2, 1, (4, 5)), -1), (Spread(1, 2, (4, 5)), -2)):
            ran = spread.run(lambda x, d=dim: x.mean(d, keepdim=True).expand_as(x) * x.softmax(d), whole)
            wanted = whole.mean(dim, keepdim=True) * whole.softmax(dim)
            assert worst(results(ran), spread.pieces(wanted)) <= EXACT


def refused(
    spread: Spread, operator: Callable[[torch.Tensor], Any], whole: torch.Tensor, name: str, ratio: int | None = None
) -> list[Ran]:
    """Every rank refuses it by name, and none has sent anything."""
    ran = spread.run(operator, whole, ratio=ratio)
    for r in ran:
        assert isinstance(r.error, UnsupportedError), f"it ran as if it were local, or raised {r.error!r}"
        assert name in str(r.error)
    assert messages(ran) == [0] * len(ran)
    return ran


ALONG = [
    ("mean", lambda x, d: x.mean(d)),
    ("mean", lambda x, d: torch.mean(x, dim=(d,))),
    ("mean", lambda x, d: torch.mean(input=x, dim=d)),
    ("mean", lambda x, d: x.mean()),
    ("sum", lambda x, d: x.sum((1, d))),
    ("sum", lambda x, d: x.sum(())),
    ("var", lambda x, d: torch.var(x, dim=d, correction=0)),
    ("std", lambda x, d: x.std(d)),
    ("var_mean", lambda x, d: torch.var_mean(x, dim=d)),
    ("amax", lambda x, d: x.amax(d)),
    ("max", lambda x, d: x.max(d)),
    ("max", lambda x, d: x.max()),
    ("min", lambda x, d: torch.min(x, dim=d)),
    ("prod", lambda x, d: x.prod(d)),
    ("norm", lambda x, d: x.norm(dim=d)),
    ("argmax", lambda x, d: x.argmax(d)),
    ("logsumexp", lambda x, d: x.logsumexp(d)),
    ("softmax", lambda x, d: x.softmax(d)),
    ("softmax", lambda x, d: F.softmax(x, dim=d)),
    ("softmax", lambda x, d: torch.softmax(x, d)),
    ("log_softmax", lambda x, d: F.log_softmax(x, dim=d)),
    ("cumsum", lambda x, d: x.cumsum(d)),
    ("cumsum", lambda x, d: torch.cumsum(x, dim=d)),
    ("cumprod", lambda x, d: x.cumprod(dim=d)),
    ("sort", lambda x, d: x.sort(d)),
    ("median", lambda x, d: x.median(d)),
    ("topk", lambda x, d: x.topk(1, dim=d)),
    ("topk", lambda x, d: torch.topk(x, 1, d)),
    ("flip", lambda x, d: x.flip(d)),
    ("flip", lambda x, d: x.flip(1, d)),
    ("flip", lambda x, d: torch.flip(x, [1, d])),
    ("roll", lambda x, d: torch.roll(x, 1, d)),
    ("roll", lambda x, d: x.roll(1, d)),
    ("roll", lambda x, d: x.roll(shifts=(1, 1), dims=(1, d))),
    ("roll", lambda x, d: x.roll(1)),
    ("norm", lambda x, d: torch.norm(x, 1, d)),
    ("norm", lambda x, d: x.norm(1)),
    ("var", lambda x, d: x.var(False)),
    ("fft", lambda x, d: torch.fft.fft(x, dim=d)),
    ("fft", lambda x, d: torch.fft.rfft(x, dim=d)),
    ("normalize", lambda x, d: F.normalize(x, dim=d)),
    ("vector_norm", lambda x, d: torch.linalg.vector_norm(x, dim=d)),
]


WHOLE_MAP = [
    ("avg_pool2d", lambda x: F.avg_pool2d(x, 3, 1, 1)),
    ("avg_pool2d", nn.AvgPool2d(4)),
    ("avg_pool2d", lambda x: F.avg_pool2d(x, 2, stride=1)),
    ("max_pool2d", nn.MaxPool2d(3, 2, 1)),
    ("max_pool2d", lambda x: F.max_pool2d(x, 3)),
    ("max_pool2d", lambda x: F.max_pool2d(x, 2, dilation=2)),
    ("max_pool2d", lambda x: F.max_pool2d(x, 3, 1, 1, return_indices=True)),
    ("avg_pool3d", lambda x: F.avg_pool3d(x[:, :, None], (1, 3, 3))),
    ("max_pool3d", lambda x: F.max_pool3d(x[:, :, None], (1, 3, 3))),
    ("lp_pool2d", lambda x: F.lp_pool2d(x, 2, 2)),
    ("adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x.flatten(2), 1)),
    ("adaptive_avg_pool2d", nn.AdaptiveAvgPool2d(1)),
    ("adaptive_avg_pool3d", lambda x: F.adaptive_avg_pool3d(x[:, :, None], 1)),
    ("adaptive_max_pool2d", nn.AdaptiveMaxPool2d(2)),
    ("interpolate", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    ("interpolate", lambda x: F.interpolate(x, scale_factor=2, mode="bicubic", antialias=True)),
    ("interpolate", lambda x: F.interpolate(x, scale_factor=2, mode="area")),
    ("interpolate", lambda x: F.interpolate(x[:, :, None], scale_factor=2, mode="trilinear")),
    ("interpolate", lambda x: F.interpolate(x, scale_factor=1.5)),
    ("interpolate", lambda x: F.interpolate(x, scale_factor=0.5)),
    ("interpolate", lambda x: F.interpolate(x, size=(16, 16))),
    ("interpolate", nn.Upsample(scale_factor=2, mode="bilinear")),
    ("layer_norm", lambda x: F.layer_norm(x, x.shape[-2:])),
    ("layer_norm", lambda x: F.layer_norm(x, x.shape[-3:])),
    ("layer_norm", lambda x: F.layer_norm(x, x.shape[-1:])),
    ("rms_norm", lambda x: F.rms_norm(x, x.shape[-2:])),
    ("rms_norm", lambda x: F.rms_norm(x, x.shape[-1:])),
    ("layer_norm", lambda x: torch.layer_norm(x, x.shape[-2:])),
    ("pad", lambda x: F.pad(x.flatten(2), (1, 1))),
    ("instance_norm", nn.InstanceNorm2d(2)),
    ("batch_norm", lambda x: F.batch_norm(x, None, None, training=True)),
    ("unfold", lambda x: F.unfold(x, 3)),
    ("unfold", lambda x: x.unfold(-1, 2, 1)),
    ("grid_sample", lambda x: F.grid_sample(x, torch.zeros(1, 4, 4, 2).double(), align_corners=False)),
    ("rot90", lambda x: torch.rot90(x, 1, (2, 3))),
    ("fft", lambda x: torch.fft.fft2(x)),
    ("fft", lambda x: torch.fft.rfft2(x)),
]


class TestRefused:
    """Nothing that mixes rows is silently local."""

    @pytest.mark.parametrize(("name", "operator"), ALONG, ids=[f"{i} {name}" for i, (name, _) in enumerate(ALONG)])
    @pytest.mark.parametrize("view", ["channels first", "channels last"])
    @pytest.mark.parametrize("axis", ["height", "width"])
    def test_along_a_sharded_axis(
        self, name: str, operator: Callable[[torch.Tensor, int], Any], view: str, axis: str
    ) -> None:
        spread = Spread(2, 1, (4, 6)) if axis == "height" else Spread(1, 2, (4, 6))
        dim = -2 if axis == "height" else -1

        def call(x: torch.Tensor) -> Any:
            if view == "channels last":
                return operator(x.movedim(1, -1), dim - 1)
            return operator(x, dim)

        refused(spread, call, noise(2, 5, 4, 6), name)

    @pytest.mark.parametrize("dim", [-2, -1, 2, 3])
    def test_of_a_grid_both_axes_are_sharded(self, dim: int) -> None:
        refused(Spread(2, 2, (4, 6)), lambda x: x.mean(dim), noise(1, 3, 4, 6), "mean")

    @pytest.mark.parametrize("dim", [-2, -1])
    def test_on_a_shard_with_a_remainder(self, dim: int) -> None:
        spread = Spread(2, 1, (3, 3)) if dim == -2 else Spread(1, 2, (3, 3))
        refused(spread, lambda x: x.mean(dim), noise(1, 2, 29, 29), "mean", ratio=8)

    @pytest.mark.parametrize(
        ("name", "operator"), WHOLE_MAP, ids=[f"{i} {name}" for i, (name, _) in enumerate(WHOLE_MAP)]
    )
    def test_whole_map_operators(self, name: str, operator: Callable[[torch.Tensor], Any]) -> None:
        refused(Spread(2, 2, (4, 6)), operator, noise(1, 2, 8, 12), name)


class TestBlock:
    def test_leaving_the_block_restores_torch(self) -> None:
        weight = noise(2, 2, 3, 3)

        def body(comm: Any, shard: Any) -> tuple[bool, int]:
            mine = shard.shard(whole)
            alone = F.conv2d(mine, weight, padding=1)
            with shard:
                F.conv2d(mine, weight, padding=1)
            sent = comm.traffic.messages
            same = torch.equal(F.conv2d(mine, weight, padding=1), alone)
            mine.mean()
            return same, comm.traffic.messages - sent

        whole = noise(1, 2, 4, 4)
        assert results(Spread(2, 1, (4, 4)).each(body)) == [(True, 0)] * 2

    def test_an_exception_inside_leaves_nothing_behind(self) -> None:
        weight = noise(2, 2, 3, 3)

        def body(comm: Any, shard: Any) -> tuple[str, bool, bool]:
            mine = shard.shard(whole)
            alone = F.conv2d(mine, weight, padding=1)
            try:
                with shard:
                    mine.mean()
            except UnsupportedError as error:
                heard = str(error)
            same = torch.equal(F.conv2d(mine, weight, padding=1), alone)
            with shard:
                joined = F.conv2d(mine, weight, padding=1)
            return heard, same, torch.equal(joined, alone)

        whole = noise(1, 2, 4, 4)
        for heard, same, joined in results(Spread(2, 1, (4, 4)).each(body)):
            assert "mean" in heard
            assert same
            assert not joined

    def test_another_thread_is_not_affected(self) -> None:
        weight = noise(2, 2, 3, 3)

        def body(comm: Any, shard: Any) -> tuple[bool, int]:
            mine = shard.shard(whole)
            alone = F.conv2d(mine, weight, padding=1)
            seen = []
            with shard:
                thread = threading.Thread(target=lambda: seen.append(F.conv2d(mine, weight, padding=1)))
                thread.start()
                thread.join()
                sent = comm.traffic.messages
            return torch.equal(seen[0], alone), sent

        whole = noise(1, 2, 4, 4)
        assert results(Spread(2, 1, (4, 4)).each(body)) == [(True, 0)] * 2

    def test_modules_and_weights_are_untouched(self) -> None:
        network = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 1)).double()
        before = [vars(m).copy() for m in network.modules()], {k: v.clone() for k, v in network.state_dict().items()}
        forwards = [type(m).forward for m in network.modules()]
        equal(Spread(2, 2, (5, 6)), network, noise(1, 2, 5, 6))
        assert [vars(m).keys() for m in network.modules()] == [v.keys() for v in before[0]]
        assert [type(m).forward for m in network.modules()] == forwards
        assert all(torch.equal(v, before[1][k]) for k, v in network.state_dict().items())

    def test_one_rank_alone_is_the_plain_network(self) -> None:
        network = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Upsample(scale_factor=2)).double()
        ran = equal(Spread(1, 1, (5, 6)), network, noise(1, 2, 5, 6))
        assert messages(ran) == [0]

    def test_an_exchange_that_only_one_rank_makes_is_found_out(self) -> None:
        """A network that is not the same on all ranks ends in an error, not in a hang."""
        weight = noise(2, 2, 3, 3)

        def body(comm: Any, shard: Any) -> Any:
            mine = shard.shard(whole)
            with shard:
                return F.conv2d(mine, weight, padding=1) if comm.rank else mine

        whole = noise(1, 2, 4, 4)
        with pytest.raises(DeadlockError):
            Spread(2, 1, (4, 4)).each(body)
