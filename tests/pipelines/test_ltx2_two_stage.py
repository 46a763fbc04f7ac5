# SPDX-License-Identifier: Apache-2.0
"""LTX-2 in two stages: how it is asked for, what is refused, and how its steps are counted."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni_vae import checkpoint, tiny
from vllm_omni_vae.config import EngineConfig
from vllm_omni_vae.errors import ConfigurationError, RequestError, UnsupportedError
from vllm_omni_vae.pipelines.ltx2 import Ltx2Profile
from vllm_omni_vae.pipelines.ltx2_two_stage import Ltx2TwoStageProfile, _StepCount
from vllm_omni_vae.pipelines.registry import classes_for, registered
from vllm_omni_vae.pipelines.request import GenerationRequest

TWO_STAGES = ("LTX2TwoStagesPipeline", "LTX2ImageToVideoTwoStagesPipeline")
PROFILE = Ltx2TwoStageProfile()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build("ltx2-two-stage", tmp_path_factory.mktemp("checkpoint") / "ltx2")


@pytest.fixture
def changed(folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """Make a copy of the JSON files of the checkpoint with changed entries of ``name``."""

    def change(name: str, **entries: Any) -> Path:
        copy = tmp_path / "changed"
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors"))
        values = json.loads((copy / name).read_text()) | entries
        (copy / name).write_text(json.dumps(values))
        return copy

    return change


def refusals(folder: Path) -> list[str]:
    return PROFILE.refusals(folder, EngineConfig(model=str(folder)))


@pytest.mark.parametrize("name", TWO_STAGES)
def test_either_class_is_asked_for_by_name_alone(name: str, folder: Path) -> None:
    found = checkpoint.require(str(folder))
    assert type(found.profile()) is Ltx2Profile
    assert type(found.profile(name)) is Ltx2TwoStageProfile
    assert name not in registered(), "no checkpoint's index names it"
    assert refusals(folder) == []


@pytest.mark.parametrize("index_class", ["LTX2Pipeline", "LTX2ImageToVideoPipeline"])
def test_every_class_of_one_set_of_weights_can_be_asked_for(index_class: str) -> None:
    assert classes_for(index_class) == ("LTX2Pipeline", "LTX2ImageToVideoPipeline", *TWO_STAGES)


def test_a_class_that_names_nothing_or_fits_nothing_is_refused(folder: Path) -> None:
    found = checkpoint.require(str(folder))
    for name in ("LTX3Pipeline", "WanPipeline"):
        with pytest.raises(UnsupportedError, match=f"--model-class-name {name}: .* LTX2Pipeline checkpoint") as caught:
            found.profile(name)
        assert "run as LTX2Pipeline, LTX2ImageToVideoPipeline, LTX2TwoStagesPipeline" in str(caught.value)
    wan = dataclasses.replace(found, pipeline_class="WanPipeline")
    with pytest.raises(UnsupportedError, match="which can be run as WanPipeline; choose"):
        wan.profile(TWO_STAGES[0])
    with pytest.raises(UnsupportedError, match="which can be run as WanPipeline; choose"):
        wan.profile("WanImageToVideoPipeline")


@pytest.mark.parametrize("run_as", [None, TWO_STAGES[0]])
def test_a_checkpoint_that_no_profile_serves_stays_unserved(run_as: str | None, folder: Path) -> None:
    for name in ("NobodysPipeline", TWO_STAGES[0]):
        found = checkpoint.Checkpoint("somebody/something", folder, name)
        with pytest.raises(UnsupportedError, match=f"is a {name} checkpoint, which cannot be served; choose") as caught:
            found.profile(run_as)
        assert TWO_STAGES[0] not in str(caught.value).partition("one of")[2]


def test_both_stages_make_sizes_that_the_model_makes_by_itself(folder: Path) -> None:
    one, two = Ltx2Profile().card(folder), PROFILE.card(folder)
    assert (one.spatial_multiple, one.spatial_minimum) == (32, 64)
    assert (two.spatial_multiple, two.spatial_minimum) == (64, 128)
    assert (two.defaults.width, two.defaults.height) == (1536, 1024)
    same = {"spatial_multiple": 0, "spatial_minimum": 0, "defaults": None}
    assert dataclasses.replace(one, **same) == dataclasses.replace(two, **same)
    steps = {"width": 0, "height": 0}
    assert dataclasses.replace(one.defaults, **steps) == dataclasses.replace(two.defaults, **steps)


def test_a_checkpoint_without_an_upsampler_is_refused(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors", "latent_upsampler"))
    (found,) = refusals(copy)
    assert found.startswith("--model-class-name: two stages need a latent upsampler")
    assert "has no latent_upsampler/config.json; put one there, or leave the flag out" in found


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"rational_spatial_scale": 1.5}, "spatial_upsample True by 1.5 and temporal_upsample False"),
        ({"temporal_upsample": True}, "spatial_upsample True by 2 and temporal_upsample True"),
        ({"spatial_upsample": False, "temporal_upsample": True}, "spatial_upsample False by 2"),
        ({"in_channels": 16}, "made for 16 channels, and the VAE's latents have 8"),
    ],
)
def test_an_upsampler_of_another_kind_is_refused(
    entries: dict[str, Any], said: str, changed: Callable[..., Path]
) -> None:
    (found,) = refusals(changed("latent_upsampler/config.json", **entries))
    assert found.startswith("--model-class-name: ") and said in found


def test_a_factor_that_is_not_used_is_not_looked_at(changed: Callable[..., Path]) -> None:
    entries = {"use_rational_resampler": False, "rational_spatial_scale": 1.5}
    assert refusals(changed("latent_upsampler/config.json", **entries)) == []


def test_what_one_stage_refuses_two_refuse_too(changed: Callable[..., Path]) -> None:
    copy = changed("model_index.json", vocoder=[None, None])
    with pytest.raises(ConfigurationError, match="names no vocoder"):
        PROFILE.card(copy)
    (found,) = PROFILE.refusals(copy, EngineConfig(model="", flow_shift=3.0))
    assert found.startswith("--flow-shift: ")


@pytest.mark.parametrize(
    ("asked", "param", "said"),
    [
        ({"width": 160}, "width", "multiples of 64 pixels from 128 on; nearest: 128 or 192"),
        ({"height": 96}, "height", "nearest: 128"),
        ({"height": 64}, "height", "nearest: 128"),
        ({"num_frames": 10}, "num_frames", "nearest: 9 or 17"),
        ({"extra_params": {"zoom": 1}}, "extra_params", "zoom mean nothing"),
    ],
)
def test_what_cannot_be_made_exactly_is_refused_with_the_nearest(
    asked: dict[str, Any], param: str, said: str, folder: Path
) -> None:
    fields = {"prompt": "a boat", "width": 128, "height": 128, "num_frames": 9} | asked
    with pytest.raises(RequestError, match=said) as caught:
        PROFILE.resolve(GenerationRequest(**fields), PROFILE.card(folder))
    assert (caught.value.param, caught.value.status) == (param, 422)


def test_steps_of_both_stages_count_as_those_of_one_pipeline() -> None:
    heard: list[tuple[int, int]] = []

    def tell(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        heard.append((step + 1, pipeline.num_timesteps))
        return tensors

    count = _StepCount(5, tell)
    for done, steps in ((0, 2), (2, 3)):
        for step in range(steps):
            assert count.after(done)(SimpleNamespace(num_timesteps=steps), step, 0, {"latents": 1}) == {"latents": 1}
    assert heard == [(number, 5) for number in range(1, 6)]
