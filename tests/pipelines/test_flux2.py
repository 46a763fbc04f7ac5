# SPDX-License-Identifier: Apache-2.0
"""FLUX.2 dev and klein: what is known of a checkpoint, what is refused, and which arguments the pipeline gets."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_omni_vae import checkpoint, tiny
from vllm_omni_vae.config import DiffusionParallelConfig, EngineConfig
from vllm_omni_vae.errors import RequestError
from vllm_omni_vae.pipelines import flux2
from vllm_omni_vae.pipelines.flux2 import Flux2KleinProfile, Flux2Profile
from vllm_omni_vae.pipelines.request import IMAGE_TASKS, GenerationRequest, Medium, ModelCard, SamplingDefaults

PROFILES: Mapping[str, type[Flux2Profile]] = {"flux2": Flux2Profile, "flux2-klein": Flux2KleinProfile}
MASK = np.zeros((200, 300), np.uint8)


def picture(width: int, height: int) -> np.ndarray[Any, Any]:
    return np.zeros((height, width, 3), np.uint8)


PICTURE = picture(300, 200)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: tiny.build(family, root / family) for family in PROFILES}


@pytest.fixture
def resolve(checkpoints: Mapping[str, Path]) -> Any:
    def resolve(family: str, **fields: Any) -> GenerationRequest:
        profile = PROFILES[family]()
        request = GenerationRequest(**({"prompt": "a boat", "medium": Medium.IMAGE} | fields))
        return profile.resolve(request, profile.card(checkpoints[family]))

    return resolve


@pytest.mark.parametrize(
    ("family", "distilled", "steps", "guidance", "takes"),
    [
        ("flux2", None, 50, 4.0, {"guidance_scale"}),
        ("flux2-klein", True, 4, None, {"mask"}),
        ("flux2-klein", False, 50, 4.0, {"mask", "guidance_scale"}),
    ],
)
def test_every_family_has_its_card(
    family: str,
    distilled: bool | None,
    steps: int,
    guidance: float | None,
    takes: set[str],
    checkpoints: Mapping[str, Path],
    tmp_path: Path,
) -> None:
    source = checkpoints[family]
    copy = Path(shutil.copytree(source, tmp_path / "copy", ignore=shutil.ignore_patterns("*.safetensors")))
    index = copy / "model_index.json"
    given = {} if distilled is None else {"is_distilled": distilled}
    index.write_text(json.dumps(json.loads(index.read_text()) | given))
    found = checkpoint.require(str(copy))
    assert type(found.profile()) is PROFILES[family]
    assert found.profile().card(copy) == ModelCard(
        pipeline_class="Flux2Pipeline" if family == "flux2" else "Flux2KleinPipeline",
        tasks=IMAGE_TASKS,
        spatial_multiple=16,
        temporal_ratio=1,
        defaults=SamplingDefaults(
            width=1024, height=1024, num_inference_steps=steps, guidance_scale=guidance, num_images=1
        ),
        takes=frozenset(takes),
        max_references=6 if family == "flux2" else 4,
    )


@pytest.mark.parametrize("family", PROFILES)
def test_flags(family: str, checkpoints: Mapping[str, Path]) -> None:
    def refusals(**settings: Any) -> list[str]:
        config = EngineConfig(model="", parallel=DiffusionParallelConfig(**settings))
        return PROFILES[family]().refusals(checkpoints[family], config)

    for possible in ({"ulysses_degree": 2}, {"tensor_parallel_size": 2}, {"use_hsdp": True, "hsdp_shard_size": 2}):
        assert refusals(**possible) == []
    (ring,) = refusals(ring_degree=2)
    assert re.match("--ring-degree: not available for FLUX.2.*; use --ulysses-degree", ring)
    (heads,) = refusals(ulysses_degree=3)
    assert re.match(r"--ulysses-degree 3: the denoiser's \d+ heads do not divide by it", heads)


@pytest.mark.parametrize(
    ("family", "asked", "param", "said"),
    [
        ("flux2", {"width": 100}, "width", "nearest: 96 or 112"),
        ("flux2", {"negative_prompt": "blur"}, "negative_prompt", "means nothing to this model"),
        ("flux2", {"images": (PICTURE,), "mask": MASK}, "mask", "fill in a part"),
        ("flux2", {"images": (PICTURE,) * 7}, "image", "6 at most"),
        ("flux2", {"images": (PICTURE, picture(63, 64))}, "image", "image 2 is 63x64; .* from 64 pixels on"),
        ("flux2", {"images": (picture(576, 64),)}, "image", "up to 8:1"),
        ("flux2", {"extra_params": {"strength": 0.5}}, "extra_params", "mean nothing"),
        ("flux2-klein", {"guidance_scale": 2.0}, "guidance_scale", "guided by it"),
        ("flux2-klein", {"images": (PICTURE,) * 5}, "image", "4 at most"),
        ("flux2-klein", {"images": (PICTURE,) * 3, "mask": MASK}, "image", "the image to fill in and one more"),
        ("flux2-klein", {"images": (PICTURE,), "mask": MASK, "width": 96}, "size", "here 288x192"),
        ("flux2-klein", {"images": (PICTURE,), "extra_params": {"strength": 0.5}}, "extra_params", "leave it out"),
    ],
)
def test_what_cannot_be_made_never_reaches_a_rank(
    family: str, asked: dict[str, Any], param: str, said: str, resolve: Any
) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        resolve(family, **asked)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("image", "expected"),
    [((300, 200), (288, 192)), ((64, 64), (64, 64)), ((2000, 1000), (1440, 720)), ((1025, 1024), (1024, 1008))],
)
def test_an_open_size_is_that_of_the_first_reference(
    image: tuple[int, int], expected: tuple[int, int], resolve: Any
) -> None:
    request = resolve("flux2", images=(picture(*image), picture(64, 64)))
    assert (request.width, request.height) == expected


def test_references_and_mask_reach_the_pipeline(resolve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def pipeline(**arguments: Any) -> Any:
        given.clear()
        given.update(arguments)
        return SimpleNamespace(images=None)

    Flux2Profile().call(pipeline, resolve("flux2", images=(PICTURE, picture(64, 64))))
    assert [image.size for image in given["image"]] == [(300, 200), (64, 64)]
    assert given["guidance_scale"] == 4.0

    asked: list[tuple[str, dict[str, Any]]] = []

    def behind(pipeline: Any, kind: str, **settings: Any) -> Any:
        asked.append((kind, settings))
        return pipeline

    pipeline.config = SimpleNamespace(is_distilled=True)  # type: ignore[attr-defined]
    monkeypatch.setattr(flux2, "behind", behind)
    request = resolve("flux2-klein", images=(PICTURE, picture(64, 64)), mask=MASK, extra_params={"strength": 0.25})
    Flux2KleinProfile().call(pipeline, request)
    assert asked == [("Flux2KleinInpaintPipeline", {"is_distilled": True})]
    assert (given["image"].size, given["mask_image"].size) == ((300, 200), (300, 200))
    assert (given["image_reference"].size, given["strength"], given["guidance_scale"]) == ((64, 64), 0.25, 1.0)
