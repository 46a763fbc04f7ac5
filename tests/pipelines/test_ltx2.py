# SPDX-License-Identifier: Apache-2.0
"""LTX-2: what is known of a checkpoint, what is refused, and which arguments the pipeline gets."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_omni_vae import checkpoint, tiny
from vllm_omni_vae.config import DiffusionParallelConfig, EngineConfig
from vllm_omni_vae.errors import ConfigurationError, RequestError
from vllm_omni_vae.pipelines.ltx2 import Ltx2Profile, distilled_schedule, guidance
from vllm_omni_vae.pipelines.request import VIDEO_TASKS, GenerationRequest, ModelCard, SamplingDefaults

FAMILIES = {
    "ltx2-t2v": "LTX2Pipeline",
    "ltx2-i2v": "LTX2ImageToVideoPipeline",
    "ltx2.3-t2v": "LTX2Pipeline",
    "ltx2.3-i2v": "LTX2ImageToVideoPipeline",
    "ltx2.5-t2v": "LTX2Pipeline",
    "ltx2.5-i2v": "LTX2ImageToVideoPipeline",
}
STEPS_AND_GUIDANCE = {"ltx2": (40, 4.0), "ltx2.3": (30, 3.0), "ltx2.5": (8, 1.0)}
SHIFTED = {"use_dynamic_shifting": True, "shift_terminal": 0.1}
PICTURE = np.zeros((64, 64, 3), np.uint8)
SMALL = {"width": 64, "height": 64, "num_frames": 9}

Spoil = Callable[..., Path]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: tiny.build(family, root / family) for family in FAMILIES}


@pytest.fixture
def spoilt(checkpoints: Mapping[str, Path], tmp_path: Path) -> Spoil:
    """Make a copy of the JSON files of a checkpoint with changed entries of ``name``; None removes one."""

    def spoil(family: str, name: str, **entries: Any) -> Path:
        copy = tmp_path / family
        shutil.copytree(checkpoints[family], copy, ignore=shutil.ignore_patterns("*.safetensors"))
        values = json.loads((copy / name).read_text()) | entries
        (copy / name).write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
        return copy

    return spoil


@pytest.fixture
def resolve(checkpoints: Mapping[str, Path]) -> Any:
    def resolve(family: str = "ltx2-t2v", **fields: Any) -> GenerationRequest:
        profile = Ltx2Profile()
        return profile.resolve(
            GenerationRequest(**({"prompt": "a boat"} | SMALL | fields)), profile.card(checkpoints[family])
        )

    return resolve


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_either_class_does_both_tasks(family: str, checkpoints: Mapping[str, Path]) -> None:
    found = checkpoint.require(str(checkpoints[family]))
    assert isinstance(found.profile(), Ltx2Profile)
    release = family.partition("-")[0]
    steps, scale = STEPS_AND_GUIDANCE[release]
    assert found.profile().card(found.folder) == ModelCard(
        pipeline_class=FAMILIES[family],
        tasks=VIDEO_TASKS,
        spatial_multiple=32,
        temporal_ratio=8,
        defaults=SamplingDefaults(
            width=768,
            height=512,
            num_frames=121,
            fps=24,
            num_inference_steps=steps,
            guidance_scale=scale,
        ),
        spatial_minimum=64 if release == "ltx2" else 32,
        blocks=2,
        fixed_steps=8 if release == "ltx2.5" else 0,
    )
    assert found.profile().refusals(found.folder, EngineConfig(model=str(found.folder))) == []


def test_a_full_denoiser_of_the_latest_release_is_sampled_as_that_before(spoilt: Spoil) -> None:
    card = Ltx2Profile().card(spoilt("ltx2.5-t2v", "scheduler/scheduler_config.json", **SHIFTED))
    assert (card.defaults.num_inference_steps, card.defaults.guidance_scale, card.fixed_steps) == (30, 3.0, 0)


def test_an_older_release_can_be_distilled_too(spoilt: Spoil) -> None:
    as_given = {"use_dynamic_shifting": False, "shift_terminal": None}
    card = Ltx2Profile().card(spoilt("ltx2-t2v", "scheduler/scheduler_config.json", **as_given))
    assert (card.defaults.num_inference_steps, card.defaults.guidance_scale, card.fixed_steps) == (8, 1.0, 8)


def test_a_distilled_schedule_has_a_noise_level_for_each_step(checkpoints: Mapping[str, Path]) -> None:
    levels = distilled_schedule()
    assert len(levels) == Ltx2Profile().card(checkpoints["ltx2.5-t2v"]).fixed_steps
    assert levels == sorted(levels, reverse=True) and levels[0] == 1.0


def test_ratios_that_are_not_given_are_counted_as_diffusers_counts_them(spoilt: Spoil) -> None:
    folder = spoilt(
        "ltx2-t2v",
        "vae/config.json",
        spatial_compression_ratio=None,
        temporal_compression_ratio=None,
        spatio_temporal_scaling=[True, True, True, False],
    )
    card = Ltx2Profile().card(folder)
    assert (card.spatial_multiple, card.temporal_ratio) == (32, 8)


@pytest.mark.parametrize("missing", ["vae", "audio_vae", "vocoder", "transformer"])
def test_an_index_without_a_needed_part_is_refused(missing: str, spoilt: Spoil) -> None:
    folder = spoilt("ltx2-t2v", "model_index.json", **{missing: None})
    with pytest.raises(ConfigurationError, match=f"names no {missing} "):
        Ltx2Profile().card(folder)


def test_a_later_generation_is_refused_by_its_text_encoder(spoilt: Spoil) -> None:
    later = ["transformers", "Gemma5ForConditionalGeneration"]
    folder = spoilt("ltx2-t2v", "model_index.json", text_encoder=later)
    (found,) = Ltx2Profile().refusals(folder, EngineConfig(model=str(folder)))
    assert "LTX-2.5 with the text encoder Gemma4Unified" in found and found.endswith(f"not one with {later[1]}")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size: "),
        ({"cfg_parallel_size": 2}, "--cfg-parallel-size: "),
        ({"ulysses_degree": 3}, r"--ulysses-degree 3: the denoiser's \[4\] heads do not divide by it"),
        ({"ring_degree": 2}, "--ring-degree: not available for LTX-2; use --ulysses-degree"),
        ({"use_hsdp": True, "hsdp_shard_size": 1}, "--use-hsdp: there is one denoiser rank"),
        ({"use_hsdp": True, "ulysses_degree": 2}, "--use-hsdp together with --ulysses-degree"),
        ({"boundary_ratio": 0.5}, "--boundary-ratio: "),
        ({"flow_shift": 3.0}, "--flow-shift: "),
    ],
)
def test_what_cannot_be_done_is_refused_by_flag(
    settings: dict[str, Any], reason: str, checkpoints: Mapping[str, Path]
) -> None:
    own = {name: value for name, value in settings.items() if name in ("boundary_ratio", "flow_shift")}
    rest = {name: value for name, value in settings.items() if name not in own}
    config = EngineConfig(model="", parallel=DiffusionParallelConfig(**rest), **own)
    (found,) = Ltx2Profile().refusals(checkpoints["ltx2-t2v"], config)
    assert re.match(reason, found)


@pytest.mark.parametrize(
    "parallel",
    [{}, {"vae_patch_parallel_size": 2}, {"ulysses_degree": 2}, {"use_hsdp": True, "hsdp_shard_size": 2}],
)
@pytest.mark.parametrize("family", ["ltx2.3-t2v", "ltx2.5-i2v"])
def test_what_can_be_done_is_not_refused(
    parallel: dict[str, Any], family: str, checkpoints: Mapping[str, Path]
) -> None:
    config = EngineConfig(model="", parallel=DiffusionParallelConfig(**parallel))
    assert Ltx2Profile().refusals(checkpoints[family], config) == []


@pytest.mark.parametrize(
    ("family", "asked", "param", "said"),
    [
        ("ltx2-t2v", {"width": 100}, "width", "nearest: 96 or 128"),
        ("ltx2-t2v", {"height": 32}, "height", "multiples of 32 pixels from 64 on; nearest: 64"),
        ("ltx2-t2v", {"height": 33}, "height", "nearest: 64"),
        ("ltx2.3-t2v", {"height": 31}, "height", "nearest: 32"),
        ("ltx2-t2v", {"num_frames": 10}, "num_frames", "1 [+] 8k frames; nearest: 9 or 17"),
        ("ltx2-t2v", {"num_inference_steps": 1}, "num_inference_steps", "needs 2"),
        ("ltx2.5-t2v", {"num_inference_steps": 30}, "num_inference_steps", "is 30; .* a schedule of 8 steps; leave it"),
        ("ltx2.5-t2v", {"num_inference_steps": 1}, "num_inference_steps", "a schedule of 8 steps"),
        ("ltx2.5-t2v", {"height": 31}, "height", "nearest: 32"),
        ("ltx2.5-i2v", {"num_frames": 24}, "num_frames", "1 [+] 8k frames; nearest: 17 or 25"),
        ("ltx2.5-i2v", {"images": (PICTURE, PICTURE)}, "input_reference", "looks at one"),
        ("ltx2.5-t2v", {"extra_params": {"max_seconds": 5}}, "extra_params", "max_seconds mean nothing"),
        ("ltx2-t2v", {"flow_shift": 2.0}, "flow_shift", "means nothing to this model"),
        ("ltx2-t2v", {"boundary_ratio": 0.5}, "boundary_ratio", "two experts"),
        ("ltx2-i2v", {"images": (PICTURE, PICTURE)}, "input_reference", "looks at one"),
        ("ltx2-t2v", {"extra_params": {"zoom": 1}}, "extra_params", "zoom mean nothing"),
        ("ltx2-t2v", {"extra_params": {"stg_scale": 21}}, "extra_params", "stg_scale is 21; give a number"),
        ("ltx2-t2v", {"extra_params": {"modality_scale": True}}, "extra_params", "modality_scale is True"),
        ("ltx2-t2v", {"extra_params": {"motion_speed": 0}}, "extra_params", "motion_speed is 0"),
        ("ltx2-t2v", {"extra_params": {"use_cross_timestep": 1}}, "extra_params", "give true or false"),
        ("ltx2-t2v", {"extra_params": {"image_crf": 20}}, "extra_params", "there is none"),
        ("ltx2-i2v", {"images": (PICTURE,), "extra_params": {"image_crf": 2.5}}, "extra_params", "a whole number"),
        ("ltx2-t2v", {"extra_params": {"spatio_temporal_guidance_blocks": [2]}}, "extra_params", "blocks of .* 0 to 1"),
        ("ltx2-t2v", {"extra_params": {"spatio_temporal_guidance_blocks": []}}, "extra_params", "a list of blocks"),
        ("ltx2-t2v", {"extra_params": {"spatio_temporal_guidance_blocks": 1}}, "extra_params", "a list of blocks"),
    ],
)
def test_what_cannot_be_made_never_reaches_a_rank(
    family: str, asked: dict[str, Any], param: str, said: str, resolve: Any
) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        resolve(family, **asked)
    assert caught.value.param == param


def test_what_can_be_made_is_taken(resolve: Any) -> None:
    extra = {"stg_scale": 0, "spatio_temporal_guidance_blocks": [0, 1], "use_cross_timestep": False, "image_crf": 0}
    request = resolve("ltx2.3-t2v", width=32, num_frames=1, images=(PICTURE,), extra_params=extra)
    assert (request.width, request.num_frames, request.fps, request.extra_params) == (32, 1, 24, extra)


def test_a_distilled_model_takes_guidance_that_is_asked_for(resolve: Any) -> None:
    assert resolve("ltx2.5-t2v").guidance_scale == 1.0
    request = resolve("ltx2.5-t2v", guidance_scale=3.0, num_inference_steps=8, extra_params={"stg_scale": 1})
    assert (request.guidance_scale, request.num_inference_steps) == (3.0, 8)


RELEASED_2_0 = {"num_layers": 48, "cross_attn_mod": False, "perturbed_attn": False}
RELEASED_2_3 = {"num_layers": 48, "cross_attn_mod": True, "perturbed_attn": True}


@pytest.mark.parametrize(
    ("denoiser", "expected"),
    [
        (
            RELEASED_2_0,
            {
                "spatio_temporal_guidance_blocks": [29],
                "use_cross_timestep": False,
                "stg_scale": 0.0,
                "audio_stg_scale": 0.0,
            },
        ),
        (RELEASED_2_3, {"spatio_temporal_guidance_blocks": [28], "use_cross_timestep": True}),
        (RELEASED_2_3 | {"num_layers": 2}, {"spatio_temporal_guidance_blocks": [1], "use_cross_timestep": True}),
    ],
    ids=["2.0", "2.3", "a small 2.3"],
)
def test_guidance_follows_from_the_denoiser(denoiser: dict[str, Any], expected: dict[str, Any]) -> None:
    assert guidance(denoiser, {"reference_fit": "pad"}) == expected


def test_what_a_request_gives_goes_before_and_also_for_the_sound() -> None:
    given = {"stg_scale": 0, "modality_scale": 2.0, "audio_modality_scale": 4.0}
    made = guidance(RELEASED_2_3, given | {"spatio_temporal_guidance_blocks": [3, 4]})
    assert made == given | {
        "audio_stg_scale": 0,
        "spatio_temporal_guidance_blocks": [3, 4],
        "use_cross_timestep": True,
    }


def test_a_distilled_denoiser_is_not_guided_unless_a_request_says_so() -> None:
    unguided = guidance(RELEASED_2_3, {}, distilled=True)
    assert unguided == {
        "audio_guidance_scale": 1.0,
        "stg_scale": 0.0,
        "audio_stg_scale": 0.0,
        "modality_scale": 1.0,
        "audio_modality_scale": 1.0,
        "spatio_temporal_guidance_blocks": [28],
        "use_cross_timestep": True,
    }
    asked = {"stg_scale": 1.5, "audio_guidance_scale": 4}
    assert guidance(RELEASED_2_3, asked, distilled=True) == unguided | asked | {"audio_stg_scale": 1.5}
