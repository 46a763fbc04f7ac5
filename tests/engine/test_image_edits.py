# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image's editing models encode their references on all VAE ranks, and make what diffusers makes alone.

They scale a reference to about a megapixel, whatever its size and that of the result, so these tests take long.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from tests.engine.engines import picture
from vllm_omni_vae import DiffusionParallelConfig, Omni, tiny
from vllm_omni_vae.pipelines.request import Frames

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]

SEED = 3
TILE, STRIDE = 256, 224
WIDE, TALL = picture(96, 64), picture(60, 80, seed=1)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    families = ("qwen-image-edit", "qwen-image-edit-plus", "qwen-image-layered")
    return {family: tiny.build(family, root / family) for family in families}


def made(folder: Path, mode: str, **asked: Any) -> Any:
    """What two VAE ranks, of which one has the VAE alone, make of one request."""
    with Omni(
        model=str(folder),
        parallel_config=DiffusionParallelConfig(vae_patch_parallel_size=2, vae_parallel_mode=mode),
        vae_selftest=False,
        vae_tile_size=f"{TILE}x{TILE}",
        vae_tile_stride=f"{STRIDE}x{STRIDE}",
    ) as omni:
        return omni.generate("a boat", num_inference_steps=2, seed=SEED, **asked)


def diffusers_alone(folder: Path, *, tiled: bool, sliced: bool = False, **asked: Any) -> Frames:
    """What diffusers makes in this process, on one thread as a rank of two has it."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    if tiled:
        pipeline.vae.enable_tiling(TILE, TILE, STRIDE, STRIDE)
    pipeline.vae.use_slicing = sliced
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    try:
        images = pipeline(
            prompt="a boat",
            negative_prompt=" ",
            num_inference_steps=2,
            generator=torch.Generator("cpu").manual_seed(SEED),
            output_type="pt",
            **asked,
        ).images
    finally:
        torch.set_num_threads(threads)
    images = images[0] if isinstance(images, list) else images
    return (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()


def decided(result: Any) -> list[tuple[str, str, tuple[int, ...], tuple[int, ...]]]:
    return [(d["operation"], d["strategy"], tuple(d["grid"]), tuple(d["tiles_per_rank"])) for d in result.decisions]


def test_an_edit_in_tiles_is_diffusers_own(checkpoints: Mapping[str, Path]) -> None:
    folder = checkpoints["qwen-image-edit"]
    result = made(folder, "tile", image=WIDE, width=272, height=64)
    assert decided(result) == [("encode", "tile", (1, 4, 6), (12, 12)), ("decode", "tile", (1, 1, 2), (1, 1))]
    expected = diffusers_alone(folder, tiled=True, image=Image.fromarray(WIDE), width=272, height=64)
    assert expected.std() > 5, "a grey image would prove nothing"
    np.testing.assert_array_equal(result.frames, expected)


def test_two_references_as_one_map_each_are_those_of_one_rank(checkpoints: Mapping[str, Path]) -> None:
    """Equal to the un-tiled result up to the order of additions, of which a value of 255 shows one step at most."""
    folder, mode = checkpoints["qwen-image-edit-plus"], "spatial_shard_width"
    result = made(folder, mode, images=(WIDE, TALL), width=272, height=64)
    assert {(d["operation"], d["strategy"]) for d in result.decisions} == {("encode", mode), ("decode", mode)}
    given = [Image.fromarray(image) for image in (WIDE, TALL)]
    expected = diffusers_alone(folder, tiled=False, image=given, width=272, height=64)
    assert expected.std() > 5
    assert np.abs(result.frames.astype(int) - expected).max() <= 1


def test_layers_in_tiles_are_diffusers_own_with_their_transparency(checkpoints: Mapping[str, Path]) -> None:
    folder = checkpoints["qwen-image-layered"]
    image = np.dstack([WIDE, picture(96, 64, seed=2)[..., 0]])
    result = made(folder, "tile", image=image, layers=2)
    assert result.frames.shape == (2, 512, 768, 4)
    assert decided(result) == [("encode", "tile", (1, 3, 4), (6, 6)), ("decode", "tile", (1, 3, 4), (6, 6))]
    expected = diffusers_alone(folder, tiled=True, sliced=True, image=Image.fromarray(image), layers=2)
    assert (expected[0] != expected[1]).any() and expected[..., 3].std() > 5
    np.testing.assert_array_equal(result.frames, expected)
