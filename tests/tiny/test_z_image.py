# SPDX-License-Identifier: Apache-2.0
"""The tiny Z-Image checkpoint loads, makes images, reacts to its prompt, and one seed makes one checkpoint."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, ZImagePipeline
from transformers import Qwen3Model

from tests.tiny.conftest import Load, check_made_again, files

CLASSES = {"z-image": ZImagePipeline}
MAX_BYTES = 4 * 2**20
SIDE = 96


@pytest.fixture
def checkpoint(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["z-image"]


@pytest.fixture
def pipe(load: Load) -> DiffusionPipeline:
    return load("z-image")


def generate(pipe: DiffusionPipeline, *, prompt: str = "a cat", output_type: str = "np") -> np.ndarray:
    made = pipe(
        prompt=prompt,
        height=SIDE,
        width=SIDE,
        num_inference_steps=2,
        generator=torch.Generator("cpu").manual_seed(7),
        output_type=output_type,
    )
    return np.asarray(made.images)


def test_loads_and_makes_images(checkpoint: Path, pipe: DiffusionPipeline) -> None:
    assert sum(len(content) for content in files(checkpoint).values()) <= MAX_BYTES
    assert type(pipe) is CLASSES["z-image"]
    assert type(pipe.text_encoder) is Qwen3Model

    made = generate(pipe)
    assert made.shape == (1, SIDE, SIDE, 3)
    assert np.isfinite(made).all()
    assert made.std(axis=(1, 2)).min() > 0.05, "every channel varies in space"
    assert ((made == 0) | (made == 1)).mean() < 0.25, "few values are clamped"
    np.testing.assert_array_equal(made, generate(pipe))


def test_the_prompt_matters(pipe: DiffusionPipeline) -> None:
    latents = generate(pipe, output_type="latent")
    other = generate(pipe, output_type="latent", prompt="rain over a harbour at night")
    assert np.abs(latents - other).mean() > 1e-3


def test_the_structure_is_the_released_one(pipe: DiffusionPipeline) -> None:
    vae = pipe.vae
    assert (vae.config.use_quant_conv, vae.config.use_post_quant_conv) == (False, False)
    assert (vae.config.scaling_factor, vae.config.shift_factor) == (0.3611, 0.1159)
    assert vae.config.latent_channels == pipe.transformer.config.in_channels
    with torch.no_grad():
        latents = vae.encode(torch.zeros(1, 3, 64, 48)).latent_dist.mode()
        assert latents.shape == (1, vae.config.latent_channels, 8, 6)
        assert vae.decode(latents).sample.shape == (1, 3, 64, 48)


def test_the_vae_tiles_two_by_two(pipe: DiffusionPipeline) -> None:
    pipe.vae.enable_tiling()
    tiles: list[tuple[int, ...]] = []
    pipe.vae.decoder.register_forward_pre_hook(lambda _, arguments: tiles.append(tuple(arguments[0].shape[-2:])))
    generate(pipe)
    assert tiles == [(8, 8), (8, 6), (6, 8), (6, 6)]


def test_same_seed_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    check_made_again("z-image", checkpoint, tmp_path / "z-image")
