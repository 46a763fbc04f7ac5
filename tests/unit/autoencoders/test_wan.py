# SPDX-License-Identifier: Apache-2.0
"""Wan's units: which requests are tiled, into what, and what each tile costs."""

from typing import Any

import pytest
import torch

from tests.helpers.vaes import count_calls, decisions, latents, on_ranks, pixels, takes_the_tiled_path, tiny_vae
from vllm_omni_vae.autoencoders import DistributedAutoencoderKLWan, Operation, Strategy
from vllm_omni_vae.errors import GeometryError

SPEC = DistributedAutoencoderKLWan.spec
NAMES = ["wan2.1", "wan2.2-a14b", "wan2.2-ti2v-5b"]
METHODS = ("tiled_encode", "tiled_decode")


@pytest.mark.parametrize("name", NAMES)
def test_tiled_exactly_where_diffusers_tiles_and_encode_as_decode(name: str) -> None:
    vae = tiny_vae(name)
    ratio = vae.spatial_compression_ratio
    found = set()
    for height in range(1, 7):
        for width in range(1, 8):
            z, x = latents(vae, 1, height, width), pixels(vae, 1, height * ratio, width * ratio)
            decode = SPEC.is_tiled(vae, Operation.DECODE, tuple(z.shape))
            encode = SPEC.is_tiled(vae, Operation.ENCODE, tuple(x.shape))
            assert encode == decode, (height, width)
            assert decode == takes_the_tiled_path(vae, Operation.DECODE, z, *METHODS), (height, width)
            assert encode == takes_the_tiled_path(vae, Operation.ENCODE, x, *METHODS), (height, width)
            found.add(decode)
    assert found == {True, False}
    vae.disable_tiling()
    assert not SPEC.is_tiled(vae, Operation.DECODE, tuple(z.shape))
    assert not SPEC.is_tiled(vae, Operation.ENCODE, tuple(x.shape))


def test_sizes_between_latents_follow_diffusers_too() -> None:
    vae = tiny_vae()
    for height, width in ((33, 32), (32, 39), (31, 31), (36, 36)):
        x = pixels(vae, 1, height, width)
        tiled = SPEC.is_tiled(vae, Operation.ENCODE, tuple(x.shape))
        assert tiled == takes_the_tiled_path(vae, Operation.ENCODE, x, *METHODS) == (height > 32 or width > 32)


@pytest.mark.parametrize(
    ("name", "operation", "shape", "grid", "calls"),
    [
        # A decoder call is one latent frame of one tile; an encoder call is one chunk of frames of one tile.
        ("wan2.1", Operation.DECODE, (1, 4, 1, 9, 9), (1, 3, 3), 9),
        ("wan2.1", Operation.DECODE, (2, 4, 2, 5, 4), (1, 2, 2), 8),
        ("wan2.1", Operation.ENCODE, (1, 3, 1, 72, 72), (1, 3, 3), 9),
        ("wan2.1", Operation.ENCODE, (1, 3, 9, 40, 24), (1, 2, 1), 6),
        ("wan2.2-a14b", Operation.DECODE, (1, 6, 1, 5, 11), (1, 2, 3), 6),
        # Decode tiles are 4 latents every 3; encode tiles count patchified pixels, so they span twice the image.
        ("wan2.2-ti2v-5b", Operation.DECODE, (1, 4, 2, 5, 7), (1, 2, 3), 12),
        ("wan2.2-ti2v-5b", Operation.ENCODE, (1, 3, 5, 144, 144), (1, 2, 2), 8),
        ("wan2.2-ti2v-5b", Operation.ENCODE, (1, 3, 1, 80, 80), (1, 1, 1), 1),
    ],
)
def test_grids_and_the_number_of_calls(
    name: str, operation: Operation, shape: tuple[int, ...], grid: tuple[int, int, int], calls: int
) -> None:
    size = 3
    plain = tiny_vae(name)
    encode = operation is Operation.ENCODE
    x = pixels(plain, *shape[2:]) if encode else latents(plain, *shape[2:], batch=shape[0])
    assert tuple(x.shape) == shape
    sequential = count_calls(plain.encoder if encode else plain.decoder)
    (plain.encode if encode else plain.decode)(x)

    def body(vae: Any, rank: int) -> Any:
        vae.decoder._forward_pre_hooks.clear()
        vae.encoder._forward_pre_hooks.clear()
        ran = count_calls(vae.encoder if encode else vae.decoder)
        taken = decisions(vae)
        (vae.encode if encode else vae.decode)(x)
        return ran, taken

    ranks = on_ranks(size, plain, body)
    calls_per_tile = calls // (grid[1] * grid[2])
    tiles_per_rank = ranks[0][1][0].tiles_per_rank
    assert [len(ran) for ran, _ in ranks] == [tiles * calls_per_tile for tiles in tiles_per_rank]
    assert sum(len(ran) for ran, _ in ranks) == len(sequential) == calls
    assert sorted(shape for ran, _ in ranks for shape in ran) == sorted(sequential), "the same tiles, not only as many"
    for _, (decision,) in ranks:
        assert (decision.strategy, decision.grid, decision.operation) == (Strategy.TILE, grid, operation)
        assert sum(decision.tiles_per_rank) == grid[1] * grid[2]
        assert decision == ranks[0][1][0]


@pytest.mark.parametrize("name", [*NAMES, "half time"])
def test_shapes_are_predicted(name: str) -> None:
    vae = tiny_vae(name)
    vae.__class__ = DistributedAutoencoderKLWan
    ratio, patch = vae.spatial_compression_ratio, vae.config.patch_size or 1
    step = 2 if name == "half time" else 4
    for time, height, width in ((1, 5, 7), (3, 6, 4)):
        z = latents(vae, time, height, width)
        tasks, spec = vae.tile_split(z)
        assert spec.output_shape == (1, 3, 1 + (time - 1) * step, height * ratio, width * ratio)
        for task in tasks:
            assert tuple(vae.tile_exec(task).shape) == task.output_shape
        x = torch.zeros(1, 3 * patch**2, 1 + (time - 1) * step, height * ratio // patch, width * ratio // patch)
        tasks, spec = vae.encode_tile_split(x)
        assert spec.output_shape == (1, 2 * vae.config.z_dim, time, height, width)
        for task in tasks:
            assert tuple(vae.encode_tile_exec(task).shape) == task.output_shape


@pytest.mark.parametrize("frames", [2, 3, 4, 6, 8])
def test_frames_off_the_grid_are_refused_before_any_rank_starts(frames: int) -> None:
    plain = tiny_vae()
    for extent in (24, 56):

        def body(vae: Any, rank: int, extent: int = extent) -> tuple[str, int]:
            ran = count_calls(vae.encoder)
            with pytest.raises(GeometryError, match=r"encodes 1 \+ 4k frames and would ignore the rest") as caught:
                vae.encode(pixels(vae, frames, extent, extent))
            return str(caught.value), len(ran)

        below = (frames - 1) // 4 * 4 + 1
        for message, calls in on_ranks(2, plain, body):
            assert f"the rest of {frames}; give {below} or {below + 4}" in message
            assert calls == 0


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("wan2.1", (1, 3, 64, 64), r"encodes \(B, C, T, H, W\) tensors"),
        ("wan2.1", (1, 3, 1, 7, 64), "cannot encode 7x64 pixels: both must be at least 8"),
        ("wan2.1", (1, 3, 1, 64, 0), "cannot encode 64x0 pixels"),
        ("wan2.2-ti2v-5b", (1, 3, 1, 15, 160), "at least 16"),
        ("wan2.2-ti2v-5b", (1, 3, 1, 161, 160), "cannot encode 161x160"),
        # Residual down-sampling cannot take half a latent.
        ("wan2.2-ti2v-5b", (1, 3, 1, 88, 160), "cannot encode 88x160"),
        ("wan2.2-ti2v-5b", (1, 3, 1, 40, 64), "cannot encode 40x64"),
    ],
)
def test_pixels_that_cannot_be_encoded_are_refused_before_any_rank_starts(
    name: str, shape: tuple[int, ...], reason: str
) -> None:
    def body(vae: Any, rank: int) -> int:
        ran = count_calls(vae.encoder)
        with pytest.raises(GeometryError, match=reason):
            vae.encode(torch.zeros(shape))
        return len(ran)

    assert on_ranks(2, tiny_vae(name), body) == [0, 0]


def test_latents_of_other_dims_are_refused() -> None:
    def body(vae: Any, rank: int) -> None:
        with pytest.raises(
            GeometryError, match=r"decodes \(B, C, T, H, W\) tensors; this one has the shape \(4, 9, 9\)"
        ):
            vae.decode(torch.zeros(4, 9, 9))

    on_ranks(2, tiny_vae(), body)


@pytest.mark.parametrize("frames", [1, 5, 9])
def test_a_vae_that_halves_time_is_as_diffusers_where_diffusers_takes_every_frame(frames: int) -> None:
    plain = tiny_vae("half time")
    x = pixels(plain, frames, 24, 40)
    z = latents(plain, (frames + 1) // 2, 3, 5)
    moments, sample = plain.encode(x).latent_dist.parameters, plain.decode(z).sample
    for found, decoded in on_ranks(
        2, plain, lambda vae, _: (vae.encode(x).latent_dist.parameters, vae.decode(z).sample), broadcast=True
    ):
        assert torch.equal(found, moments)
        assert torch.equal(decoded, sample)
        assert decoded.shape[2] == frames


@pytest.mark.parametrize(("height", "width"), [(56, 40), (32, 24)])
@pytest.mark.parametrize("frames", [3, 7])
def test_a_vae_that_halves_time_ignores_no_frame(frames: int, height: int, width: int) -> None:
    # Diffusers cuts time in fours whatever the VAE is and would drop the last two frames, so they are refused or done
    # right. A causal encoder's first latents do not depend on later frames: those of a longer clip are what is right.
    plain = tiny_vae("half time")
    x = pixels(plain, frames + 2, height, width)
    longer = plain.encode(x).latent_dist.parameters[:, :, : (frames + 1) // 2]

    def body(vae: Any, rank: int) -> torch.Tensor | str:
        try:
            return vae.encode(x[:, :, :frames]).latent_dist.parameters
        except GeometryError as error:
            return str(error)

    for found in on_ranks(2, plain, body):
        if isinstance(found, str):
            assert f"would ignore the rest of {frames}" in found
        else:
            assert found.shape == longer.shape
            assert torch.allclose(found, longer, rtol=0, atol=1e-5)


@pytest.mark.parametrize("frames", [2, 4, 6])
def test_frames_that_no_vae_which_halves_time_can_take_are_refused(frames: int) -> None:
    def body(vae: Any, rank: int) -> None:
        with pytest.raises(GeometryError, match=rf"would ignore the rest of {frames}"):
            vae.encode(pixels(vae, frames, 56, 40))

    on_ranks(2, tiny_vae("half time"), body)


@pytest.mark.parametrize("name", NAMES)
def test_frames_do_not_depend_on_later_latents(name: str) -> None:
    plain = tiny_vae(name)
    z = latents(plain, 3, 3, 5)
    later = z.clone()
    later[:, :, 2] += 1

    def body(vae: Any, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        return vae.decode(z).sample, vae.decode(later).sample

    sample, other = on_ranks(2, plain, body)[0]
    assert torch.equal(sample[:, :, :5], other[:, :, :5])
    assert not torch.equal(sample[:, :, 5:], other[:, :, 5:])


@pytest.mark.parametrize("name", NAMES)
def test_decoded_values_stay_within_the_range(name: str) -> None:
    plain = tiny_vae(name)
    z = latents(plain, 1, 5, 7) * 50
    sample = on_ranks(2, plain, lambda vae, _: vae.decode(z).sample)[0]
    assert torch.equal(sample, plain.decode(z).sample)
    assert 0.9 < float(sample.abs().max()) <= 1.0
