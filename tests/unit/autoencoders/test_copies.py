# SPDX-License-Identifier: Apache-2.0
"""A copy of a distributed VAE works by itself; a new tile geometry is taken whole or not at all."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.helpers.vaes import latents, on_ranks, pixels, tiny_vae
from vllm_omni_vae.autoencoders import DistributedAutoencoderKLWan
from vllm_omni_vae.errors import GeometryError


def pickled(vae: Any) -> Any:
    return pickle.loads(pickle.dumps(vae))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
def test_a_copy_is_not_distributed_and_works(duplicate: Callable[[Any], Any]) -> None:
    plain = tiny_vae()
    z, x = latents(plain, 1, 3, 5), pixels(plain, 1, 24, 40)
    sample, moments = plain.decode(z).sample, plain.encode(x).latent_dist.parameters

    def body(vae: Any, rank: int) -> Any:
        alone = duplicate(vae)
        found = [alone.is_distributed_enabled(), vae.is_distributed_enabled(), vae._vae_parallel is not None]
        found.append(torch.equal(alone.decode(z).sample, sample))
        found.append(torch.equal(alone.encode(x).latent_dist.parameters, moments))
        found.append(torch.equal(vae.encode(x).latent_dist.parameters, moments))
        return found

    assert on_ranks(2, plain, body) == [[False, True, True, True, True, True]] * 2


def geometry(vae: Any) -> tuple[Any, ...]:
    return (
        vae.use_tiling,
        vae.tile_sample_min_height,
        vae.tile_sample_min_width,
        vae.tile_sample_stride_height,
        vae.tile_sample_stride_width,
    )


REFUSED = [
    # The size alone was changed: 320 px would come back as 256.
    ("wan2.1", (128,), "tile stride 192 is larger than the tile size 128"),
    ("wan2.1", (256, 128, 192, 192), "tile stride 192 is larger than the tile size 128"),
    ("wan2.1", (100, 100, 96, 96), "tile size 100 is not a multiple of the compression ratio 8.* nearest: 96"),
    ("wan2.1", (96, 96, 76, 72), "tile stride 76 is not a multiple of the compression ratio 8.* nearest: 72"),
    ("wan2.1", (96, 96, 72, 76), "tile stride 76"),
    ("wan2.1", (4, 4, 4, 4), "tile size 4 is not a multiple of the compression ratio 8"),
    ("wan2.1", (-32, 32, 24, 24), "tile size -32"),
    ("wan2.1", (32, 32, -8, 24), "stride -8"),
    # A patchified VAE encodes in halves: both ways must fit, so a whole latent is 16 pixels.
    ("wan2.2-ti2v-5b", (72, 64, 48, 48), "tile height size of 72 pixels is not a multiple of the compression ratio 16"),
    ("wan2.2-ti2v-5b", (64, 64, 48, 40), "tile width stride of 40 pixels .* nearest: 32 or 48"),
    ("wan2.2-ti2v-5b", (64, 64, 8, 48), "tile height stride of 8 pixels .* nearest: 16 or 32"),
]


@pytest.mark.parametrize(("name", "arguments", "reason"), REFUSED)
def test_a_geometry_that_cuts_or_shifts_is_refused_and_the_old_one_stays(
    name: str, arguments: tuple[int, ...], reason: str
) -> None:
    vae = tiny_vae(name, tiled=False)
    vae.__class__ = DistributedAutoencoderKLWan
    before = geometry(vae)
    with pytest.raises(GeometryError, match=reason):
        vae.enable_tiling(*arguments)
    assert geometry(vae) == before
    vae.enable_tiling(64, 64, 48, 48)
    assert geometry(vae) == (True, 64, 64, 48, 48)
    with pytest.raises(GeometryError, match="tile stride 48 is larger than the tile size 32"):
        vae.enable_tiling(96, 32, 80)
    assert geometry(vae) == (True, 64, 64, 48, 48)


@pytest.mark.parametrize("arguments", [("64", "64", 48, 48), (64, 64, 24.0, 24.0), (64, 64, "48", 48), ([64], 64)])
def test_a_size_that_is_no_whole_number_is_refused_and_the_old_one_stays(arguments: tuple[Any, ...]) -> None:
    vae = tiny_vae()
    vae.__class__ = DistributedAutoencoderKLWan
    before = geometry(vae)
    with pytest.raises((GeometryError, TypeError)):
        vae.enable_tiling(*arguments)
    assert geometry(vae) == before


def test_a_new_geometry_is_used_by_the_next_call() -> None:
    plain = tiny_vae()
    z = latents(plain, 1, 7, 8)
    other = tiny_vae()
    other.enable_tiling(40, 32, 16, 32)
    expected = [plain.decode(z).sample, other.decode(z).sample]
    assert not torch.equal(*expected)

    def body(vae: Any, rank: int) -> list[bool]:
        first = torch.equal(vae.decode(z).sample, expected[0])
        with pytest.raises(GeometryError):
            vae.enable_tiling(16)
        same = torch.equal(vae.decode(z).sample, expected[0])
        vae.enable_tiling(40, 32, 16, 32)
        return [first, same, torch.equal(vae.decode(z).sample, expected[1])]

    assert on_ranks(2, plain, body, broadcast=True) == [[True, True, True]] * 2


def test_a_geometry_that_was_set_past_the_check_is_refused_by_the_call() -> None:
    plain = tiny_vae()

    def body(vae: Any, rank: int) -> list[str]:
        vae.tile_sample_min_height = 16
        heard = []
        for call, data in ((vae.decode, latents(vae, 1, 7, 8)), (vae.encode, pixels(vae, 1, 56, 64))):
            with pytest.raises(GeometryError, match=r"tile stride .* is larger than the tile size") as caught:
                call(data)
            heard.append(str(caught.value))
        return heard

    first, second = on_ranks(2, plain, body)
    assert first == second
