# SPDX-License-Identifier: Apache-2.0
"""Fields: what is coerced, what is in range, and how a refusal names what is wrong."""

from typing import Any

import pytest

from vllm_omni_vae.errors import RequestError
from vllm_omni_vae.server.decode import Upload
from vllm_omni_vae.server.fields import validate
from vllm_omni_vae.server.reference import ReferenceFit
from vllm_omni_vae.server.video_form import RemixForm, VideoForm, nearest_frames


def form(**fields: Any) -> VideoForm:
    return validate(VideoForm, {"prompt": "a cat", **fields})


def refusal(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read = form(**fields)
        read.to_request()
        read.reference()
        read.reference_fit()
    return caught.value


def test_text_and_numbers_mean_the_same() -> None:
    text = form(seed="7", fps="24", num_frames="81", guidance_scale="4.5", width="832", height="480", seconds="5")
    numbers = form(seed=7, fps=24, num_frames=81, guidance_scale=4.5, width=832, height=480, seconds=5)
    assert text == numbers
    assert text.seconds == "5"
    request = text.to_request()
    assert (request.seed, request.fps, request.guidance_scale, request.width) == (7, 24, 4.5, 832)


def test_what_is_left_out_stays_open() -> None:
    request = form().to_request()
    assert request.width is request.height is request.seed is request.num_inference_steps is None
    assert request.images == () and dict(request.extra_params) == {}


@pytest.mark.parametrize(
    ("name", "low", "high", "outside"),
    [
        ("num_inference_steps", 1, 200, (0, 201, "x", 1.5, True)),
        ("guidance_scale", 0, 20, (-0.1, 20.1, "nan", "inf", True)),
        ("guidance_scale_2", 0, 20, (-1, 21)),
        ("boundary_ratio", 0, 1, (-0.1, 1.1)),
        ("flow_shift", 0.1, 100, (0, 101)),
        ("fps", 1, 120, (0, 121)),
        ("width", 1, 16384, (0, -16, 16385)),
        ("height", 1, 16384, (0, 16385)),
        ("num_frames", 1, 10**6, (0, "1e3", "")),
        ("seed", 0, 2**63 - 1, (-1, 2**63)),
        ("seconds", "0.1", "4", ("0", "-1", "four", "1e3", "nan", True, [4])),
        ("size", "1x1", "1280x720", ("1280", "1280x", "0x4", "1280X720", "1280x720x3", "१x१")),
        ("negative_prompt", "", "x" * 32_000, ("x" * 32_001, 3)),
        ("prompt", "x", "x" * 32_000, ("", " \n", "x" * 32_001, 3, "\ud800")),
    ],
)
def test_ranges(name: str, low: Any, high: Any, outside: tuple[Any, ...]) -> None:
    form(**{name: low}).to_request()
    form(**{name: high}).to_request()
    for value in outside:
        error = refusal(**{name: value})
        assert (error.status, error.param, error.code) == (422, name, "invalid_value")
        assert str(error).startswith(f"{name}: ")
        assert len(str(error)) < 300


def test_unknown_fields_are_named_all_of_them() -> None:
    error = refusal(num_steps=4, sed=3)
    assert (error.status, error.param, error.code) == (422, "num_steps", "unknown_parameter")
    assert "num_steps, sed" in str(error) and "num_inference_steps" in str(error)


def test_several_bad_fields_are_one_answer() -> None:
    error = refusal(fps=0, seed=-1)
    assert error.param == "fps" and "seed: " in str(error)


def test_a_file_in_the_wrong_place() -> None:
    assert str(refusal(seed=b"\xff" * 999)).endswith("not a file of 999 bytes")


def test_a_prompt_is_needed() -> None:
    for kind in (VideoForm, RemixForm):
        with pytest.raises(RequestError) as caught:
            validate(kind, {})
        assert (caught.value.status, caught.value.param) == (422, "prompt")
        assert caught.value.code == "missing_required_parameter"


def test_a_remix_has_a_prompt_and_nothing_else() -> None:
    assert validate(RemixForm, {"prompt": "a dog", "user": "me"}).prompt == "a dog"
    with pytest.raises(RequestError, match="seed"):
        validate(RemixForm, {"prompt": "a dog", "seed": 3})


def test_size_is_width_and_height() -> None:
    request = form(size="1280x720").to_request()
    assert (request.width, request.height) == (1280, 720)
    assert form(size="1280x720", width=1280).to_request().height == 720
    error = refusal(size="1280x720", height=480)
    assert (error.status, error.param, error.code) == (400, "size", "conflicting_parameters")


@pytest.mark.parametrize(
    ("seconds", "fps", "ratio", "frames"),
    [
        (5, 16, 4, 81),
        (4, 16, 4, 65),
        (4, 24, 8, 97),
        (0.01, 16, 4, 1),
        (3 / 16, 16, 4, 5),  # 3 frames lie between 1 and 5: the longer clip
        (2.5 / 16, 16, 4, 1),
        (1, 16, 1, 16),
        (81 / 16, 16, 4, 81),
    ],
)
def test_seconds_become_the_nearest_frames_that_can_be_made(seconds: float, fps: int, ratio: int, frames: int) -> None:
    assert nearest_frames(seconds, fps, ratio) == frames


def test_extra_params_are_an_object_or_its_text() -> None:
    assert form(extra_params='{"reference_fit": "pad", "a": 1}') == form(extra_params={"reference_fit": "pad", "a": 1})
    assert form(extra_params={"reference_fit": "pad"}).reference_fit() is ReferenceFit.PAD
    assert form().reference_fit() is ReferenceFit.CROP
    for value in ("[1]", "{", "text", {"reference_fit": "stretch"}, {"reference_fit": ["pad"]}):
        error = refusal(extra_params=value)
        assert (error.status, error.param) == (422, "extra_params")


@pytest.mark.parametrize("name", ["input_reference", "image_reference"])
def test_a_reference_has_several_spellings(name: str) -> None:
    for value in ("data:x", {"image_url": "data:x"}, '{"image_url": "data:x"}', [{"image_url": "data:x"}]):
        assert form(**{name: value}).reference() == Upload("data:x", name)
    assert form(**{name: b"bytes"}).reference() == Upload(b"bytes", name)
    for value in ({"file_id": "f"}, {"image_url": 3}, ["a", "b"], [], 3, "{", {"image_url": "a", "file_id": "b"}):
        assert (refusal(**{name: value}).status, refusal(**{name: value}).param) == (422, name)


def test_references_that_cannot_be_taken() -> None:
    error = refusal(input_reference="data:a", image_reference="data:b")
    assert (error.status, error.param) == (400, "image_reference")
    error = refusal(video_reference={"video_url": "data:x"})
    assert (error.status, error.param) == (400, "video_reference")


def test_what_no_video_model_has_is_refused_and_not_ignored() -> None:
    error = refusal(true_cfg_scale=4)
    assert (error.status, error.param, error.code) == (400, "true_cfg_scale", "unsupported_parameter")
