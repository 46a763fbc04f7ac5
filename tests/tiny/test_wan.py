# SPDX-License-Identifier: Apache-2.0
"""The tiny Wan checkpoints load, run, react to their inputs and come out the same from the same seed."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from diffusers import DiffusionPipeline, WanImageToVideoPipeline, WanPipeline

from tests.tiny.conftest import Load, check_made_again, files
from vllm_omni_vae import tiny
from vllm_omni_vae.errors import ConfigurationError

CLASSES = {
    "wan2.1-t2v": WanPipeline,
    "wan2.1-i2v": WanImageToVideoPipeline,
    "wan2.2-t2v": WanPipeline,
    "wan2.2-i2v": WanImageToVideoPipeline,
    "wan2.2-ti2v-5b": WanPipeline,
}
TWO_EXPERTS = {"wan2.2-t2v": 0.875, "wan2.2-i2v": 0.9}
MAX_BYTES = 6 * 2**20


def side(family: str) -> int:
    return 96 if family == "wan2.2-ti2v-5b" else 48


def generate(
    pipe: DiffusionPipeline, side: int, *, prompt: str = "a cat", colour: str = "red", output_type: str = "np"
) -> np.ndarray:
    image = {"image": PIL.Image.new("RGB", (side, side), colour)} if isinstance(pipe, WanImageToVideoPipeline) else {}
    frames = pipe(
        prompt=prompt,
        height=side,
        width=side,
        num_frames=5,
        num_inference_steps=2,
        generator=torch.Generator("cpu").manual_seed(7),
        output_type=output_type,
        **image,
    ).frames
    return np.asarray(frames)


def assert_is_a_clip(clip: np.ndarray, side: int) -> None:
    assert clip.shape == (1, 5, side, side, 3)
    assert np.isfinite(clip).all()
    assert clip.std(axis=(2, 3)).min() > 0.05, "every frame and channel varies in space"
    assert np.abs(np.diff(clip, axis=1)).mean() > 0.01, "frames differ"
    assert ((clip == 0) | (clip == 1)).mean() < 0.25, "few values are clamped"


def test_every_wan_family_is_listed() -> None:
    assert {family for family in tiny.FAMILIES if family.startswith("wan")} == set(CLASSES)


def test_importing_the_package_leaves_torch_alone() -> None:
    code = "import sys, vllm_omni_vae.tiny; sys.exit(bool({'torch', 'diffusers', 'transformers'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


@pytest.mark.parametrize("family", CLASSES)
def test_loads_and_generates(family: str, checkpoints: dict[str, Path], load: Load) -> None:
    assert sum(len(content) for content in files(checkpoints[family]).values()) <= MAX_BYTES
    pipe = load(family)
    assert type(pipe) is CLASSES[family]
    assert pipe.vae.config.z_dim == len(pipe.vae.config.latents_mean) == len(pipe.vae.config.latents_std)

    clip = generate(pipe, side(family))
    assert_is_a_clip(clip, side(family))
    np.testing.assert_array_equal(clip, generate(pipe, side(family)))


@pytest.mark.parametrize("family", CLASSES)
def test_prompt_and_image_matter(family: str, load: Load) -> None:
    pipe = load(family)
    latents = generate(pipe, side(family), output_type="latent")
    other_prompt = generate(pipe, side(family), output_type="latent", prompt="rain over a harbour at night")
    other_image = generate(pipe, side(family), output_type="latent", colour="blue")
    assert np.abs(latents - other_prompt).mean() > 0.01
    assert (np.abs(latents - other_image).mean() > 0.01) == isinstance(pipe, WanImageToVideoPipeline)


@pytest.mark.parametrize(("family", "boundary"), TWO_EXPERTS.items())
def test_two_experts_differ_and_both_run(family: str, boundary: float, load: Load) -> None:
    pipe = load(family)
    assert pipe.config.boundary_ratio == boundary
    first, second = pipe.transformer.state_dict(), pipe.transformer_2.state_dict()
    assert first.keys() == second.keys()
    assert not any(torch.equal(first[name], second[name]) for name in first)

    ran: list[str] = []
    pipe.transformer.register_forward_hook(lambda *_: ran.append("high noise"))
    pipe.transformer_2.register_forward_hook(lambda *_: ran.append("low noise"))
    generate(pipe, side(family), output_type="latent")
    assert ran == ["high noise"] * 2 + ["low noise"] * 2


def test_wan21_i2v_conditions_on_clip(load: Load) -> None:
    pipe = load("wan2.1-i2v")
    image = PIL.Image.new("RGB", (64, 40), "green")
    assert pipe.encode_image(image).shape == (1, 257, pipe.transformer.config.image_dim)
    assert load("wan2.2-i2v").image_encoder is None


def test_ti2v_5b_is_patchified_and_residual(load: Load) -> None:
    pipe = load("wan2.2-ti2v-5b")
    config = pipe.vae.config
    assert config.is_residual
    assert (config.patch_size, config.in_channels, config.out_channels, config.scale_factor_spatial) == (2, 12, 12, 16)
    assert pipe.config.expand_timesteps
    with torch.no_grad():
        latents = pipe.vae.encode(torch.zeros(1, 3, 5, 64, 32)).latent_dist.mode()
        assert latents.shape == (1, config.z_dim, 2, 4, 2)
        assert pipe.vae.decode(latents).sample.shape == (1, 3, 5, 64, 32)


def test_ti2v_5b_serves_image_to_video(load: Load) -> None:
    text_to_video = load("wan2.2-ti2v-5b")
    shared = WanImageToVideoPipeline(**text_to_video.components, expand_timesteps=True)
    shared.set_progress_bar_config(disable=True)
    clip = generate(shared, 96)
    assert_is_a_clip(clip, 96)
    assert np.abs(clip - generate(shared, 96, colour="blue")).mean() > 0.01
    loaded = load("wan2.2-ti2v-5b", WanImageToVideoPipeline)
    np.testing.assert_array_equal(clip, generate(loaded, 96))


@pytest.mark.parametrize("family", CLASSES)
def test_same_seed_same_bytes(family: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    check_made_again(family, checkpoints[family], tmp_path / "deep" / family)


def test_rebuild_in_place_with_another_seed(tmp_path: Path) -> None:
    before = files(tiny.build("wan2.1-t2v", tmp_path))
    after = files(tiny.build("wan2.1-t2v", tmp_path, seed=1))
    assert before.keys() == after.keys()
    weights = [name for name in before if name.endswith(".safetensors")]
    assert len(weights) == 3
    assert all(before[name] != after[name] for name in weights)
    assert tiny.build("wan2.1-t2v", tmp_path) == tmp_path
    assert files(tmp_path) == before


def test_unknown_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"'wan3'.*wan2\.2-i2v.*choose"):
        tiny.build("wan3", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("notes.txt", "mine", "other files"),
        ("tiny_checkpoint.json", json.dumps({"family": "wan2.2-t2v", "seed": 0}), r"wan2\.2-t2v"),
        ("tiny_checkpoint.json", "not json", "unreadable"),
        ("tiny_checkpoint.json", "[]", "unreadable"),
    ],
)
def test_occupied_folder_is_refused(name: str, content: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigurationError, match=reason):
        tiny.build("wan2.1-t2v", tmp_path)
    assert files(tmp_path) == {name: content.encode()}


def test_a_file_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("mine")
    with pytest.raises(ConfigurationError, match="a file"):
        tiny.build("wan2.1-t2v", out)
    assert out.read_text() == "mine"
