# SPDX-License-Identifier: Apache-2.0
"""A request is filled in or refused before any rank sees it, with what the model could do instead."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_omni_vae.errors import RequestError
from vllm_omni_vae.pipelines.request import GenerationRequest
from vllm_omni_vae.pipelines.wan2_2 import WanProfile

PICTURE = np.zeros((48, 48, 3), np.uint8)
SMALL = {"width": 64, "height": 64, "num_frames": 5}


@pytest.fixture
def resolve(checkpoints: Mapping[str, Path]) -> Any:
    """Resolve a request for a family, by default a small one without a picture."""

    def resolve(family: str, defaults: Mapping[str, Any] | None = None, **fields: Any) -> GenerationRequest:
        profile = WanProfile()
        request = GenerationRequest(**({"prompt": "a boat"} | SMALL | fields))
        return profile.resolve(request, profile.card(checkpoints[family]), defaults or {})

    return resolve


def refused(resolve: Any, family: str, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        resolve(family, **fields)
    return caught.value


def test_what_is_left_open_becomes_the_model_s(resolve: Any, checkpoints: Mapping[str, Path]) -> None:
    request = resolve("wan2.2-ti2v-5b", width=None, height=None, num_frames=None)
    defaults = WanProfile().card(checkpoints["wan2.2-ti2v-5b"]).defaults
    assert {field.name: getattr(request, field.name) for field in dataclasses.fields(defaults)} == dataclasses.asdict(
        defaults
    )
    unset = ("negative_prompt", "guidance_scale_2", "boundary_ratio", "flow_shift")
    assert [getattr(request, name) for name in unset] == [None] * 4


def test_the_operator_s_values_go_before_the_model_s_and_the_request_s_before_both(resolve: Any) -> None:
    defaults = {"num_inference_steps": 7, "fps": 8, "negative_prompt": "blurry", "flow_shift": 2.5, "width": 96}
    request = resolve("wan2.2-t2v", defaults, fps=30, width=None)
    assert (request.num_inference_steps, request.fps, request.width) == (7, 30, 96)
    assert (request.negative_prompt, request.flow_shift) == ("blurry", 2.5)


def test_values_that_are_zero_or_empty_are_given_and_stay(resolve: Any) -> None:
    request = resolve(
        "wan2.2-t2v", {"guidance_scale": 9.0, "negative_prompt": "x"}, guidance_scale=0, negative_prompt=""
    )
    assert (request.guidance_scale, request.negative_prompt) == (0, "")


def test_a_resolved_request_resolves_to_itself(resolve: Any) -> None:
    first = resolve("wan2.2-t2v", seed=4)
    fields = {field.name: getattr(first, field.name) for field in dataclasses.fields(first)}
    assert resolve("wan2.2-t2v", **fields) == first


@pytest.mark.parametrize(
    ("family", "name", "value", "nearest"),
    [
        ("wan2.2-t2v", "width", 100, "96 or 112"),
        ("wan2.2-t2v", "height", 540, "528 or 544"),
        ("wan2.2-t2v", "width", 853, "848 or 864"),
        ("wan2.2-t2v", "height", 8, "16"),
        ("wan2.2-t2v", "width", 0, "16"),
        ("wan2.2-t2v", "width", -64, "16"),
        ("wan2.2-ti2v-5b", "width", 80, "64 or 96"),
        ("wan2.2-ti2v-5b", "height", 720, "704 or 736"),
    ],
)
def test_a_size_that_cannot_be_made_is_refused_with_the_nearest(
    family: str, name: str, value: int, nearest: str, resolve: Any
) -> None:
    error = refused(resolve, family, **{name: value})
    assert (error.param, error.code, error.status) == (name, "unsupported_size", 422)
    assert f"{name} {value} " in str(error)
    assert str(error).endswith(f"nearest: {nearest}")
    for size in nearest.split(" or "):
        assert getattr(resolve(family, **{name: int(size)}), name) == int(size)


@pytest.mark.parametrize(
    ("frames", "nearest"),
    [(2, "1 or 5"), (4, "1 or 5"), (6, "5 or 9"), (80, "77 or 81"), (0, "1 or 5"), (-3, "1 or 5")],
)
def test_frames_that_cannot_be_made_are_refused_with_the_nearest(frames: int, nearest: str, resolve: Any) -> None:
    error = refused(resolve, "wan2.2-t2v", num_frames=frames)
    assert (error.param, error.code, error.status) == ("num_frames", "unsupported_frames", 422)
    assert str(error).endswith(f"nearest: {nearest}")
    for count in nearest.split(" or "):
        assert resolve("wan2.2-t2v", num_frames=int(count)).num_frames == int(count)


@pytest.mark.parametrize("frames", [1, 5, 9, 121])
def test_frames_of_the_form_4n_plus_1_are_made(frames: int, resolve: Any) -> None:
    assert resolve("wan2.2-t2v", num_frames=frames).num_frames == frames


@pytest.mark.parametrize("name", ["guidance_scale_2", "boundary_ratio"])
def test_a_second_expert_s_values_need_a_second_expert(name: str, resolve: Any) -> None:
    assert getattr(resolve("wan2.2-t2v", **{name: 0.5}), name) == 0.5
    for family in ("wan2.1-t2v", "wan2.2-ti2v-5b"):
        error = refused(resolve, family, **{name: 0.5})
        assert (error.param, error.code, error.status) == (name, "unsupported_parameter", 400)


def test_unknown_extra_parameters_are_named_with_those_that_are_known(resolve: Any) -> None:
    error = refused(resolve, "wan2.2-t2v", extra_params={"zoom": 1, "max_sequence_length": 64, "accent": 2})
    assert (error.param, error.code) == ("extra_params", "unknown_parameter")
    assert "extra_params accent, zoom mean nothing" in str(error)
    assert "max_sequence_length, reference_fit" in str(error)
    known = {"max_sequence_length": 64, "reference_fit": "crop"}
    assert resolve("wan2.2-t2v", extra_params=known).extra_params == known


@pytest.mark.parametrize(
    ("family", "images", "reason"),
    [
        ("wan2.2-t2v", (PICTURE,), "takes no reference image"),
        ("wan2.1-t2v", (PICTURE,), "takes no reference image"),
        ("wan2.2-i2v", (), "needs a reference image"),
        ("wan2.1-i2v", (), "needs a reference image"),
    ],
)
def test_a_task_that_the_model_does_not_do_is_refused(family: str, images: Any, reason: str, resolve: Any) -> None:
    error = refused(resolve, family, images=images)
    assert (error.param, error.code, error.status) == ("input_reference", "unsupported_task", 400)
    assert reason in str(error)


def test_ti2v_does_both_tasks(resolve: Any) -> None:
    assert resolve("wan2.2-ti2v-5b").images == ()
    assert resolve("wan2.2-ti2v-5b", images=(PICTURE,)).images == (PICTURE,)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_inference_steps", 0),
        ("num_inference_steps", -1),
        ("fps", 0),
        ("flow_shift", 0.0),
        ("flow_shift", -3.0),
        ("boundary_ratio", 1.5),
        ("boundary_ratio", -0.1),
        ("seed", 2**64),
    ],
)
def test_a_value_that_no_pipeline_can_use_never_reaches_a_rank(name: str, value: float, resolve: Any) -> None:
    assert refused(resolve, "wan2.2-t2v", **{name: value}).param == name


@pytest.mark.parametrize("length", ["many", 0, -1, []])
def test_an_impossible_sequence_length_never_reaches_a_rank(length: Any, resolve: Any) -> None:
    error = refused(resolve, "wan2.2-t2v", extra_params={"max_sequence_length": length})
    assert error.param == "extra_params"
    assert "max_sequence_length" in str(error)


@pytest.mark.parametrize(
    ("family", "count"),
    [("wan2.2-i2v", 3), ("wan2.2-ti2v-5b", 2)],
    ids=["a third picture", "a last frame, which a model with expanded timesteps does not look at"],
)
def test_a_picture_that_would_be_ignored_is_refused(family: str, count: int, resolve: Any) -> None:
    assert refused(resolve, family, images=(PICTURE,) * count).param == "input_reference"
