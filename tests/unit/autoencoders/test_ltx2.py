# SPDX-License-Identifier: Apache-2.0
"""LTX-2: its ratios, thin tiles under reflection, arguments of a call, shards of clips that diffusers cuts in time."""

import copy
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLLTX2Video

from tests.helpers.tiles import tiles_by_hand
from tests.helpers.vaes import VAES, count_calls, decisions, latents, on_ranks, pixels, run_public, tiny_vae
from vllm_omni_vae.autoencoders import DistributedAutoencoderKLLTX2Video, Operation, Strategy
from vllm_omni_vae.config import VaeParallelMode
from vllm_omni_vae.errors import DisagreementError, GeometryError, RankError, UnsupportedError

SPEC = DistributedAutoencoderKLLTX2Video.spec
NAMES = ["ltx-2", "ltx-2.3"]
ENCODE, DECODE = Operation
SHARDS = [(VaeParallelMode.SPATIAL_SHARD_HEIGHT, 3), (VaeParallelMode.SPATIAL_SHARD_GRID, 4)]
RATIO = STEP = 8
FLOAT32 = 1e-5


def given(vae: Any, operation: Operation, time: int, height: int, width: int, batch: int = 1) -> torch.Tensor:
    """Input of so many latents."""
    if operation is DECODE:
        return latents(vae, time, height, width, batch=batch)
    return pixels(vae, 1 + (time - 1) * STEP, height * RATIO, width * RATIO, batch=batch)


def untiled(vae: Any, operation: Operation, x: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """What diffusers makes of ``x`` on one rank, in one piece."""
    alone = copy.deepcopy(vae)
    alone.disable_tiling()
    alone.use_framewise_decoding = alone.use_framewise_encoding = False
    return run_public(alone, operation, x, **arguments)


def shared(
    vae: Any, operation: Operation, x: torch.Tensor, mode: VaeParallelMode, ranks: int, **arguments: Any
) -> torch.Tensor:
    """The owner's result, after every rank is seen to have taken ``mode``."""

    def body(mine: Any, rank: int) -> torch.Tensor:
        taken = decisions(mine)
        result = run_public(mine, operation, x, **arguments)
        assert [decision.strategy.value for decision in taken] == [mode.value]
        return result

    return on_ranks(ranks, vae, body, mode=mode)[0]


def scaled_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    assert got.shape == wanted.shape
    return float((got - wanted).abs().max() / wanted.abs().max())


class TestRatios:
    @pytest.mark.parametrize(
        "layers",
        [
            {},
            {"patch_size": 2},
            {"downsample_type": ("conv", "spatial", "temporal", "spatiotemporal")},
            {"downsample_type": ("temporal",) * 4},
            {"spatio_temporal_scaling": (True, False, True, True)},
            {"upsample_type": ("spatial", "temporal", "spatiotemporal")},
            {
                "decoder_block_out_channels": (8, 8, 16),
                "decoder_spatio_temporal_scaling": (True, False, True),
                "upsample_factor": (2, 1, 2),
            },
            {"upsample_type": ("spatial",) * 3},
        ],
        ids=str,
    )
    def test_are_those_of_the_networks(self, layers: dict[str, Any]) -> None:
        plain = AutoencoderKLLTX2Video(**VAES["ltx-2"].layers | layers).to("meta")
        plain.enable_tiling(64, 64, None, 48, 48)
        frames, extent, latent = 33, 64, 3
        moments = plain.encoder(torch.empty(1, 3, frames, extent, extent, device="meta"))
        sample = plain.decoder(torch.empty(1, 8, latent, latent, latent, device="meta"))
        time, space = (frames - 1) // (moments.shape[2] - 1), extent // moments.shape[3]
        plain.spatial_compression_ratio, plain.temporal_compression_ratio = space, time
        scales = [tiling.scale for tiling in SPEC.tiling(plain, ENCODE)]
        assert [scale.down for scale in scales] == [time, space, space]
        assert [scale.length(n) for scale, n in zip(scales, (frames, extent, extent), strict=True)] == list(
            moments.shape[2:]
        )
        time, space = (sample.shape[2] - 1) // (latent - 1), sample.shape[3] // latent  # may differ from the encoder's
        plain.spatial_compression_ratio, plain.temporal_compression_ratio = space, time
        scales = [tiling.scale for tiling in SPEC.tiling(plain, DECODE)]
        assert [scale.length(latent) for scale in scales] == list(sample.shape[2:])

    def test_what_the_configuration_gets_wrong_is_refused_with_the_numbers(self) -> None:
        guessed = {"spatial_compression_ratio": None, "temporal_compression_ratio": None}
        plain = AutoencoderKLLTX2Video(**VAES["ltx-2"].layers | guessed)
        assert (plain.spatial_compression_ratio, plain.temporal_compression_ratio) == (16, 16), "diffusers' guess"
        says = "the encoder makes a latent of 8 pixels and 8 frames, but the configuration counts with 16 and 16"
        with pytest.raises(GeometryError, match=says) as caught:
            SPEC.check_tiling(plain)
        assert "give spatial_compression_ratio=8 and temporal_compression_ratio=8" in str(caught.value)
        plain.__class__ = DistributedAutoencoderKLLTX2Video
        with pytest.raises(GeometryError, match=says):
            plain.enable_tiling()
        assert not plain.use_tiling

    def test_networks_that_differ_are_refused(self) -> None:
        plain = AutoencoderKLLTX2Video(**VAES["ltx-2"].layers | {"upsample_type": ("spatial",) * 3})
        with pytest.raises(GeometryError, match=r"the decoder makes a latent of 8 pixels and 1 frames.* with 8 and 8"):
            SPEC.check_tiling(plain)

    def test_patches_in_time_are_refused(self) -> None:
        plain = AutoencoderKLLTX2Video(**VAES["ltx-2"].layers | {"patch_size_t": 2})
        with pytest.raises(GeometryError, match="patch_size_t is 2"):
            SPEC.check_tiling(plain)

    def test_of_the_released_weights(self) -> None:
        with torch.device("meta"):
            plain = AutoencoderKLLTX2Video(spatial_compression_ratio=32, temporal_compression_ratio=8)
        for operation in Operation:
            SPEC.check(plain, operation, (1, 3, 121, 768, 1280) if operation is ENCODE else (1, 128, 16, 24, 40))
        assert not SPEC.draws(plain, DECODE)
        assert plain.config.decoder_inject_noise == (False, False, False, False)
        with torch.device("meta"):
            guessed = AutoencoderKLLTX2Video()
        with pytest.raises(GeometryError, match=r"of 32 pixels and 8 frames.* with 64 and 16"):
            SPEC.check_tiling(guessed)


class TestGrids:
    @pytest.mark.parametrize("name", NAMES)
    def test_tiled_exactly_where_diffusers_tiles_and_encode_as_decode(self, name: str) -> None:
        vae = tiny_vae(name)
        seen: list[str] = []
        for method in ("tiled_encode", "tiled_decode"):
            whole = getattr(vae, method)
            setattr(vae, method, lambda *a, whole=whole, **k: seen.append("") or whole(*a, **k))
        found = set()
        for height in range(2, 7):
            for width in range(2, 8):
                tiled = {o: SPEC.is_tiled(vae, o, tuple(given(vae, o, 1, height, width).shape)) for o in Operation}
                seen.clear()
                run_public(vae, ENCODE, given(vae, ENCODE, 1, height, width))
                assert tiled == dict.fromkeys(Operation, bool(seen)), (height, width)
                found.add(bool(seen))
        assert found == {True, False}

    @pytest.mark.parametrize(
        ("name", "operation", "extents", "grid"),
        [
            ("ltx-2", DECODE, (1, 9, 9), (1, 3, 3)),
            ("ltx-2", DECODE, (2, 5, 4), (1, 2, 1)),  # diffusers would cut 4 into 3 and 1, and crash
            ("ltx-2", DECODE, (2, 7, 5), (1, 2, 2)),
            ("ltx-2", ENCODE, (2, 7, 5), (1, 3, 2)),  # the encoder pads with zeros and takes one latent
            ("ltx-2.3", DECODE, (2, 7, 11), (1, 3, 3)),
        ],
    )
    def test_grids_and_the_number_of_calls(
        self, name: str, operation: Operation, extents: tuple[int, int, int], grid: tuple[int, int, int]
    ) -> None:
        def body(vae: Any, rank: int) -> Any:
            ran = count_calls(vae.encoder if operation is ENCODE else vae.decoder)
            taken = decisions(vae)
            run_public(vae, operation, given(vae, operation, *extents))
            return len(ran), taken

        ranks = on_ranks(3, tiny_vae(name), body)
        for _, (decision,) in ranks:
            assert (decision.strategy, decision.grid) == (Strategy.TILE, grid)
            assert decision == ranks[0][1][0]
        assert tuple(ran for ran, _ in ranks) == ranks[0][1][0].tiles_per_rank

    @pytest.mark.parametrize("name", NAMES)
    def test_shapes_are_predicted(self, name: str) -> None:
        vae = tiny_vae(name)
        vae.__class__ = DistributedAutoencoderKLLTX2Video
        for time, height, width in ((1, 5, 7), (3, 6, 4)):
            tasks, spec = vae.tile_split(given(vae, DECODE, time, height, width))
            assert spec.output_shape == (1, 3, 1 + (time - 1) * STEP, height * RATIO, width * RATIO)
            for task in tasks:
                assert tuple(vae.tile_exec(task).shape) == task.output_shape
            tasks, spec = vae.encode_tile_split(given(vae, ENCODE, time, height, width))
            assert spec.output_shape == (1, 16, time, height, width)
            for task in tasks:
                assert tuple(vae.encode_tile_exec(task).shape) == task.output_shape

    def test_a_sharded_network_takes_all_frames_at_once(self) -> None:
        def body(vae: Any, rank: int) -> Any:
            ran, taken = count_calls(vae.decoder), decisions(vae)
            vae.decode(given(vae, DECODE, 3, 5, 7))
            return [shape[2] for shape in ran], str(taken[0])

        for frames, said in on_ranks(2, tiny_vae("ltx-2"), body, mode=VaeParallelMode.SPATIAL_SHARD_WIDTH):
            assert frames == [3]
            assert "at a time" not in said


def tiling_error(plain: Any, z: torch.Tensor, sample: torch.Tensor) -> float:
    """Root mean square of what tiles change in the un-tiled sample."""
    return float((sample - untiled(plain, DECODE, z)).square().mean().sqrt())


class TestThinTiles:
    """A leftover of one latent, which reflection cannot pad."""

    @pytest.mark.parametrize(("height", "width"), [(480, 832), (832, 480), (512, 928)])
    def test_of_the_default_tiles_are_joined(self, height: int, width: int) -> None:
        with torch.device("meta"):
            plain = AutoencoderKLLTX2Video(spatial_compression_ratio=32, temporal_compression_ratio=8)
        grid = SPEC.grid(plain, DECODE, (1, height // 32, width // 32))
        assert min(w.stop - w.start for axis in grid.windows[1:] for w in axis) >= 2
        assert grid.out_extents == (1, height, width)

    @pytest.mark.parametrize(("height", "width", "rows", "cols"), [(7, 5, 2, 2), (4, 9, 1, 3), (10, 7, 3, 2)])
    def test_crash_in_diffusers_and_are_joined_here(self, height: int, width: int, rows: int, cols: int) -> None:
        plain = tiny_vae("ltx-2")
        z = latents(plain, 2, height, width)
        with pytest.raises(RuntimeError, match="Padding size should be less"):
            plain.decode(z)

        def body(vae: Any, rank: int) -> Any:
            taken = decisions(vae)
            return vae.decode(z).sample, taken[0].grid

        sample, grid = on_ranks(2, plain, body)[0]
        assert grid == (1, rows, cols)
        by_hand = tiles_by_hand(plain, plain.decoder, z, (4, 4), (3, 3), 2, lambda units: units * RATIO)
        assert torch.equal(sample, by_hand)
        # Not much further from un-tiled than diffusers' tiles of a size that it can do; both errors are large, because
        # a tiny random VAE sees to the other side of such tiles.
        usual = latents(plain, 2, 8, 9)
        assert tiling_error(plain, z, sample) <= 1.2 * tiling_error(plain, usual, plain.decode(usual).sample)

    def test_a_constant_picture_stays_constant(self) -> None:
        plain = tiny_vae("ltx-2")
        plain.decoder.conv_out.conv.weight.zero_()
        sample = on_ranks(3, plain, lambda vae, _: vae.decode(latents(vae, 2, 10, 7)).sample)[0]
        assert float((sample - sample[..., :1, :1]).abs().max()) <= 1e-7
        assert sample.shape == (1, 3, 9, 80, 56)

    @pytest.mark.parametrize(("height", "width"), [(1, 9), (9, 1), (1, 1)])
    def test_latents_too_thin_for_reflection_are_refused(self, height: int, width: int) -> None:
        plain = tiny_vae("ltx-2")

        def body(vae: Any, rank: int) -> int:
            ran = count_calls(vae.decoder)
            with pytest.raises(GeometryError, match=f"cannot decode {height}x{width} latents.* at least 2 .*16 pixels"):
                vae.decode(latents(plain, 1, height, width))
            return len(ran)

        assert on_ranks(2, plain, body) == [0, 0]

    def test_zeros_take_one_latent(self) -> None:
        plain = tiny_vae("ltx-2.3")
        z = latents(plain, 1, 1, 9)
        assert torch.equal(on_ranks(2, plain, lambda vae, _: vae.decode(z).sample)[0], plain.decode(z).sample)

    @pytest.mark.parametrize(("mode", "ranks"), [(VaeParallelMode.SPATIAL_SHARD_WIDTH, 4), SHARDS[1]])
    def test_pieces_of_one_latent_are_reflected_as_the_whole(self, mode: VaeParallelMode, ranks: int) -> None:
        plain = tiny_vae("ltx-2")
        z = latents(plain, 1, 2, 5)
        assert scaled_error(shared(plain, DECODE, z, mode, ranks), untiled(plain, DECODE, z)) <= FLOAT32

    def test_tiles_thinner_than_reflection_needs_are_refused(self) -> None:
        plain = tiny_vae("ltx-2", tiled=False)
        plain.__class__ = DistributedAutoencoderKLLTX2Video
        for size, stride, says in (
            (8, 8, "size of 8 pixels must be a multiple of the compression ratio 8, at least 16; nearest: 16 or 24"),
            (36, 24, "size of 36 pixels must be a multiple of the compression ratio 8, .* nearest: 32 or 40"),
            (32, 20, "stride of 20 pixels must be a multiple"),
            (16, 24, "stride .* is larger than the tile size"),
        ):
            with pytest.raises(GeometryError, match=says):
                plain.enable_tiling(tile_sample_min_width=size, tile_sample_stride_width=stride)
            assert plain.tile_sample_min_width == 512


@pytest.mark.parametrize("frames", [2, 4, 8, 10, 16])
def test_frames_off_the_grid_are_refused_before_any_rank_starts(frames: int) -> None:
    plain = tiny_vae("ltx-2")
    with pytest.raises(RuntimeError, match="unflatten"):
        plain.encode(pixels(plain, frames, 24, 24))
    below = (frames - 1) // 8 * 8 + 1

    def body(vae: Any, rank: int) -> int:
        ran = count_calls(vae.encoder)
        with pytest.raises(GeometryError, match=rf"encodes 1 \+ 8k frames, not {frames}; give {below} or {below + 8}"):
            vae.encode(pixels(vae, frames, 24, 56))
        return len(ran)

    assert on_ranks(2, plain, body) == [0, 0]


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((1, 3, 64, 64), r"encodes \(B, C, T, H, W\) tensors"),
        ((1, 3, 1, 4, 64), "cannot encode 4x64 pixels: both must be at least 8 and multiples of 8"),
        ((1, 3, 1, 64, 60), "cannot encode 64x60 pixels"),
    ],
)
def test_pixels_that_cannot_be_encoded_are_refused(shape: tuple[int, ...], reason: str) -> None:
    def body(vae: Any, rank: int) -> int:
        ran = count_calls(vae.encoder)
        with pytest.raises(GeometryError, match=reason):
            vae.encode(torch.zeros(shape))
        return len(ran)

    assert on_ranks(2, tiny_vae("ltx-2"), body) == [0, 0]


class TestArguments:
    @pytest.mark.parametrize("operation", list(Operation))
    def test_causal(self, operation: Operation) -> None:
        plain = tiny_vae("ltx-2.3")
        plain.encoder.is_causal = False
        x = given(plain, operation, 2, 5, 7)
        tiled = {causal: run_public(plain, operation, x, causal=causal) for causal in (True, False, None)}
        assert not torch.equal(tiled[True], tiled[False])
        assert torch.equal(tiled[False], tiled[None]), "diffusers takes False for the default"

        def body(vae: Any, rank: int) -> dict[bool | None, torch.Tensor]:
            return {causal: run_public(vae, operation, x, causal=causal) for causal in tiled}

        found = on_ranks(2, plain, body)[0]
        assert all(torch.equal(found[causal], tiled[causal]) for causal in tiled)
        for mode, ranks in SHARDS:
            for causal in tiled:
                whole = untiled(plain, operation, x, causal=causal)
                assert scaled_error(shared(plain, operation, x, mode, ranks, causal=causal), whole) <= FLOAT32

    @pytest.mark.parametrize("time", [1, 2])
    def test_timesteps_of_a_batch(self, time: int) -> None:
        plain = tiny_vae("ltx-2 timestep")
        z, temb = latents(plain, time, 5, 6, batch=2), torch.tensor([0.05, 0.4])
        tiled = plain.decode(z, temb).sample
        assert not torch.equal(tiled, plain.decode(z, temb.flip(0)).sample)
        assert torch.equal(on_ranks(3, plain, lambda vae, _: vae.decode(z, temb).sample)[0], tiled)
        for mode, ranks in SHARDS:
            error = scaled_error(shared(plain, DECODE, z, mode, ranks, temb=temb), untiled(plain, DECODE, z, temb=temb))
            assert error <= FLOAT32

    @pytest.mark.parametrize("mode", [VaeParallelMode.TILE, VaeParallelMode.SPATIAL_SHARD_WIDTH])
    @pytest.mark.parametrize("extents", [(2, 5, 6), (1, 4, 4)])
    def test_slices_get_their_own_timestep(self, mode: VaeParallelMode, extents: tuple[int, int, int]) -> None:
        plain = tiny_vae("ltx-2 timestep")
        z, temb = latents(plain, *extents, batch=3), torch.tensor([0.05, 0.4, 0.9])
        one_by_one = torch.cat([plain.decode(z[i : i + 1], temb[i : i + 1]).sample for i in range(3)])
        plain.enable_slicing()
        with pytest.raises(ValueError, match="too many values to unpack"):
            plain.decode(z, temb)

        def body(vae: Any, rank: int) -> Any:
            ran, taken = count_calls(vae.decoder), decisions(vae)
            sample = vae.decode(z, temb, return_dict=False)[0]
            with pytest.raises(GeometryError, match="3 latents need a timestep each"):
                vae.decode(z, temb[:1])
            return sample, {shape[0] for shape in ran}, [d.strategy for d in taken]

        sample, batches, taken = on_ranks(2, plain, body, mode=mode)[0]
        assert batches == {1}
        large = extents[1] > 4
        assert taken == [Strategy(mode.value) if large else Strategy.DIRECT] * 2
        if mode is VaeParallelMode.TILE or not large:
            assert torch.equal(sample, one_by_one)
        else:
            plain.disable_slicing()
            assert scaled_error(sample, untiled(plain, DECODE, z, temb=temb)) <= FLOAT32

    @pytest.mark.parametrize("operation", list(Operation))
    def test_slices_without_timesteps_are_as_in_diffusers(self, operation: Operation) -> None:
        plain = tiny_vae("ltx-2.3")
        plain.enable_slicing()
        x = given(plain, operation, 2, 5, 7, batch=2)
        expected = run_public(plain, operation, x)
        assert torch.equal(on_ranks(2, plain, lambda vae, _: run_public(vae, operation, x))[0], expected)

    @pytest.mark.parametrize("mode", [VaeParallelMode.TILE, VaeParallelMode.SPATIAL_SHARD_WIDTH])
    @pytest.mark.parametrize("direct", [False, True])
    def test_ranks_that_differ_in_them_all_say_so(self, mode: VaeParallelMode, direct: bool) -> None:
        plain = tiny_vae("ltx-2 timestep")
        z = latents(plain, 1, 5, 6)
        cases: list[list[dict[str, Any]]] = [
            [{"temb": torch.tensor([0.05])}, {"temb": torch.tensor([0.06])}],
            [{"temb": torch.tensor([0.05])}, {"temb": torch.tensor([0.05], dtype=torch.float64)}],
            [{"temb": torch.tensor([0.05])}, {"temb": None}],
            [{"temb": torch.tensor([0.05]), "causal": True}, {"temb": torch.tensor([0.05]), "causal": None}],
        ]

        def body(vae: Any, rank: int) -> None:
            for case in cases:
                with pytest.raises(DisagreementError, match="arguments"):
                    (vae.tiled_decode if direct else vae.decode)(z, **case[rank])
            vae.decode(z, temb=torch.tensor([0.05]))

        on_ranks(2, plain, body, mode=mode)

    def test_a_failure_in_the_middle_and_the_call_after_it(self) -> None:
        plain = tiny_vae("ltx-2 timestep")
        z = latents(plain, 1, 5, 6)
        expected = plain.decode(z, torch.tensor([0.05])).sample

        def body(vae: Any, rank: int) -> torch.Tensor:
            with pytest.raises(RankError):
                vae.decode(z, torch.tensor([0.05, 0.4, 0.9]))  # three timesteps for one clip
            return vae.decode(z, torch.tensor([0.05])).sample

        assert torch.equal(on_ranks(2, plain, body)[0], expected)


class TestTime:
    """``use_framewise_decoding``, for which diffusers cuts time and is one frame late."""

    @pytest.mark.parametrize("operation", list(Operation))
    @pytest.mark.parametrize(("height", "width"), [(5, 6), (3, 4)])
    def test_a_shard_needs_no_cuts(self, operation: Operation, height: int, width: int) -> None:
        plain = tiny_vae("ltx-2")
        plain.use_framewise_decoding = plain.use_framewise_encoding = True
        x = given(plain, operation, 4, height, width)
        wanted = untiled(plain, operation, x)
        assert scaled_error(run_public(plain, operation, x), wanted) > 0.01, "diffusers cuts this clip"
        for mode in (VaeParallelMode.SPATIAL_SHARD_HEIGHT, VaeParallelMode.SPATIAL_SHARD_WIDTH):
            assert scaled_error(shared(plain, operation, x, mode, 3), wanted) <= FLOAT32

    @pytest.mark.parametrize("operation", list(Operation))
    @pytest.mark.parametrize(("height", "width"), [(5, 6), (3, 4)])
    @pytest.mark.parametrize("time", [1, 2])
    def test_a_clip_not_longer_than_a_tile_is_not_cut(
        self, operation: Operation, height: int, width: int, time: int
    ) -> None:
        plain = tiny_vae("ltx-2")
        short = given(plain, operation, time, height, width)
        expected = run_public(plain, operation, short)
        plain.use_framewise_decoding = True

        def body(vae: Any, rank: int) -> Any:
            taken = decisions(vae)
            return run_public(vae, operation, short), taken[0]

        result, decision = on_ranks(2, plain, body)[0]
        assert torch.equal(result, expected)
        assert decision.grid[0] == 1
        assert decision.strategy is (Strategy.TILE if max(height, width) > 4 else Strategy.DIRECT)

    def test_auto_takes_a_shard(self) -> None:
        plain = tiny_vae("ltx-2")
        plain.use_framewise_decoding = True
        z = latents(plain, 3, 5, 7)

        def body(vae: Any, rank: int) -> Any:
            taken = decisions(vae)
            return vae.decode(z).sample, taken[0].strategy

        sample, strategy = on_ranks(2, plain, body, mode=VaeParallelMode.AUTO)[0]
        assert strategy is Strategy.SPATIAL_SHARD_WIDTH
        assert scaled_error(sample, untiled(plain, DECODE, z)) <= FLOAT32

    @pytest.mark.parametrize("operation", list(Operation))
    def test_alone_it_is_diffusers_own(self, operation: Operation) -> None:
        plain = tiny_vae("ltx-2.3")
        plain.use_framewise_decoding = True
        x = given(plain, operation, 3, 5, 7)
        expected = run_public(plain, operation, x)
        plain.__class__ = DistributedAutoencoderKLLTX2Video
        assert torch.equal(run_public(plain, operation, x), expected)

    @pytest.mark.parametrize("operation", list(Operation))
    def test_causal_networks_do_not_look_ahead(self, operation: Operation) -> None:
        plain = tiny_vae("ltx-2")
        x = given(plain, operation, 3, 3, 5)
        later = x.clone()
        later[:, :, -1] += 1
        early, other = on_ranks(
            2, plain, lambda vae, _: [run_public(vae, operation, v, causal=True) for v in (x, later)]
        )[0]
        kept = 2 if operation is ENCODE else 1 + STEP
        assert torch.equal(early[:, :, :kept], other[:, :, :kept])
        assert not torch.equal(early, other)


def test_tiles_of_a_decoder_that_injects_noise_are_refused() -> None:
    plain = tiny_vae("ltx-2 noise")
    x = given(plain, ENCODE, 1, 5, 7)
    expected = plain.encode(x).latent_dist.parameters

    def body(vae: Any, rank: int) -> torch.Tensor:
        ran = count_calls(vae.decoder)
        with pytest.raises(UnsupportedError, match=r"injects noise \(decoder_inject_noise.* or take a spatial shard"):
            vae.decode(given(vae, DECODE, 1, 5, 7))
        assert not ran
        return vae.encode(x).latent_dist.parameters

    assert all(torch.equal(found, expected) for found in on_ranks(2, plain, body))
