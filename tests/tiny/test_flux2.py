# SPDX-License-Identifier: Apache-2.0
"""The tiny FLUX.2 checkpoints load, make images, react to their inputs, and one seed makes one checkpoint."""

from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from diffusers import DiffusionPipeline, Flux2KleinPipeline, Flux2Pipeline
from transformers import Mistral3ForConditionalGeneration, PixtralProcessor, Qwen2Tokenizer, Qwen3ForCausalLM

from tests.tiny.conftest import Load, check_made_again, files
from vllm_omni_vae import tiny
from vllm_omni_vae.errors import ConfigurationError
from vllm_omni_vae.pipelines import processors

CLASSES = {
    "flux2": Flux2Pipeline,
    "flux2-klein": Flux2KleinPipeline,
}
MAX_BYTES = 4 * 2**20
SIDE = 96


def generate(
    pipe: DiffusionPipeline, *, prompt: str = "a cat", colour: str | None = None, output_type: str = "np"
) -> np.ndarray:
    made = pipe(
        image=None if colour is None else PIL.Image.new("RGB", (SIDE, SIDE), colour),
        prompt=prompt,
        height=SIDE,
        width=SIDE,
        num_inference_steps=2,
        generator=torch.Generator("cpu").manual_seed(7),
        output_type=output_type,
    )
    return np.asarray(made.images)


def test_every_flux2_family_is_listed() -> None:
    assert {family for family in tiny.FAMILIES if family.startswith("flux")} == set(CLASSES)


@pytest.mark.parametrize("family", CLASSES)
def test_loads_and_makes_images(family: str, checkpoints: dict[str, Path], load: Load) -> None:
    assert sum(len(content) for content in files(checkpoints[family]).values()) <= MAX_BYTES
    pipe = load(family)
    assert type(pipe) is CLASSES[family]

    made = generate(pipe)
    assert made.shape == (1, SIDE, SIDE, 3)
    assert np.isfinite(made).all()
    assert made.std(axis=(1, 2)).min() > 0.05, "every channel varies in space"
    assert ((made == 0) | (made == 1)).mean() < 0.25, "few values are clamped"
    np.testing.assert_array_equal(made, generate(pipe))


@pytest.mark.parametrize("family", CLASSES)
def test_prompt_and_image_matter(family: str, load: Load) -> None:
    pipe = load(family)
    latents = generate(pipe, output_type="latent")
    other_prompt = generate(pipe, output_type="latent", prompt="rain over a harbour at night")
    red, blue = (generate(pipe, output_type="latent", colour=colour) for colour in ("red", "blue"))
    assert np.abs(latents - other_prompt).mean() > 1e-3
    assert np.abs(latents - red).mean() > 1e-3
    assert np.abs(red - blue).mean() > 1e-3


@pytest.mark.parametrize("family", CLASSES)
def test_the_structure_is_the_released_one(family: str, load: Load) -> None:
    pipe = load(family)
    is_dev = family == "flux2"
    assert type(pipe.text_encoder) is (Mistral3ForConditionalGeneration if is_dev else Qwen3ForCausalLM)
    assert type(pipe.tokenizer) is (PixtralProcessor if is_dev else Qwen2Tokenizer)
    assert pipe.transformer.config.guidance_embeds == is_dev
    vae = pipe.vae
    assert vae.bn.num_features == 4 * vae.config.latent_channels == pipe.transformer.config.in_channels
    assert vae.bn.running_mean.abs().min() > 0 and vae.bn.running_var.std() > 0
    with torch.no_grad():
        latents = vae.encode(torch.zeros(1, 3, 64, 48)).latent_dist.mode()
        assert latents.shape == (1, vae.config.latent_channels, 8, 6)
        assert vae.decode(latents).sample.shape == (1, 3, 64, 48)


def test_klein_says_that_it_is_distilled(load: Load) -> None:
    assert load("flux2-klein").config.is_distilled


@pytest.mark.parametrize("family", CLASSES)
def test_the_vae_tiles_two_by_two(family: str, load: Load) -> None:
    pipe = load(family)
    pipe.vae.enable_tiling()
    encoded: list[tuple[int, ...]] = []
    decoded: list[tuple[int, ...]] = []
    pipe.vae.encoder.register_forward_pre_hook(lambda _, arguments: encoded.append(tuple(arguments[0].shape[-2:])))
    pipe.vae.decoder.register_forward_pre_hook(lambda _, arguments: decoded.append(tuple(arguments[0].shape[-2:])))
    generate(pipe, colour="red")
    assert encoded == [(64, 64), (64, 48), (48, 64), (48, 48)]
    assert decoded == [(8, 8), (8, 6), (6, 8), (6, 6)]


@pytest.mark.parametrize("family", CLASSES)
def test_same_seed_same_bytes(family: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    check_made_again(family, checkpoints[family], tmp_path / family)


def test_dev_is_refused_without_torchvision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(processors, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"PixtralProcessor .* needs torchvision.*pip install"):
        tiny.build("flux2", tmp_path / "flux2")
    assert not (tmp_path / "flux2").exists()
