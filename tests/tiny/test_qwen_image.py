# SPDX-License-Identifier: Apache-2.0
"""The tiny Qwen-Image checkpoints load, make images, react to their inputs, and one seed makes one checkpoint."""

from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from diffusers import (
    DiffusionPipeline,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImageLayeredPipeline,
    QwenImagePipeline,
)
from diffusers.pipelines.qwenimage import (
    pipeline_qwenimage_edit,
    pipeline_qwenimage_edit_plus,
    pipeline_qwenimage_layered,
)

from tests.tiny.conftest import Load, check_made_again, files
from vllm_omni_vae import tiny

CLASSES = {
    "qwen-image": QwenImagePipeline,
    "qwen-image-edit": QwenImageEditPipeline,
    "qwen-image-edit-plus": QwenImageEditPlusPipeline,
    "qwen-image-layered": QwenImageLayeredPipeline,
}
READ_IMAGES = [family for family in CLASSES if family != "qwen-image"]
MAX_BYTES = 3 * 2**20
SIDE = 96
LAYERS = 2


@pytest.fixture
def small_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scale references to 1/64 of the area that the pipelines fix: 128x128 pixels instead of 1024x1024."""
    for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus, pipeline_qwenimage_layered):
        full = module.calculate_dimensions
        monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio, full=full: full(area / 64, ratio))


def generate(
    pipe: DiffusionPipeline, *, prompt: str = "a cat", colour: str = "red", output_type: str = "np"
) -> np.ndarray:
    """Images (N, H, W, C), or the tokens of their latents."""
    size = {"height": SIDE, "width": SIDE}
    reference = PIL.Image.new("RGB", (SIDE, SIDE), colour)
    arguments = {
        QwenImagePipeline: size,
        QwenImageEditPipeline: size | {"image": reference},
        QwenImageEditPlusPipeline: size | {"image": [reference, PIL.Image.new("RGB", (SIDE, 2 * SIDE), "green")]},
        QwenImageLayeredPipeline: {"image": reference.convert("RGBA"), "layers": LAYERS},
    }[type(pipe)]
    made = pipe(
        prompt=prompt,
        num_inference_steps=2,
        generator=torch.Generator("cpu").manual_seed(7),
        output_type=output_type,
        **arguments,
    ).images
    made = made[0] if isinstance(made, list) else made
    return np.asarray(made)


def test_every_qwen_image_family_is_listed() -> None:
    assert {family for family in tiny.FAMILIES if family.startswith("qwen")} == set(CLASSES)


@pytest.mark.usefixtures("small_references")
@pytest.mark.parametrize("family", CLASSES)
def test_loads_and_makes_images(family: str, checkpoints: dict[str, Path], load: Load) -> None:
    assert sum(len(content) for content in files(checkpoints[family]).values()) <= MAX_BYTES
    pipe = load(family)
    assert type(pipe) is CLASSES[family]

    made = generate(pipe)
    layered = family == "qwen-image-layered"
    assert made.shape == ((LAYERS, 64, 64, 4) if layered else (1, SIDE, SIDE, 3))
    assert np.isfinite(made).all()
    assert made.std(axis=(1, 2)).min() > 0.05, "every image and channel varies in space"
    assert ((made == 0) | (made == 1)).mean() < 0.25, "few values are clamped"
    np.testing.assert_array_equal(made, generate(pipe))


@pytest.mark.usefixtures("small_references")
@pytest.mark.parametrize("family", CLASSES)
def test_prompt_and_image_matter(family: str, load: Load) -> None:
    pipe = load(family)
    # diffusers 0.42.1 raises an UnboundLocalError when the layered pipeline is asked for latents.
    kind = "np" if family == "qwen-image-layered" else "latent"
    made = generate(pipe, output_type=kind)
    other_prompt = generate(pipe, output_type=kind, prompt="rain over a harbour at night")
    other_image = generate(pipe, output_type=kind, colour="blue")
    assert np.abs(made - other_prompt).mean() > 1e-3
    assert (np.abs(made - other_image).mean() > 1e-3) == (family in READ_IMAGES)


def test_a_reference_is_encoded_at_the_released_area(load: Load) -> None:
    class SeenError(Exception):
        pass

    def look(_: torch.nn.Module, arguments: tuple[torch.Tensor]) -> None:
        raise SeenError(str(tuple(arguments[0].shape)))

    pipe = load("qwen-image-edit")
    pipe.vae.encoder.register_forward_pre_hook(look)
    with pytest.raises(SeenError, match=r"\(1, 3, 1, 1024, 1024\)"):
        generate(pipe)


@pytest.mark.parametrize("family", CLASSES)
def test_the_pipeline_drops_its_system_prompt_and_no_more(family: str, load: Load) -> None:
    pipe = load(family)
    prompt, image = "a cat", PIL.Image.new("RGB", (SIDE, SIDE), "red")
    end = "<|im_end|>\n<|im_start|>assistant\n"
    if family in ("qwen-image-edit", "qwen-image-edit-plus"):
        embeds, _ = pipe.encode_prompt(prompt, image=image)
        start = "<|vision_start|>" + "<|image_pad|>" * 9 + "<|vision_end|>"
        start = ("Picture 1: " if family.endswith("plus") else "") + start
    else:
        embeds, _ = pipe.encode_prompt(prompt)
        start = ""
    assert embeds.shape[1] == len(pipe.tokenizer(start + prompt + end).input_ids)


@pytest.mark.parametrize("family", CLASSES)
def test_the_structure_is_the_released_one(family: str, load: Load) -> None:
    pipe = load(family)
    vae, denoiser = pipe.vae, pipe.transformer.config
    layered = family == "qwen-image-layered"
    channels = 4 if layered else 3
    assert (vae.config.input_channels, denoiser.use_additional_t_cond, denoiser.use_layer3d_rope) == (
        channels,
        layered,
        layered,
    )
    assert vae.config.z_dim == len(vae.config.latents_mean) == len(vae.config.latents_std) == denoiser.in_channels // 4
    assert hasattr(pipe, "processor") == (family in READ_IMAGES)
    with torch.no_grad():
        latents = vae.encode(torch.zeros(1, channels, 1, 64, 48)).latent_dist.mode()
        assert latents.shape == (1, vae.config.z_dim, 1, 8, 6)
        assert vae.decode(latents).sample.shape == (1, channels, 1, 64, 48)


def test_the_vae_tiles_two_by_two(load: Load) -> None:
    pipe = load("qwen-image")
    pipe.vae.enable_tiling(64, 64, 48, 48)
    tiles: list[tuple[int, ...]] = []
    pipe.vae.decoder.register_forward_pre_hook(lambda _, arguments: tiles.append(tuple(arguments[0].shape[-2:])))
    generate(pipe)
    assert tiles == [(8, 8), (8, 6), (6, 8), (6, 6)]


@pytest.mark.parametrize("family", CLASSES)
def test_same_seed_same_bytes(family: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    check_made_again(family, checkpoints[family], tmp_path / family)
