# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image's own facts: pictures as one frame, an alpha channel, the clamp after tiles, frames that are cut alike."""

import copy
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLQwenImage21

from tests.helpers.vaes import count_calls, decisions, latents, noise, on_ranks, pixels, run_public, tiny_vae
from tests.sharding.spread import Spread, results
from vllm_omni_vae.autoencoders import DistributedAutoencoderKLQwenImage, Operation, Strategy
from vllm_omni_vae.autoencoders.compare import run_pieces_alone
from vllm_omni_vae.autoencoders.qwen_image import DistributedAutoencoderKLQwenImage21
from vllm_omni_vae.autoencoders.spec import CallOptions
from vllm_omni_vae.config import VaeParallelMode, VaeSplits
from vllm_omni_vae.distributed import LocalCommunicator
from vllm_omni_vae.errors import GeometryError
from vllm_omni_vae.sharding import SpatialShard
from vllm_omni_vae.tiny.common import randomize

ENCODE, DECODE = Operation.ENCODE, Operation.DECODE
SPEC = DistributedAutoencoderKLQwenImage.spec
NAMES = ["qwen-image", "qwen-image rgba"]
CHANNELS = {"qwen-image": 3, "qwen-image rgba": 4}


def untiled(vae: Any, operation: Operation, x: torch.Tensor) -> torch.Tensor:
    alone = copy.deepcopy(vae)
    alone.disable_tiling()
    return run_public(alone, operation, x)


def scaled_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    assert got.shape == wanted.shape
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())


@pytest.mark.parametrize(
    ("name", "operation", "extents", "grid", "calls"),
    [
        ("qwen-image", DECODE, (1, 9, 9), (1, 3, 3), 9),
        ("qwen-image", DECODE, (2, 5, 4), (1, 2, 2), 8),
        ("qwen-image", ENCODE, (1, 72, 72), (1, 3, 3), 9),
        ("qwen-image", ENCODE, (5, 40, 24), (1, 2, 1), 4),
        ("qwen-image rgba", DECODE, (1, 5, 11), (1, 2, 3), 6),
        ("qwen-image rgba", ENCODE, (5, 40, 88), (1, 2, 3), 12),
        ("qwen-image rgba", ENCODE, (1, 32, 48), (1, 1, 1), 1),
    ],
)
def test_grids_and_the_number_of_calls(
    name: str, operation: Operation, extents: tuple[int, int, int], grid: tuple[int, int, int], calls: int
) -> None:
    plain = tiny_vae(name)
    network = "encoder" if operation is ENCODE else "decoder"
    x = (pixels if operation is ENCODE else latents)(plain, *extents)
    sequential = count_calls(getattr(plain, network))
    expected = run_public(plain, operation, x)

    def body(vae: Any, rank: int) -> Any:
        getattr(vae, network)._forward_pre_hooks.clear()
        ran, taken = count_calls(getattr(vae, network)), decisions(vae)
        return run_public(vae, operation, x), ran, taken

    ranks = on_ranks(2, plain, body, broadcast=True)
    assert len(sequential) == calls
    if grid != (1, 1, 1):
        assert sorted(shape for _, ran, _ in ranks for shape in ran) == sorted(sequential), "the same tiles"
    for result, _, (decision,) in ranks:
        tiled = grid != (1, 1, 1)
        assert (decision.strategy, decision.grid) == (Strategy.TILE if tiled else Strategy.DIRECT, grid)
        assert torch.equal(result, expected if operation is ENCODE else expected.clamp(-1, 1))


@pytest.mark.parametrize("name", NAMES)
def test_tiled_exactly_where_diffusers_tiles(name: str) -> None:
    vae = tiny_vae(name)
    limits = vae.tile_sample_min_height // 8, vae.tile_sample_min_width // 8
    for height in range(3, 7):
        for width in range(3, 8):
            tiled = height > limits[0] or width > limits[1]
            for operation, x in (
                (DECODE, latents(vae, 1, height, width)),
                (ENCODE, pixels(vae, 1, height * 8, width * 8)),
            ):
                assert SPEC.is_tiled(vae, operation, tuple(x.shape)) == tiled
                network = copy.deepcopy(vae)
                ran = count_calls(network.encoder if operation is ENCODE else network.decoder)
                run_public(network, operation, x)
                assert (len(ran) > 1) == tiled


@pytest.mark.parametrize("name", NAMES)
def test_merged_tiles_are_clamped_as_an_untiled_sample_and_diffusers_tiles_are_not(name: str) -> None:
    plain = tiny_vae(name)
    z = latents(plain, 1, 5, 7) * 50
    sequential = plain.decode(z).sample
    assert float(sequential.abs().max()) > 1
    assert float(untiled(plain, DECODE, z).abs().max()) == 1
    sample = on_ranks(2, plain, lambda vae, _: vae.decode(z).sample)[0]
    assert torch.equal(sample, sequential.clamp(-1, 1))
    assert not torch.equal(sample, sequential)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("time", [1, 2])
def test_shapes_are_predicted(name: str, time: int) -> None:
    vae = tiny_vae(name)
    vae.__class__ = DistributedAutoencoderKLQwenImage
    frames, channels = 1 + 4 * (time - 1), CHANNELS[name]
    tasks, grid = vae.tile_split(latents(vae, time, 5, 7))
    assert grid.output_shape == (1, channels, frames, 40, 56)
    assert [tuple(vae.tile_exec(task).shape) for task in tasks] == [task.output_shape for task in tasks]
    tasks, grid = vae.encode_tile_split(pixels(vae, frames, 40, 56))
    assert grid.output_shape == (1, 8, time, 5, 7)
    assert [tuple(vae.encode_tile_exec(task).shape) for task in tasks] == [task.output_shape for task in tasks]


@pytest.mark.parametrize("frames", [2, 3, 4, 6, 8])
def test_frames_off_the_grid_are_refused_before_any_rank_starts(frames: int) -> None:
    def body(vae: Any, rank: int) -> int:
        ran = count_calls(vae.encoder)
        with pytest.raises(GeometryError, match=r"AutoencoderKLQwenImage encodes 1 \+ 4k frames"):
            vae.encode(pixels(vae, frames, 56, 24))
        return len(ran)

    assert on_ranks(2, tiny_vae("qwen-image"), body) == [0, 0]


@pytest.mark.parametrize(
    ("operation", "shape", "reason"),
    [
        (ENCODE, (1, 3, 64, 64), r"encodes \(B, C, T, H, W\) tensors"),
        (DECODE, (1, 4, 9, 9), r"decodes \(B, C, T, H, W\) tensors"),
        (ENCODE, (1, 3, 1, 7, 64), "cannot encode 7x64 pixels: both must be at least 8"),
    ],
)
def test_pictures_without_a_frame_and_too_small_ones_are_refused(
    operation: Operation, shape: tuple[int, ...], reason: str
) -> None:
    def body(vae: Any, rank: int) -> None:
        with pytest.raises(GeometryError, match=reason):
            run_public(vae, operation, torch.zeros(shape))

    on_ranks(2, tiny_vae("qwen-image"), body)


@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize(("chunk", "time"), [(1, 4), (2, 4), (2, 5), (4, 4), (4, 6)])
def test_several_latent_frames_at_a_time_are_exact(chunk: int, time: int, operation: Operation) -> None:
    vae = tiny_vae("qwen-image", torch.float64)
    frames = 1 + 4 * (time - 1)
    x = pixels(vae, frames, 24, 16, batch=2) if operation is ENCODE else latents(vae, time, 3, 2, batch=2)
    spread = Spread(2, 1, (3, 2))
    extents = (3, 2) if operation is ENCODE else (24, 16)

    def body(comm: LocalCommunicator, shard: SpatialShard) -> tuple[torch.Tensor | None, int]:
        own, options = copy.deepcopy(vae), CallOptions(chunk)
        ran = count_calls(own.encoder if operation is ENCODE else own.decoder)
        mine = shard.shard(x, SPEC.ratio(vae, operation))
        with shard:
            if operation is ENCODE:
                piece = SPEC.encode_tile(own, mine, options)
            else:
                piece = SPEC.finish_decode(own, SPEC.decode_tile(own, mine, options))
        return shard.gather(piece, extents, comm, 0), len(ran)

    (whole, calls), (_, others) = results(spread.each(body))
    assert calls == others == 1 + -(-(time - 1) // chunk)
    assert whole is not None
    assert scaled_error(whole, untiled(vae, operation, x)) <= 1e-12


def qwen_image_2_1(dtype: torch.dtype = torch.float32) -> Any:
    made = AutoencoderKLQwenImage21(base_dim=8, decoder_base_dim=8, z_dim=4, dim_mult=[1] * 5, num_res_blocks=1)
    made = randomize(made, torch.Generator().manual_seed(0))
    torch.nn.Module.to(made, dtype)
    made.enable_tiling(64, 64, 48, 48)
    return made


GIVEN_2_1 = {DECODE: (1, 4, 1, 5, 7), ENCODE: (1, 4, 1, 80, 112)}


@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize("size", [2, 3])
def test_qwen_image_2_1_tiles_as_diffusers(size: int, operation: Operation) -> None:
    plain = qwen_image_2_1()
    x = noise(*GIVEN_2_1[operation])
    expected = run_public(plain, operation, x)

    def body(vae: Any, rank: int) -> Any:
        taken = decisions(vae)
        return run_public(vae, operation, x), taken

    for result, (decision,) in on_ranks(size, plain, body, broadcast=True):
        assert (decision.strategy, decision.grid) == (Strategy.TILE, (1, 2, 3))
        assert torch.equal(result, expected)


@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize(("axis", "size"), [("height", 2), ("height", 3), ("width", 2), ("width", 3), ("grid", 4)])
def test_qwen_image_2_1_shards_exactly(axis: str, size: int, operation: Operation) -> None:
    mode = VaeParallelMode(f"spatial_shard_{axis}")
    plain = qwen_image_2_1(torch.float64)
    x = noise(*GIVEN_2_1[operation], dtype=torch.float64)

    def body(vae: Any, rank: int) -> torch.Tensor:
        taken = decisions(vae)
        result = run_public(vae, operation, x)
        assert [decision.strategy.value for decision in taken] == [mode.value]
        return result

    assert scaled_error(on_ranks(size, plain, body, mode=mode)[0], untiled(plain, operation, x)) <= 1e-12


@pytest.mark.parametrize("operation", list(Operation))
def test_qwen_image_2_1_in_a_piece_for_each_rank(operation: Operation) -> None:
    plain = qwen_image_2_1()
    x = noise(*GIVEN_2_1[operation])

    def body(vae: Any, rank: int) -> Any:
        taken = decisions(vae)
        return run_public(vae, operation, x), taken[0]

    result, decision = on_ranks(4, plain, body, splits=VaeSplits(1, 1))[0]
    assert (decision.strategy, decision.grid, decision.margin) == (Strategy.RANK_SPLIT, (1, 2, 2), 1)
    alone = copy.deepcopy(plain)
    alone.__class__ = DistributedAutoencoderKLQwenImage21
    assert torch.equal(result, run_pieces_alone(alone, operation, x, {}, decision))
    assert not torch.equal(result, untiled(plain, operation, x))


@pytest.mark.parametrize(("operation", "frames"), [(DECODE, 2), (ENCODE, 9)])
def test_qwen_image_2_1_has_no_video(operation: Operation, frames: int) -> None:
    shape = list(GIVEN_2_1[operation])
    shape[2] = frames

    def body(vae: Any, rank: int) -> None:
        with pytest.raises(GeometryError, match=f"s single frames; this input has {frames}"):
            run_public(vae, operation, torch.zeros(shape))

    assert DistributedAutoencoderKLQwenImage21.spec.modes == frozenset(VaeParallelMode)
    on_ranks(2, qwen_image_2_1(), body)
