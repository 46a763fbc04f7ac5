# SPDX-License-Identifier: Apache-2.0
"""What is known of a Wan checkpoint from its JSON files alone."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from vllm_omni_vae import checkpoint
from vllm_omni_vae.errors import ConfigurationError, UnsupportedError
from vllm_omni_vae.pipelines.profile import read_json
from vllm_omni_vae.pipelines.registry import PROFILES, find_profile, registered
from vllm_omni_vae.pipelines.request import ModelCard, SamplingDefaults, Task
from vllm_omni_vae.pipelines.wan2_2 import WanProfile

Spoil = Callable[..., Path]

TEXT, IMAGE = frozenset({Task.TEXT_TO_VIDEO}), frozenset({Task.IMAGE_TO_VIDEO})
A14B = {"width": 832, "height": 480, "num_frames": 81, "fps": 16}
TI2V_5B = {"width": 1280, "height": 704, "num_frames": 121, "fps": 24}
T2V, I2V = "WanPipeline", "WanImageToVideoPipeline"

_TAKES = frozenset({"negative_prompt", "guidance_scale", "flow_shift"})

CARDS = {
    "wan2.1-t2v": (T2V, TEXT, 16, 1, A14B | {"num_inference_steps": 50, "guidance_scale": 5.0}),
    "wan2.1-i2v": (I2V, IMAGE, 16, 1, A14B | {"num_inference_steps": 50, "guidance_scale": 5.0}),
    "wan2.2-t2v": (T2V, TEXT, 16, 2, A14B | {"num_inference_steps": 40, "guidance_scale": 4.0}),
    "wan2.2-i2v": (I2V, IMAGE, 16, 2, A14B | {"num_inference_steps": 40, "guidance_scale": 3.5}),
    "wan2.2-ti2v-5b": (T2V, TEXT | IMAGE, 32, 1, TI2V_5B | {"num_inference_steps": 50, "guidance_scale": 5.0}),
}
"""Class, tasks, multiple, experts and defaults, as the released checkpoints' model cards and pipelines have them."""


@pytest.mark.parametrize("family", CARDS)
def test_every_family_has_its_card(family: str, checkpoints: Mapping[str, Path]) -> None:
    kind, tasks, multiple, experts, defaults = CARDS[family]
    assert WanProfile().card(checkpoints[family]) == ModelCard(
        pipeline_class=kind,
        tasks=tasks,
        spatial_multiple=multiple,
        temporal_ratio=4,
        defaults=SamplingDefaults(**defaults),
        takes=_TAKES if experts == 1 else _TAKES | {"guidance_scale_2", "boundary_ratio"},
        max_references=2 if tasks in (IMAGE, TEXT) else 1,
    )


def test_every_tiny_family_is_described_here(checkpoints: Mapping[str, Path]) -> None:
    assert checkpoints.keys() == CARDS.keys()


@pytest.mark.parametrize(("downsample", "ratio"), [([False, True, True], 4), ([False, False, True], 2), ([False], 1)])
def test_the_temporal_ratio_is_the_vae_s(downsample: list[bool], ratio: int, spoilt: Spoil) -> None:
    folder = spoilt("wan2.2-t2v")
    config = folder / "vae" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"temperal_downsample": downsample}))
    assert WanProfile().card(folder).temporal_ratio == ratio


def test_a_patch_of_the_denoiser_counts_into_the_multiple(spoilt: Spoil) -> None:
    folder = spoilt("wan2.2-t2v")
    config = folder / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"patch_size": [1, 4, 4]}))
    assert WanProfile().card(folder).spatial_multiple == 32


def test_a_pipeline_class_that_brings_its_module_along_is_described_alike(spoilt: Spoil) -> None:
    folder = spoilt("wan2.2-i2v", _class_name=["my_pipeline", "WanImageToVideoPipeline"])
    card = checkpoint.require(str(folder)).profile().card(folder)
    assert card.pipeline_class == "WanImageToVideoPipeline"
    assert card.tasks == IMAGE


@pytest.mark.parametrize("missing", [{"transformer": None, "transformer_2": None}, {"vae": None}])
def test_an_index_without_a_needed_part_is_refused(missing: dict[str, None], spoilt: Spoil) -> None:
    folder = spoilt("wan2.2-t2v", **missing)
    with pytest.raises(ConfigurationError, match=next(iter(missing))):
        WanProfile().card(folder)


@pytest.mark.parametrize("name", ["model_index.json", "vae/config.json", "transformer_2/config.json"])
@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_an_incomplete_checkpoint_is_refused_by_file(name: str, content: str | None, spoilt: Spoil) -> None:
    folder = spoilt("wan2.2-t2v")
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(ConfigurationError, match=rf"{name}.*is this a complete diffusers checkpoint\?"):
        WanProfile().card(folder)


def test_read_json_reads_an_object(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"ü": [1]}', encoding="utf-8")
    assert read_json(tmp_path / "a.json") == {"ü": [1]}


def test_profiles_are_found_by_their_classes() -> None:
    served = [(name, profile) for profile in PROFILES for name in profile.pipeline_classes]
    assert all(find_profile(name) is profile for name, profile in served), "no class is served twice"
    assert registered() == tuple(name for name, profile in served if profile.fits(name, name))
    assert find_profile("wanpipeline") is None


def test_another_pipeline_is_refused_with_those_that_can_be_served(spoilt: Spoil) -> None:
    folder = spoilt("wan2.2-t2v", _class_name="StableDiffusionPipeline")
    with pytest.raises(UnsupportedError, match=r"StableDiffusionPipeline.*WanPipeline, WanImageToVideoPipeline"):
        checkpoint.require(str(folder)).profile()
