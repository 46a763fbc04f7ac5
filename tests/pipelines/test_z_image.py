# SPDX-License-Identifier: Apache-2.0
"""Z-Image: what is known of a checkpoint, what is refused, and which arguments the pipeline gets."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_omni_vae import checkpoint, tiny
from vllm_omni_vae.config import DiffusionParallelConfig, EngineConfig
from vllm_omni_vae.errors import RequestError
from vllm_omni_vae.pipelines.image import repainting
from vllm_omni_vae.pipelines.request import IMAGE_TASKS, GenerationRequest, Medium, ModelCard, SamplingDefaults
from vllm_omni_vae.pipelines.z_image import ZImageProfile

PICTURE = np.zeros((200, 300, 3), np.uint8)
MASK = np.zeros((200, 300), np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build("z-image", tmp_path_factory.mktemp("checkpoints") / "z-image")


def resolve(folder: Path, **fields: Any) -> GenerationRequest:
    profile = ZImageProfile()
    request = GenerationRequest(**({"prompt": "a boat", "medium": Medium.IMAGE} | fields))
    return profile.resolve(request, profile.card(folder))


@pytest.mark.parametrize(("shift", "steps", "guidance"), [(3.0, 8, 0.0), (6.0, 50, 5.0)], ids=["turbo", "full"])
def test_turbo_is_told_by_its_schedule(shift: float, steps: int, guidance: float, folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy", ignore=shutil.ignore_patterns("*.safetensors")))
    schedule = copy / "scheduler" / "scheduler_config.json"
    schedule.write_text(json.dumps(json.loads(schedule.read_text()) | {"shift": shift}))
    found = checkpoint.require(str(copy))
    assert isinstance(found.profile(), ZImageProfile)
    assert found.profile().card(copy) == ModelCard(
        pipeline_class="ZImagePipeline",
        tasks=IMAGE_TASKS,
        spatial_multiple=16,
        temporal_ratio=1,
        defaults=SamplingDefaults(
            width=1024, height=1024, num_inference_steps=steps, guidance_scale=guidance, num_images=1
        ),
        takes=frozenset({"negative_prompt", "guidance_scale", "mask"}),
    )


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size: diffusers has no plan .*; use --use-hsdp"),
        ({"ulysses_degree": 2}, "--ulysses-degree: diffusers has no plan .*; use --use-hsdp"),
        ({"ring_degree": 2}, "--ring-degree: not available for Z-Image; use --use-hsdp"),
        ({"cfg_parallel_size": 2}, "--cfg-parallel-size: "),
        ({"use_hsdp": True}, "--use-hsdp: there is one denoiser rank"),
    ],
)
def test_a_denoiser_that_cannot_be_divided_is_refused_at_start(
    settings: dict[str, Any], reason: str, folder: Path
) -> None:
    config = EngineConfig(model="", parallel=DiffusionParallelConfig(**settings))
    (found,) = ZImageProfile().refusals(folder, config)
    assert re.match(reason, found)


@pytest.mark.parametrize("parallel", [{"vae_patch_parallel_size": 2}, {"use_hsdp": True, "hsdp_shard_size": 2}])
def test_what_can_be_done_is_not_refused(parallel: dict[str, Any], folder: Path) -> None:
    config = EngineConfig(model="", parallel=DiffusionParallelConfig(**parallel))
    assert ZImageProfile().refusals(folder, config) == []


@pytest.mark.parametrize(
    ("asked", "param", "said"),
    [
        ({"width": 100}, "width", "nearest: 96 or 112"),
        ({"height": 8208}, "height", "8192 pixels at most"),
        ({"true_cfg_scale": 2.0}, "true_cfg_scale", "besides their guidance_scale"),
        ({"images": (PICTURE, PICTURE)}, "image", "looks at one"),
        ({"images": (PICTURE[:3],)}, "image", "up to 50:1"),
        ({"mask": MASK}, "mask", "no image that it belongs to"),
        ({"images": (PICTURE,), "mask": MASK[1:]}, "mask", "is 300x199 and its image 300x200"),
        ({"extra_params": {"strength": 0.5}}, "extra_params", "nothing of one is kept"),
        ({"images": (PICTURE,), "extra_params": {"strength": 0}}, "extra_params", "from 0.01 to 1"),
        ({"extra_params": {"cfg_truncation": 2}}, "extra_params", "from 0 to 1"),
        ({"extra_params": {"cfg_normalization": 1}}, "extra_params", "true or false"),
        ({"extra_params": {"max_sequence_length": 513}}, "extra_params", "from 1 to 512"),
    ],
)
def test_what_cannot_be_made_never_reaches_a_rank(asked: dict[str, Any], param: str, said: str, folder: Path) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        resolve(folder, **asked)
    assert caught.value.param == param


def test_an_open_size_follows_from_the_reference(folder: Path) -> None:
    request = resolve(folder, images=(PICTURE,))
    assert (request.width, request.height) == (1248, 832)


def test_a_picture_that_is_painted_anew_is_cropped_and_its_mask_alike(folder: Path) -> None:
    mask = MASK.copy()
    mask[:, 150:] = 255
    request = resolve(folder, images=(PICTURE,), mask=mask, width=96, height=96)
    given = repainting(request)
    assert (given["image"].size, given["mask_image"].size, given["strength"]) == ((96, 96), (96, 96), 1.0)
    right = np.asarray(given["mask_image"])
    assert (right[:, :46] == 0).all() and (right[:, 50:] == 255).all(), "the middle stays in the middle"
    kept = repainting(resolve(folder, images=(PICTURE,), extra_params={"strength": 0.5}, width=96, height=96))
    assert kept.keys() == {"image"}, "without a mask the pipeline's own strength, or the request's, counts"
