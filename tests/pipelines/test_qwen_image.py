# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image, Edit, Edit-Plus and Layered: what is known of a checkpoint, what is refused, and what pipelines get."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_omni_vae import checkpoint, tiny
from vllm_omni_vae.config import DiffusionParallelConfig, EngineConfig
from vllm_omni_vae.errors import ConfigurationError, RequestError
from vllm_omni_vae.pipelines.image import size_of_area
from vllm_omni_vae.pipelines.qwen_image import (
    QwenImageEditPlusProfile,
    QwenImageEditProfile,
    QwenImageLayeredProfile,
    QwenImageProfile,
)
from vllm_omni_vae.pipelines.request import IMAGE_TASKS, GenerationRequest, Medium, ModelCard, SamplingDefaults, Task

PROFILES: Mapping[str, type[QwenImageProfile]] = {
    "qwen-image": QwenImageProfile,
    "qwen-image-edit": QwenImageEditProfile,
    "qwen-image-edit-plus": QwenImageEditPlusProfile,
    "qwen-image-layered": QwenImageLayeredProfile,
}
EDIT = frozenset({Task.IMAGE_TO_IMAGE})
GUIDED = frozenset({"negative_prompt", "true_cfg_scale"})
CARDS = {
    "qwen-image": ("QwenImagePipeline", IMAGE_TASKS, GUIDED | {"mask"}, 1, 1024, 50),
    "qwen-image-edit": ("QwenImageEditPipeline", EDIT, GUIDED | {"mask"}, 1, 1024, 50),
    "qwen-image-edit-plus": ("QwenImageEditPlusPipeline", EDIT, GUIDED, 3, 1024, 40),
    "qwen-image-layered": ("QwenImageLayeredPipeline", EDIT, GUIDED | {"layers"}, 1, 640, 50),
}
"""Class, tasks, fields it takes, references, side and steps, as diffusers and the released model cards have them."""


def picture(width: int, height: int, channels: int = 3) -> np.ndarray[Any, Any]:
    return np.zeros((height, width, channels), np.uint8)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: tiny.build(family, root / family) for family in PROFILES}


@pytest.fixture
def resolve(checkpoints: Mapping[str, Path]) -> Any:
    def resolve(family: str, **fields: Any) -> GenerationRequest:
        profile = PROFILES[family]()
        if family != "qwen-image":
            channels = 4 if family == "qwen-image-layered" else 3
            fields = {"images": (picture(300, 200, channels),)} | fields
        request = GenerationRequest(**({"prompt": "a boat", "medium": Medium.IMAGE} | fields))
        return profile.resolve(request, profile.card(checkpoints[family]))

    return resolve


class Pipeline:
    """Stands for a diffusers pipeline: keeps what it was called with."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)
        self.given: dict[str, Any] = {}

    def __call__(self, **given: Any) -> Any:
        self.given = given
        self.sliced = getattr(getattr(self, "vae", None), "use_slicing", None)
        return SimpleNamespace(images=torch.zeros(1, 3, 32, 32))


def called(family: str, request: GenerationRequest, **attributes: Any) -> dict[str, Any]:
    pipeline = Pipeline(**attributes)
    PROFILES[family]().call(pipeline, request)
    return pipeline.given


@pytest.mark.parametrize("family", CARDS)
def test_every_family_has_its_card(family: str, checkpoints: Mapping[str, Path]) -> None:
    kind, tasks, takes, references, side, steps = CARDS[family]
    found = checkpoint.require(str(checkpoints[family]))
    assert type(found.profile()) is PROFILES[family]
    layered = family == "qwen-image-layered"
    assert found.profile().card(found.folder) == ModelCard(
        pipeline_class=kind,
        tasks=tasks,
        spatial_multiple=16,
        temporal_ratio=1,
        defaults=SamplingDefaults(
            width=side,
            height=side,
            num_inference_steps=steps,
            true_cfg_scale=4.0,
            num_images=1,
            layers=4 if layered else None,
        ),
        takes=takes,
        max_references=references,
        transparency=layered,
    )


def test_a_denoiser_that_is_distilled_to_guidance_takes_its_scale(
    checkpoints: Mapping[str, Path], tmp_path: Path
) -> None:
    folder = Path(
        shutil.copytree(checkpoints["qwen-image"], tmp_path / "copy", ignore=shutil.ignore_patterns("*.safetensors"))
    )
    config = folder / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"guidance_embeds": True}))
    card = QwenImageProfile().card(folder)
    assert card.takes == GUIDED | {"mask", "guidance_scale"} and card.defaults.guidance_scale == 1.0
    (folder / "vae" / "config.json").unlink()
    with pytest.raises(ConfigurationError, match=r"vae/config.json.*is this a complete diffusers checkpoint\?"):
        QwenImageProfile().card(folder)
    index = folder / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "transformer": [None, None]}))
    with pytest.raises(ConfigurationError):
        QwenImageProfile().card(folder)


REFUSALS = [
    ({"tensor_parallel_size": 3}, r"--tensor-parallel-size 3: the denoiser's \d+ heads do not divide by it"),
    ({"ulysses_degree": 3}, r"--ulysses-degree 3: the denoiser's \d+ heads do not divide by it"),
    ({"tensor_parallel_size": 2, "ulysses_degree": 2}, "--tensor-parallel-size together with --ulysses-degree: "),
    ({"ring_degree": 2}, "--ring-degree: not available for Qwen-Image; use --ulysses-degree"),
    ({"cfg_parallel_size": 2}, "--cfg-parallel-size: "),
    ({"use_hsdp": True, "hsdp_shard_size": 1}, "--use-hsdp: there is one denoiser rank"),
    ({"use_hsdp": True, "ulysses_degree": 2}, "--use-hsdp together with --ulysses-degree"),
    ({"use_hsdp": True, "tensor_parallel_size": 2}, "--use-hsdp together with --tensor-parallel-size"),
    ({"boundary_ratio": 0.5}, "--boundary-ratio: "),
    ({"flow_shift": 3.0}, "--flow-shift: "),
]


@pytest.mark.parametrize(("settings", "reason"), REFUSALS)
def test_what_cannot_be_done_is_refused_by_flag(
    settings: dict[str, Any], reason: str, checkpoints: Mapping[str, Path]
) -> None:
    own = {name: value for name, value in settings.items() if name in ("boundary_ratio", "flow_shift")}
    rest = {name: value for name, value in settings.items() if name not in own}
    config = EngineConfig(model="", parallel=DiffusionParallelConfig(**rest), **own)
    (found,) = QwenImageProfile().refusals(checkpoints["qwen-image"], config)
    assert re.match(reason, found)


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"vae_patch_parallel_size": 3},
        {"ulysses_degree": 2},
        {"tensor_parallel_size": 2, "vae_patch_parallel_size": 3},
        {"use_hsdp": True, "hsdp_shard_size": 2},
    ],
)
@pytest.mark.parametrize("family", PROFILES)
def test_what_can_be_done_is_not_refused(
    family: str, parallel: dict[str, Any], checkpoints: Mapping[str, Path]
) -> None:
    config = EngineConfig(model="", parallel=DiffusionParallelConfig(**parallel))
    assert PROFILES[family]().refusals(checkpoints[family], config) == []


@pytest.mark.parametrize(("width", "height"), [(1024, 1024), (300, 200), (201, 333), (1920, 1080), (7, 651), (99, 1)])
def test_sizes_are_those_that_diffusers_calculates(width: int, height: int) -> None:
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as diffusers_own

    for area in (640**2, 1024**2):
        assert size_of_area((width, height), area) == diffusers_own.calculate_dimensions(area, width / height)


def test_an_open_size_follows_from_the_reference(resolve: Any) -> None:
    images = (picture(300, 200), picture(200, 300))
    assert sized(resolve("qwen-image")) == (1024, 1024)
    assert sized(resolve("qwen-image", images=images[:1])) == (1248, 832)
    assert sized(resolve("qwen-image-edit")) == (1248, 832)
    assert sized(resolve("qwen-image-edit", width=64)) == (64, 832)
    assert sized(resolve("qwen-image-edit-plus", images=images)) == (832, 1248), "the last one's"
    assert sized(resolve("qwen-image-layered")) == (768, 512)
    assert sized(resolve("qwen-image-layered", extra_params={"resolution": 1024})) == (1248, 832)


def sized(request: GenerationRequest) -> tuple[int | None, int | None]:
    return request.width, request.height


@pytest.mark.parametrize(
    ("family", "asked", "param", "said"),
    [
        ("qwen-image", {"width": 100}, "width", "nearest: 96 or 112"),
        ("qwen-image", {"guidance_scale": 2.0}, "guidance_scale", "guided by it"),
        ("qwen-image", {"layers": 2}, "layers", "layered images"),
        ("qwen-image", {"num_inference_steps": 1}, "num_inference_steps", "needs 2"),
        ("qwen-image-layered", {"num_inference_steps": 1}, "num_inference_steps", "needs 2"),
        ("qwen-image", {"num_frames": 5}, "num_frames", "do not make images"),
        ("qwen-image", {"medium": Medium.VIDEO}, None, "makes images, no videos"),
        ("qwen-image", {"mask": picture(8, 8, 1)[..., 0]}, "mask", "no image that it belongs to"),
        ("qwen-image", {"extra_params": {"strength": 0.5}}, "extra_params", "nothing of one is kept"),
        ("qwen-image", {"extra_params": {"max_sequence_length": 1025}}, "extra_params", "from 1 to 1024"),
        ("qwen-image", {"extra_params": {"reference_fit": "pad"}}, "extra_params", "mean nothing"),
        ("qwen-image-edit", {"images": ()}, "image", "needs a reference image"),
        ("qwen-image-edit", {"images": (picture(9, 9), picture(9, 9))}, "image", "looks at one"),
        ("qwen-image-edit", {"images": (picture(101, 1),)}, "image", "reads images up to 100:1"),
        ("qwen-image-edit", {"mask": picture(200, 300, 1)[..., 0]}, "mask", "is 200x300 and its image 300x200"),
        (
            "qwen-image-edit",
            {"mask": picture(300, 200, 1)[..., 0], "width": 64},
            "size",
            "64x832 cannot be made: with a mask the size follows from the image, here 1248x832",
        ),
        ("qwen-image-edit", {"extra_params": {"strength": 0.5}}, "extra_params", "leave it out"),
        ("qwen-image-edit-plus", {"mask": picture(300, 200, 1)[..., 0]}, "mask", "fill in a part"),
        ("qwen-image-edit-plus", {"images": (picture(9, 9),) * 4}, "image", "3 at most"),
        ("qwen-image-layered", {"width": 640}, "size", "640x512 cannot be made.*here 768x512"),
        ("qwen-image-layered", {"layers": 17}, "layers", "from 1 to 16"),
        ("qwen-image-layered", {"extra_params": {"resolution": 512}}, "extra_params", "give 640 or 1024"),
        ("qwen-image-layered", {"extra_params": {"cfg_normalize": 1}}, "extra_params", "give true or false"),
        ("qwen-image-layered", {"extra_params": {"strength": 1}}, "extra_params", "mean nothing"),
    ],
)
def test_what_cannot_be_made_never_reaches_a_rank(
    family: str, asked: dict[str, Any], param: str | None, said: str, resolve: Any
) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        resolve(family, **asked)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("given", "negative"), [({}, " "), ({"negative_prompt": ""}, ""), ({"true_cfg_scale": 1}, None)]
)
def test_a_guidance_scale_means_something_without_a_negative_prompt(
    given: dict[str, Any], negative: str | None, resolve: Any
) -> None:
    """Diffusers leaves the guidance out where there is no negative prompt."""
    arguments = called("qwen-image", resolve("qwen-image", **given))
    assert arguments["negative_prompt"] == negative
    assert arguments["true_cfg_scale"] == given.get("true_cfg_scale", 4.0)


def test_references_reach_the_pipeline_as_they_are(resolve: Any) -> None:
    one = called("qwen-image-edit", resolve("qwen-image-edit", width=64, height=96))
    assert (one["image"].size, one["width"], one["height"]) == ((300, 200), 64, 96)
    several = called(
        "qwen-image-edit-plus",
        resolve("qwen-image-edit-plus", images=(picture(30, 20), picture(20, 30)), width=64, height=64),
    )
    assert [image.size for image in several["image"]] == [(30, 20), (20, 30)]


def test_layers_are_decoded_one_at_a_time_and_the_switch_is_put_back(resolve: Any) -> None:
    for before in (False, True):
        pipeline = Pipeline(vae=SimpleNamespace(use_slicing=before))
        request = resolve("qwen-image-layered", layers=2, extra_params={"resolution": 1024})
        QwenImageLayeredProfile().call(pipeline, request)
        assert pipeline.sliced is True and pipeline.vae.use_slicing is before  # type: ignore[attr-defined]
        given = pipeline.given
        assert (given["layers"], given["resolution"], given["image"].mode) == (2, 1024, "RGBA")
        assert "width" not in given and "height" not in given
