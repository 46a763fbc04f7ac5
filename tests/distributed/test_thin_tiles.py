# SPDX-License-Identifier: Apache-2.0
"""Sizes whose last encode tile would be thinner than one latent, where diffusers' sequential tiles crash.

The leftover joins the tile before it. Two measures: bit-equal to the same tiles encoded one by one and blended with
diffusers' own ``blend_v`` and ``blend_h``; and not much further from the un-tiled result than diffusers' tiles of the
next larger size, which do not crash. The second compares two large errors: a tiny random VAE attends over a whole tile,
so any tiling of it is about as far from un-tiled as half of the moments' spread, and more.
"""

from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan

from tests.distributed.ranks import Worlds
from tests.helpers.tiles import tiles_by_hand
from tests.helpers.vaes import VAES, decisions, pixels, tiny_vae
from vllm_omni_vae.autoencoders import distribute

pytestmark = pytest.mark.distributed

RATIO = 8
NOT_MUCH_FURTHER = 1.5


def moments_by_hand(config: str, x: torch.Tensor) -> torch.Tensor:
    """Moments of every tile by itself, blended and cropped as diffusers does."""
    one_tile = 2 * max(x.shape)
    plain = tiny_vae(config, tiled=False)
    plain.enable_tiling(one_tile, one_tile, one_tile, one_tile)
    height, width, *strides = VAES[config].tile
    return tiles_by_hand(
        plain, plain.tiled_encode, x, (height, width), (strides[0], strides[1]), RATIO, lambda units: units // RATIO
    )


def crashes(vae: AutoencoderKLWan, x: torch.Tensor) -> bool:
    try:
        vae.encode(x)
    except RuntimeError as error:
        assert "Kernel size can't be greater than actual input size" in str(error)
        return True
    finally:
        vae.clear_cache()
    return False


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).square().mean().sqrt())


def thin(rank: int, size: int, *, config: str, frames: int, height: int, width: int) -> Any:
    """Case: one size that diffusers cannot encode in tiles."""
    vae, plain, untiled = tiny_vae(config), tiny_vae(config), tiny_vae(config, tiled=False)
    distribute(vae, size=size)
    taken = decisions(vae)
    x = pixels(vae, frames, height, width)
    got, whole = vae.encode(x).latent_dist.parameters, untiled.encode(x).latent_dist.parameters
    larger = pixels(vae, frames, -(-height // RATIO) * RATIO, -(-width // RATIO) * RATIO)
    larger_error = error(plain.encode(larger).latent_dist.parameters, untiled.encode(larger).latent_dist.parameters)
    by_hand = moments_by_hand(config, x)
    return {
        "crashes": crashes(plain, x),
        "shapes": [list(got.shape), list(whole.shape)],
        "finite": bool(got.isfinite().all()),
        "by hand": float((got - by_hand).abs().max()) if got.shape == by_hand.shape else None,
        "error": error(got, whole),
        "error of a larger size": larger_error,
        "grid": list(taken[0].grid),
    }


@pytest.mark.parametrize(
    ("config", "frames", "height", "width", "grid"),
    [
        ("wan2.1", 1, 49, 64, [1, 2, 3]),
        ("wan2.1", 5, 50, 40, [1, 2, 2]),
        ("wan2.1", 1, 52, 52, [1, 2, 2]),
        ("wan2.1", 1, 79, 8, [1, 3, 1]),
        ("wan2.1", 5, 8, 79, [1, 1, 3]),
        ("wan2.1", 1, 25, 73, [1, 1, 3]),
        ("wan2.2-a14b", 5, 49, 87, [1, 2, 2]),
        ("wan2.2-a14b", 1, 76, 44, [1, 3, 1]),
    ],
)
@pytest.mark.parametrize("size", [2, 3])
def test_a_thin_leftover_joins_its_neighbour(
    config: str, frames: int, height: int, width: int, grid: list[int], size: int, worlds: Worlds
) -> None:
    for answer in worlds[size].run(thin, config=config, frames=frames, height=height, width=width):
        assert answer["crashes"]
        assert answer["grid"] == grid
        assert answer["shapes"][0] == answer["shapes"][1] == [*answer["shapes"][0][:-2], height // 8, width // 8]
        assert answer["finite"]
        assert answer["by hand"] == 0.0
        assert answer["error"] <= NOT_MUCH_FURTHER * answer["error of a larger size"]


def beyond(rank: int, size: int, *, sizes: list[list[int]]) -> Any:
    """Case: sizes that diffusers can encode in tiles, just above a whole number of strides."""
    vae, plain = tiny_vae(), tiny_vae()
    distribute(vae, size=size)
    found = []
    for height, width in sizes:
        x = pixels(vae, 1, height, width)
        got, expected = vae.encode(x).latent_dist.parameters, plain.encode(x).latent_dist.parameters
        found.append([list(got.shape[-2:]), float((got - expected).abs().max())])
    return found


def test_a_leftover_of_one_latent_or_more_is_a_tile_of_its_own(worlds: Worlds) -> None:
    sizes = [[56, 64], [57, 63], [80, 33], [9, 104], [36, 36], [60, 32]]
    for answer in worlds[2].run(beyond, sizes=sizes):
        assert answer == [[[height // 8, width // 8], 0.0] for height, width in sizes]
