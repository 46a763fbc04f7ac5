# SPDX-License-Identifier: Apache-2.0
"""Operators along time on a shard, attention that frames order, and what is padded long before it is used."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.sharding.spread import Ran, Spread, noise, results, worst
from vllm_omni_vae.errors import UnsupportedError

GRIDS = [(2, 1), (1, 2), (2, 2)]


def equal(spread: Spread, operator: Callable[[torch.Tensor], torch.Tensor], whole: torch.Tensor) -> list[Ran]:
    """Every rank's piece is its share of the operator's whole result."""
    ran = spread.run(operator, whole)
    assert worst(results(ran), spread.pieces(operator(whole))) <= 1e-12
    return ran


def refused(spread: Spread, operator: Callable[[torch.Tensor], Any], whole: torch.Tensor, words: str) -> list[Ran]:
    ran = spread.run(operator, whole)
    for r in ran:
        assert isinstance(r.error, UnsupportedError)
        assert words in str(r.error)
    return ran


def each_position(operator: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """``operator`` on ``(positions, channels, time)`` of a video."""

    def over(x: torch.Tensor) -> torch.Tensor:
        batch, channels, _, height, width = x.shape
        lines = operator(x.permute(0, 3, 4, 1, 2).reshape(batch * height * width, channels, -1))
        return lines.reshape(batch, height, width, channels, -1).permute(0, 3, 4, 1, 2)

    return over


def tokens(x: torch.Tensor) -> torch.Tensor:
    """``(B, 1, T * H * W, C)``, frame by frame."""
    return x.flatten(2).transpose(1, 2)[:, None]


def back(y: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return y[:, 0].transpose(1, 2).reshape(like.shape)


def by_frame(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """A mask that lets every position see its own and earlier frames."""
    frame = torch.arange(x.shape[2]).repeat_interleave(x.shape[3] * x.shape[4])
    seen = frame[:, None] >= frame
    return seen if kind is torch.bool else torch.zeros(seen.shape, dtype=kind).masked_fill(~seen, -torch.inf)


@pytest.mark.parametrize(("rows", "cols"), GRIDS)
class TestTime:
    @pytest.mark.parametrize(
        "operator",
        [
            lambda x: F.avg_pool1d(x, 2, 2),
            lambda x: F.conv1d(x, noise(2, 2, 3), padding=1),
            lambda x: F.conv1d(F.pad(x, (2, 0)), noise(2, 2, 3)),
            lambda x: F.conv1d(F.pad(x, (1, 1), mode="replicate"), noise(2, 2, 3)),
        ],
        ids=["mean", "convolution", "causal convolution", "replicated ends"],
    )
    def test_at_each_position_it_is_local(
        self, operator: Callable[[torch.Tensor], torch.Tensor], rows: int, cols: int
    ) -> None:
        ran = equal(Spread(rows, cols, (7, 9)), each_position(operator), noise(2, 2, 4, 7, 9))
        assert [r.traffic.messages for r in ran] == [0] * rows * cols

    def test_over_positions_it_is_refused(self, rows: int, cols: int) -> None:
        spread, x = Spread(rows, cols, (5, 7)), noise(1, 2, 5, 7)
        refused(spread, lambda x: F.avg_pool1d(x.flatten(2), 2), x, "avg_pool1d")
        refused(spread, lambda x: F.conv1d(x.flatten(2), noise(2, 2, 3)), x, "conv1d")

    def test_where_it_could_be_either_it_is_refused_on_every_rank(self, rows: int, cols: int) -> None:
        spread = Spread(rows, cols, (3, 3))
        area = spread.layout(spread.size - 1).latents
        refused(
            spread,
            each_position(lambda x: F.avg_pool1d(x, 2, 2)),
            noise(1, 2, 12 * area[0] * area[1], 3, 3),
            "could be along time or space",
        )

    @pytest.mark.parametrize("mask", ["causal", "given"])
    def test_attention_that_orders_time_is_local(self, mask: str, rows: int, cols: int) -> None:
        def attend(x: torch.Tensor) -> torch.Tensor:
            q = x.permute(0, 3, 4, 2, 1).flatten(0, 2)[:, None]
            seen = torch.ones(4, 4, dtype=torch.bool).tril()
            y = F.scaled_dot_product_attention(
                q, q, q, **({"is_causal": True} if mask == "causal" else {"attn_mask": seen})
            )
            return y[:, 0].unflatten(0, (x.shape[0], *x.shape[-2:])).permute(0, 4, 3, 1, 2)

        ran = equal(Spread(rows, cols, (5, 7)), attend, noise(2, 3, 4, 5, 7))
        assert [r.traffic.collectives for r in ran] == [{}] * rows * cols
        assert [r.shard.operators.attention_calls for r in ran] == [1] * rows * cols

    @pytest.mark.parametrize("mode", ["nearest", "trilinear"])
    def test_interpolation_of_time_alone_is_local(self, mode: str, rows: int, cols: int) -> None:
        operator = lambda x: F.interpolate(x, scale_factor=(2.0, 1.0, 1.0), mode=mode)  # noqa: E731
        equal(Spread(rows, cols, (5, 7)), operator, noise(1, 2, 3, 5, 7))


@pytest.mark.parametrize(("rows", "cols"), GRIDS)
class TestFrameMask:
    @pytest.mark.parametrize("kind", [torch.bool, torch.float64])
    @pytest.mark.parametrize("where", ["by place", "by name"])
    def test_frames_are_ordered_as_in_the_whole(self, kind: torch.dtype, where: str, rows: int, cols: int) -> None:
        def attend(x: torch.Tensor) -> torch.Tensor:
            q, mask = tokens(x), by_frame(x, kind)
            if where == "by place":
                return back(F.scaled_dot_product_attention(q, q * 2, q + 1, mask), x)
            return back(F.scaled_dot_product_attention(q, q * 2, q + 1, attn_mask=mask[None]), x)

        ran = equal(Spread(rows, cols, (3, 5)), attend, noise(1, 4, 3, 3, 5))
        assert [r.traffic.collectives for r in ran] == [{"all_gather_uneven": 1}] * rows * cols

    def test_above_latent_scale_too(self, rows: int, cols: int) -> None:
        def attend(x: torch.Tensor) -> torch.Tensor:
            q = tokens(x)
            return back(F.scaled_dot_product_attention(q, q, q, by_frame(x, torch.bool)), x)

        equal(Spread(rows, cols, (3, 5)), attend, noise(1, 4, 2, 6, 10))

    @pytest.mark.parametrize("what", ["positions", "is_causal", "of another length"])
    def test_an_order_of_positions_is_refused(self, what: str, rows: int, cols: int) -> None:
        def attend(x: torch.Tensor) -> torch.Tensor:
            q = tokens(x)
            if what == "is_causal":
                return F.scaled_dot_product_attention(q, q, q, is_causal=True)
            length = q.shape[-2] if what == "positions" else 1
            return F.scaled_dot_product_attention(q, q, q, noise(q.shape[-2], length))

        words = "attention mask of" if what == "of another length" else "attention whose mask"
        refused(Spread(rows, cols, (3, 5)), attend, noise(1, 4, 2, 3, 5), words)


@pytest.mark.parametrize(("rows", "cols"), GRIDS)
class TestExtended:
    """Between a pad and its convolution lie operators that leave height and width alone."""

    @pytest.mark.parametrize(
        "between",
        [
            lambda x: F.pad(x, (0, 0, 0, 0, 2, 0)),
            lambda x: torch.cat([x[:, :, :1].expand(-1, -1, 2, -1, -1), x], dim=2),
            lambda x: torch.cat([x[:, :, :1].repeat(1, 1, 2, 1, 1), x.clone()], dim=2).contiguous(),
            lambda x: x[:, :, 1:].to(torch.float64),
        ],
        ids=["pad of time", "cat", "repeat and clone", "slice"],
    )
    def test_the_convolution_knows_what_was_added(
        self, between: Callable[[torch.Tensor], torch.Tensor], rows: int, cols: int
    ) -> None:
        weight = noise(2, 2, 1, 3, 3)
        operator = lambda x: F.conv3d(between(F.pad(x, (1, 1, 1, 1, 0, 0))), weight)  # noqa: E731
        equal(Spread(rows, cols, (5, 7)), operator, noise(1, 2, 3, 5, 7))

    def test_frames_as_a_batch(self, rows: int, cols: int) -> None:
        def operator(x: torch.Tensor) -> torch.Tensor:
            padded = F.pad(x, (0, 1, 0, 1))
            batch, channels, time, height, width = padded.shape
            flat = padded.permute(0, 2, 1, 3, 4).reshape(batch * time, channels, height, width)
            made = F.conv2d(flat, noise(2, 2, 3, 3), stride=2)
            return made.view(batch, time, *made.shape[1:]).permute(0, 2, 1, 3, 4)

        equal(Spread(rows, cols, (3, 4)), operator, noise(1, 2, 3, 6, 8))

    def test_a_filter_of_each_axis_after_one_pad(self, rows: int, cols: int) -> None:
        def operator(x: torch.Tensor) -> torch.Tensor:
            x = F.pad(x, (0, 1, 0, 1, 0, 1), mode="reflect")
            x = F.conv3d(x, noise(2, 2, 2, 1, 1), stride=(2, 1, 1))
            x = F.conv3d(x, noise(2, 2, 1, 2, 1, seed=1), stride=(1, 2, 1))
            return F.conv3d(x, noise(2, 2, 1, 1, 2, seed=2), stride=(1, 1, 2))

        equal(Spread(rows, cols, (3, 4)), operator, noise(1, 2, 4, 6, 8))

    def test_a_mean_of_cells_leaves_what_was_added(self, rows: int, cols: int) -> None:
        operator = lambda x: F.avg_pool3d(F.pad(x, (0, 1, 0, 1)), (1, 2, 2), (1, 2, 2))  # noqa: E731
        equal(Spread(rows, cols, (3, 4)), operator, noise(1, 2, 2, 6, 8))

    @pytest.mark.parametrize(
        "operator",
        [
            lambda x: F.conv3d(F.pad(x, (1, 1, 1, 1)).transpose(-1, -2), noise(2, 2, 1, 3, 3)),
            lambda x: F.conv3d(F.pad(x, (1, 1, 1, 1))[..., 1:], noise(2, 2, 1, 3, 3)),
            lambda x: F.conv3d(
                torch.cat([F.pad(x, (1, 1, 1, 1)), x.new_zeros(1, 2, 1, 1, 1)], 2), noise(2, 2, 1, 3, 3)
            ),
            lambda x: F.avg_pool3d(F.pad(x, (1, 1, 1, 1)), (1, 2, 2)),
            lambda x: F.avg_pool3d(x, (1, 3, 3), (1, 1, 1), (0, 1, 1)),
        ],
        ids=["transposed", "cropped", "joined with another", "rows before cells", "cells that overlap"],
    )
    def test_anything_else_is_refused(self, operator: Callable[[torch.Tensor], Any], rows: int, cols: int) -> None:
        ran = Spread(rows, cols, (3, 3)).run(operator, noise(1, 2, 2, 6, 6))
        assert all(r.error is not None for r in ran)


@pytest.mark.parametrize(("rows", "cols"), GRIDS)
def test_a_transposed_convolution_of_whole_cells_is_local(rows: int, cols: int) -> None:
    spread = Spread(rows, cols, (3, 4))
    equal(spread, lambda x: F.conv_transpose2d(x, noise(2, 3, 2, 2), stride=2), noise(1, 2, 3, 4))
    equal(spread, lambda x: F.conv_transpose3d(x, noise(2, 1, 2, 2, 2), stride=2, groups=2), noise(1, 2, 2, 3, 4))
    refused(spread, lambda x: F.conv_transpose2d(x, noise(2, 3, 3, 3), stride=2), noise(1, 2, 3, 4), "conv_transpose2d")


@pytest.mark.parametrize(("rows", "cols"), GRIDS)
def test_interpolation_to_the_size_of_another_piece_is_local(rows: int, cols: int) -> None:
    def operator(x: torch.Tensor) -> torch.Tensor:
        larger = F.interpolate(x, scale_factor=(1, 2, 2))
        return F.interpolate(x[:, :, :1], size=larger.shape[-3:]) + larger

    equal(Spread(rows, cols, (3, 4)), operator, noise(1, 2, 3, 3, 4))
    if (rows, cols) != (2, 2):
        refused(Spread(rows, cols, (4, 4)), lambda x: F.interpolate(x, size=(8, 8)), noise(1, 2, 4, 4), "interpolate")
