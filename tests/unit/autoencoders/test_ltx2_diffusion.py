# SPDX-License-Identifier: Apache-2.0
"""The diffusion decoder of LTX-2.5: tiles with the bits and the noise of diffusers' loop, and what is refused."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import LTX2VideoDiffusionDecoderModel
from diffusers.models.autoencoders.ltx2_diffusion_decoder import _tile_intervals
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.diffusion_decoders import LAYERS, TILE, seeded, tiny_decoder
from tests.helpers.vaes import count_calls, decisions, noise, on_ranks
from vllm_omni_vae.autoencoders import (
    DistributedLTX2VideoDiffusionDecoderModel,
    Operation,
    Strategy,
    distribute,
    distributed_class,
)
from vllm_omni_vae.autoencoders.cost import Forecaster
from vllm_omni_vae.autoencoders.tile_noise import NoiseOfItsOwn, NoiseOfOneCanvas
from vllm_omni_vae.autoencoders.twin import twin_of
from vllm_omni_vae.config import TileExtent, VaeParallelMode
from vllm_omni_vae.errors import DisagreementError, GeometryError, RankError, UnsupportedError
from vllm_omni_vae.geometry import AxisScale, AxisTiling, TileGrid

SPEC = DistributedLTX2VideoDiffusionDecoderModel.spec
DECODE = Operation.DECODE


def latents(batch: int, time: int, height: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return noise(batch, LAYERS["latent_channels"], time, height, width, dtype=dtype)


def released() -> Any:
    """The decoder of LTX-2.5, as it is tiled by default, without values."""
    with torch.device("meta"):
        made = LTX2VideoDiffusionDecoderModel()
    made.enable_tiling()
    return made


@dataclasses.dataclass(frozen=True)
class Case:
    """One decode, the grid that diffusers' loops make of it, and how the decoder denoises."""

    shape: tuple[int, int, int, int]
    grid: tuple[int, int, int]
    steps: int | None = None
    predicts: str = "x0"
    dtype: torch.dtype = torch.float32


CASES = {
    "one frame": Case((1, 1, 5, 6), (1, 2, 2)),
    "one frame, batch": Case((2, 1, 3, 7), (1, 1, 2)),
    "only time is longer than a tile": Case((1, 4, 3, 4), (3, 1, 1)),
    "a leftover in every axis joins": Case((1, 3, 7, 4), (2, 2, 1)),
    "all axes, batch": Case((2, 3, 5, 6), (2, 2, 2)),
    "several steps": Case((1, 3, 5, 4), (2, 2, 1), steps=2),
    "velocity": Case((1, 3, 3, 5), (2, 1, 2), predicts="v"),
    "bfloat16": Case((1, 1, 5, 6), (1, 2, 2), dtype=torch.bfloat16),
    "float64": Case((1, 1, 5, 6), (1, 2, 2), steps=2, dtype=torch.float64),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_tiles_have_the_bits_of_diffusers(case: Case, ranks: int) -> None:
    plain = tiny_decoder(case.dtype, decoder_model_output_type=case.predicts)
    z = latents(*case.shape, dtype=case.dtype)
    alone = seeded()
    expected = plain.decode(z, generator=alone, num_inference_steps=case.steps).sample

    def body(vae: Any, rank: int) -> Any:
        taken, generator = decisions(vae), seeded()
        sample = vae.decode(z, generator=generator, num_inference_steps=case.steps).sample
        return sample, taken, generator.get_state()

    found = on_ranks(ranks, plain, body)
    assert torch.equal(found[0][0], expected)
    assert found[0][0].dtype == case.dtype
    for sample, _, _ in found[1:]:
        assert torch.equal(sample, torch.zeros(case.shape[0], 3, 1, 1, 1, dtype=case.dtype))
    for _, (decision,), state in found:
        assert (decision.strategy, decision.grid) == (Strategy.TILE, case.grid)
        assert torch.equal(state, alone.get_state()), "the generator went as far as on one rank"


def test_every_rank_gets_the_broadcast_result() -> None:
    plain, z = tiny_decoder(), latents(1, 1, 5, 6)
    (expected,) = plain.decode(z, generator=seeded(), return_dict=False)
    found = on_ranks(3, plain, lambda vae, _: vae.decode(z, seeded(), return_dict=False)[0], broadcast=True)
    assert all(torch.equal(sample, expected) for sample in found)


def test_a_generator_for_each_of_a_batch_and_two_calls_in_a_row() -> None:
    plain, z = tiny_decoder(), latents(2, 1, 5, 6)

    def twice(vae: Any, rank: int = 0) -> list[torch.Tensor]:
        generators = [seeded(1), seeded(2)]
        return [vae.decode(z, generator=generators).sample for _ in range(2)]

    first, second = twice(plain)
    assert not torch.equal(first, second)
    found = on_ranks(2, plain, twice)[0]
    assert torch.equal(found[0], first)
    assert torch.equal(found[1], second)


def test_what_fits_a_tile_is_decoded_whole() -> None:
    plain, z = tiny_decoder(), latents(1, 2, 4, 4)
    expected = plain.decode(z, generator=seeded()).sample

    def body(vae: Any, rank: int) -> Any:
        taken = decisions(vae)
        return vae.decode(z, generator=seeded()).sample, taken[0].strategy

    assert all(torch.equal(sample, expected) and s is Strategy.DIRECT for sample, s in on_ranks(2, plain, body))


def test_ranks_without_a_tile_run_no_stage() -> None:
    plain, z = tiny_decoder(), latents(1, 1, 3, 7)
    expected = plain.decode(z, generator=seeded()).sample

    def body(vae: Any, rank: int) -> Any:
        entered, finished = count_calls(vae.decoder.conv_in), count_calls(vae.decoder.conv_out)
        return vae.decode(z, generator=seeded()).sample, len(entered), len(finished)

    found = on_ranks(3, plain, body)
    assert torch.equal(found[0][0], expected)
    assert [counts for _, *counts in found] == [[1, 1], [1, 1], [0, 0]]


HEIGHT, WIDTH, GRID = (
    VaeParallelMode.SPATIAL_SHARD_HEIGHT,
    VaeParallelMode.SPATIAL_SHARD_WIDTH,
    VaeParallelMode.SPATIAL_SHARD_GRID,
)
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5}


def untiled(plain: Any, z: torch.Tensor, steps: int | None = None) -> torch.Tensor:
    """What diffusers makes of ``z`` without tiles."""
    whole = copy.deepcopy(plain)
    whole.disable_tiling()
    return whole.decode(z, generator=seeded(), num_inference_steps=steps).sample


def scaled_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max())


class TestShard:
    @pytest.mark.parametrize("dtype", LIMITS)
    @pytest.mark.parametrize(
        ("mode", "ranks", "shape", "grid"),
        [
            (WIDTH, 2, (1, 1, 5, 7), (1, 2)),
            (HEIGHT, 3, (1, 1, 10, 3), (3, 1)),
            (GRID, 4, (1, 1, 7, 6), (2, 2)),
            (WIDTH, 2, (2, 3, 3, 6), (1, 2)),
            (VaeParallelMode.AUTO, 3, (1, 1, 3, 9), (1, 3)),
        ],
    )
    def test_is_equal_to_the_untiled_result(
        self,
        mode: VaeParallelMode,
        ranks: int,
        shape: tuple[int, int, int, int],
        grid: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        plain, z = tiny_decoder(dtype), latents(*shape, dtype=dtype)
        alone = seeded()
        noise_like(plain, z, alone)

        def body(vae: Any, rank: int) -> Any:
            taken, generator = decisions(vae), seeded()
            processors = vae.attn_processors
            sample = vae.decode(z, generator=generator).sample
            assert all(vae.attn_processors[name] is one for name, one in processors.items())
            return sample, taken, generator.get_state()

        found = on_ranks(ranks, plain, body, mode=mode)
        assert scaled_error(found[0][0], untiled(plain, z)) <= LIMITS[dtype]
        for _, (decision,), state in found:
            assert decision.rank_grid == grid
            assert not decision.fallback
            assert torch.equal(state, alone.get_state()), "the generator went as far as on one rank"
        assert all(sample.shape == (shape[0], 3, 1, 1, 1) for sample, _, _ in found[1:])

    @pytest.mark.parametrize(("steps", "predicts"), [(2, "x0"), (None, "v")])
    def test_takes_steps(self, steps: int | None, predicts: str) -> None:
        plain, z = tiny_decoder(torch.float64, decoder_model_output_type=predicts), latents(1, 1, 5, 7).double()

        def body(vae: Any, rank: int) -> torch.Tensor:
            return vae.decode(z, generator=seeded(), num_inference_steps=steps).sample

        found = on_ranks(2, plain, body, mode=WIDTH, broadcast=True)
        assert max(scaled_error(sample, untiled(plain, z, steps)) for sample in found) <= 1e-12

    @pytest.mark.parametrize("kernel", [(1, 2, 4), (1, 5, 3)])
    def test_windows_need_not_be_even_or_square(self, kernel: tuple[int, int, int]) -> None:
        plain = tiny_decoder(torch.float64, decoder_stage5_kernel=kernel)
        z = latents(1, 1, 7, 6).double()
        (sample, *_) = on_ranks(4, plain, lambda vae, _: vae.decode(z, generator=seeded()).sample, mode=GRID)
        assert scaled_error(sample, untiled(plain, z)) <= 1e-12

    def test_a_rank_without_a_whole_window_makes_it_tiles(self) -> None:
        plain, z = tiny_decoder(), latents(1, 1, 3, 8)

        def body(vae: Any, rank: int) -> Any:
            taken = decisions(vae)
            return vae.decode(z, generator=seeded()).sample, taken[0]

        sample, decision = on_ranks(3, plain, body, mode=WIDTH)[0]
        assert torch.equal(sample, plain.decode(z, generator=seeded()).sample)
        assert (decision.strategy, decision.fallback) == (Strategy.TILE, True)
        assert decision.reason == ("spatial_shard_width: 3x8 latents cannot give each of 3 ranks 3 rows or 3 columns")

    def test_other_noise_is_refused(self) -> None:
        z = latents(1, 1, 5, 7)

        def body(vae: Any, rank: int) -> None:
            with pytest.raises(DisagreementError, match="arguments"):
                vae.decode(z, generator=seeded(rank))

        on_ranks(2, tiny_decoder(), body, mode=WIDTH)


def noise_like(plain: Any, z: torch.Tensor, generator: torch.Generator) -> None:
    """Draw what an un-tiled decode of ``z`` draws."""
    torch.randn(SPEC.whole_shape(plain, DECODE, tuple(z.shape)), generator=generator, dtype=z.dtype)


class TestGrid:
    @given(
        st.integers(1, 60),
        st.integers(1, 12),
        st.integers(0, 12),
        st.integers(1, 8),
    )
    def test_windows_are_those_of_diffusers(self, cells: int, stride: int, more: int, kernel: int) -> None:
        size = max(stride + more, kernel)
        axis = AxisTiling(size, stride, AxisScale(up=2, causal=True), minimum=kernel, placed=True)
        if cells <= size:
            axis = dataclasses.replace(axis, size=None, minimum=1)
        found = [(window.start, window.stop) for window in axis.windows(cells)]
        assert found == _tile_intervals(cells, size, stride, kernel)

    @pytest.mark.parametrize(
        ("frames", "height", "width", "grid"),
        [
            (121, 512, 768, (2, 1, 1)),
            (121, 768, 1280, (2, 1, 2)),
            (257, 1088, 1920, (5, 2, 3)),
            (17, 224, 800, (1, 1, 2)),
        ],
    )
    def test_of_the_released_decoder(self, frames: int, height: int, width: int, grid: tuple[int, int, int]) -> None:
        found = SPEC.grid(released(), DECODE, (1 + (frames - 1) // 8, height // 32, width // 32))
        assert found.shape == grid
        assert found.out_extents == (frames, height, width)
        assert found.extents == (1 + (frames - 1) // 2, height // 8, width // 8)

    def test_predicted_shapes_are_checked_against_real_ones(self) -> None:
        plain = tiny_decoder()
        grid = SPEC.grid(plain, DECODE, (3, 7, 4))
        time, height, width = grid.windows
        assert [(w.start, w.stop, w.out_start, w.length) for w in time] == [(0, 8, 0, 15), (4, 9, 7, 10)]
        assert [(w.start, w.stop) for w in height] == [(0, 8), (6, 14)]
        assert [(w.start, w.stop) for w in width] == [(0, 8)]

    def test_lengths_in_frames_are_set(self) -> None:
        plain = tiny_decoder(tiled=False)
        SPEC.set_tiling(plain, TileExtent(20, 16, 12), TileExtent(12, 8, 8))
        for axis, size, stride in (("num_frames", 12, 8), ("height", 20, 12), ("width", 16, 8)):
            assert getattr(plain, f"tile_sample_min_{axis}") == size
            assert getattr(plain, f"tile_sample_stride_{axis}") == stride
        assert plain.use_tiling


class TestRefused:
    @pytest.mark.parametrize(
        ("tile", "reason"),
        [
            ((15,), "tile height size of 15 pixels must be a multiple of 2, at least 6; nearest: 14 or 16"),
            ((4,), "tile height size of 4 pixels must be a multiple of 2, at least 6; nearest: 6 or 8"),
            ((None, 5), "tile width size of 5 pixels must be a multiple of 2, at least 6"),
            ((None, None, 4), "tile time size of 4 frames must be a multiple of 2, at least 6"),
            ((None, None, None, 13), "tile height stride of 13 pixels must be a multiple of 2, at least 2"),
            ((None, None, None, 18), "tile height stride of 18 pixels is larger than the tile size of 16"),
            ((None, None, None, None, None, 20), "tile time stride of 20 frames is larger than the tile size of 16"),
        ],
    )
    def test_tiles_that_cannot_be_used_when_they_are_set(self, tile: tuple[int | None, ...], reason: str) -> None:
        vae = tiny_decoder()
        vae.__class__ = DistributedLTX2VideoDiffusionDecoderModel
        with pytest.raises(GeometryError, match=reason):
            vae.enable_tiling(*tile)
        assert (vae.tile_sample_min_height, vae.tile_sample_stride_width) == (TILE[0], TILE[4])

    def test_tiles_of_the_released_decoder_hold_a_window_of_its_attention(self) -> None:
        vae = released()
        with pytest.raises(GeometryError, match="tile height size of 40 pixels must be a multiple of 8, at least 48"):
            SPEC.set_tiling(vae, TileExtent(40, 64), TileExtent(32, 32))

    @pytest.mark.parametrize("shape", [(1, 1, 2, 6), (1, 1, 6, 2)])
    def test_latents_below_a_window_of_its_attention(self, shape: tuple[int, int, int, int]) -> None:
        plain, z = tiny_decoder(), latents(*shape)
        with pytest.raises(ValueError, match="each spatial dim to be at least its kernel size"):
            plain.decode(z)
        reason = rf"cannot decode 1 of {shape[2]}x{shape[3]} latents .* at least 1 of 3x3, .* 1 frames of 12x12"

        def body(vae: Any, rank: int) -> int:
            ran = count_calls(vae.decoder.conv_in)
            with pytest.raises(GeometryError, match=reason):
                vae.decode(z)
            return len(ran)

        assert on_ranks(2, plain, body) == [0, 0]

    def test_latents_below_what_the_released_decoder_takes(self) -> None:
        vae = released()
        assert SPEC.least_latents(vae, DECODE) == (3, 7, 7)
        SPEC.check(vae, DECODE, (1, 128, 3, 7, 7))
        with pytest.raises(GeometryError, match="at least 3 of 7x7, which is a clip of 17 frames of 224x224"):
            SPEC.check(vae, DECODE, (1, 128, 2, 7, 7))
        with pytest.raises(GeometryError, match=r"decodes \(B, C, T, H, W\) tensors"):
            SPEC.check(vae, DECODE, (1, 128, 7, 7))

    def test_encode(self) -> None:
        vae = tiny_decoder()
        vae.__class__ = DistributedLTX2VideoDiffusionDecoderModel
        with pytest.raises(UnsupportedError, match="LTX2VideoDiffusionDecoderModel cannot encode; it has decode"):
            vae.encode(torch.zeros(1, 3, 1, 20, 24))
        with pytest.raises(UnsupportedError, match="cannot encode"):
            SPEC.check(vae, Operation.ENCODE, (1, 3, 1, 20, 24))

    def test_ratios_that_are_not_the_networks(self) -> None:
        vae = tiny_decoder(spatial_compression_ratio=8)
        with pytest.raises(GeometryError, match=r"makes 8 frames of 4x4 pixels of a latent, .* counts with 8 of 8x8"):
            SPEC.check_tiling(vae)

    def test_steps_in_time_that_diffusers_does_not_reckon_with(self) -> None:
        vae = tiny_decoder(
            decoder_upsample_strides=((1, 2, 2), (1, 1, 1), (4, 1, 1), (2, 1, 1)), temporal_compression_ratio=8
        )
        with pytest.raises(GeometryError, match="must be made of steps of 1 and 2 in time"):
            SPEC.check_tiling(vae)


class TestRanks:
    def test_with_other_noise_all_say_so(self) -> None:
        plain, z = tiny_decoder(), latents(1, 1, 5, 6)
        expected = plain.decode(z, generator=seeded()).sample

        def body(vae: Any, rank: int) -> torch.Tensor:
            with pytest.raises(DisagreementError, match="arguments"):
                vae.decode(z, generator=seeded(rank))
            with pytest.raises(DisagreementError, match="arguments"):
                vae.decode(z, generator=seeded(), num_inference_steps=1 + rank)
            return vae.decode(z, generator=seeded()).sample

        assert torch.equal(on_ranks(2, plain, body)[0], expected)

    @pytest.mark.parametrize("steps", [1, 2])
    def test_a_failure_in_the_middle_and_the_call_after_it(self, steps: int) -> None:
        plain, z = tiny_decoder(), latents(1, 1, 5, 6)
        alone = seeded()
        _, expected = (plain.decode(z, generator=alone, num_inference_steps=steps).sample for _ in range(2))

        def body(vae: Any, rank: int) -> torch.Tensor:
            generator, ran = seeded(), count_calls(vae.decoder.conv_in_x_t)

            def fail(*_: Any) -> None:
                if rank == 1 and len(ran) > 1:
                    raise ValueError("the second call of rank 1")

            hook = vae.decoder.norm_out.register_forward_pre_hook(fail)
            with pytest.raises(RankError, match="rank 1 failed: ValueError: the second call of rank 1"):
                vae.decode(z, generator=generator, num_inference_steps=steps)
            hook.remove()
            return vae.decode(z, generator=generator, num_inference_steps=steps).sample

        assert torch.equal(on_ranks(2, plain, body)[0], expected)


class TestDropIn:
    def test_is_known_by_its_class(self) -> None:
        assert distributed_class(tiny_decoder()) is DistributedLTX2VideoDiffusionDecoderModel

    def test_on_one_rank_it_is_diffusers_own(self) -> None:
        plain, vae, z = tiny_decoder(), tiny_decoder(), latents(1, 1, 5, 6)
        assert distribute(vae, size=1) is vae
        assert type(vae) is LTX2VideoDiffusionDecoderModel
        vae.__class__ = DistributedLTX2VideoDiffusionDecoderModel
        expected = plain.decode(z, generator=seeded(), num_inference_steps=2).sample
        assert torch.equal(vae.decode(z, generator=seeded(), num_inference_steps=2).sample, expected)
        assert torch.equal(vae.tiled_decode(z, seeded(), 2), expected)

    def test_it_is_saved_as_a_plain_one(self, tmp_path: Path) -> None:
        plain = tiny_decoder()
        on_ranks(2, plain, lambda vae, rank: vae.save_pretrained(tmp_path / str(rank)))
        config = json.loads((tmp_path / "1" / "config.json").read_text())
        assert config["_class_name"] == "LTX2VideoDiffusionDecoderModel"
        loaded = DistributedLTX2VideoDiffusionDecoderModel.from_pretrained(tmp_path / "1")
        assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in plain.state_dict().items())

    def test_what_it_holds_is_forecast_without_values(self) -> None:
        plain = tiny_decoder()
        plain.__class__ = DistributedLTX2VideoDiffusionDecoderModel
        twin = twin_of(plain)
        processors = twin.attn_processors
        forecaster = Forecaster(twin, DECODE, (1, 4, 3, 5, 6))
        whole, tiles = forecaster.direct(), forecaster.forecast(VaeParallelMode.TILE, 3)
        assert tiles.decision.grid == (2, 2, 2)
        assert round(tiles.cost.coverage, 4) == tiles.decision.coverage > 2
        assert 0 < tiles.peak_bytes < whole.peak_bytes
        assert [use.messages for use in tiles.uses] == [0, 1, 1]
        shard = Forecaster(twin, DECODE, (1, 4, 1, 3, 7)).forecast(WIDTH, 2)
        blocks = sum(LAYERS["decoder_stage_depths"])
        assert [use.halo_calls for use in shard.uses] == [blocks, blocks]
        assert shard.cost.coverage == 1.0
        assert all(twin.attn_processors[name] is processor for name, processor in processors.items())


class TestNoise:
    def grid(self) -> TileGrid:
        time = AxisTiling(2, 1, AxisScale(up=2, causal=True), minimum=2, placed=True)
        return TileGrid((time, AxisTiling(None, scale=AxisScale(up=2)), AxisTiling(4, 3, AxisScale(up=2))), (3, 4, 6))

    def test_of_its_own_is_drawn_in_order_and_to_the_end(self) -> None:
        drawn: list[tuple[int, ...]] = []

        def draw(shape: tuple[int, ...]) -> torch.Tensor:
            drawn.append(shape)
            return torch.full(shape, float(len(drawn)))

        grid = self.grid()
        assert grid.shape == (2, 1, 2)
        found = NoiseOfItsOwn(grid, 2, 3, draw)
        assert float(found.take((0, 0, 1))[0, 0, 0, 0, 0]) == 2.0
        with pytest.raises(LookupError, match="tiles are run in order"):
            found.take((0, 0, 0))
        found.finish()
        assert drawn == [(2, 3, 3, 8, 8), (2, 3, 3, 8, 6), (2, 3, 4, 8, 8), (2, 3, 4, 8, 6)]

    def test_of_one_canvas_is_equal_where_tiles_overlap(self) -> None:
        drawn: list[torch.Tensor] = []

        def draw(shape: tuple[int, ...]) -> torch.Tensor:
            drawn.append(torch.randn(shape, generator=seeded()))
            return drawn[-1]

        found = NoiseOfOneCanvas(self.grid(), 1, 3, draw)
        first, second = found.take((0, 0, 0)), found.take((1, 0, 1))
        assert torch.equal(first[:, :, 1:, :, 6:], second[:, :, :2, :, :2])
        found.finish()
        assert [whole.shape for whole in drawn] == [(1, 3, 5, 8, 12)]
