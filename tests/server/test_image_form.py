# SPDX-License-Identifier: Apache-2.0
"""Fields of the image routes: what is coerced, what is in range, what goes together."""

from typing import Any

import pytest

from vllm_omni_vae.errors import RequestError
from vllm_omni_vae.pipelines.request import Medium
from vllm_omni_vae.server.decode import Upload
from vllm_omni_vae.server.fields import validate
from vllm_omni_vae.server.image_form import EditForm, ImageForm
from vllm_omni_vae.server.pictures import Encoding


def form(**fields: Any) -> EditForm:
    return validate(EditForm, {"prompt": "a cat", **fields})


def refusal(transparency: bool = True, **fields: Any) -> tuple[int, str | None, str]:
    with pytest.raises(RequestError) as caught:
        read = form(**{"image": b"x", **fields})
        read.encoding(transparency)
        read.to_request()
        read.references()
        read.mask_upload()
    return caught.value.status, caught.value.param, caught.value.code


def test_text_and_numbers_mean_the_same() -> None:
    text = form(n="2", seed="7", true_cfg_scale="4.5", layers="3", stream="true", output_compression="80")
    assert text == form(n=2, seed=7, true_cfg_scale=4.5, layers=3, stream=True, output_compression=80)
    request = text.to_request()
    assert request.medium is Medium.IMAGE
    assert (request.num_images, request.layers, request.true_cfg_scale, request.seed) == (2, 3, 4.5, 7)


def test_what_is_left_out_stays_open() -> None:
    for size in ({}, {"size": "auto"}):
        request = form(**size).to_request()
        assert request.width is request.height is request.seed is request.num_images is request.layers is None
        assert request.images == () and request.mask is None and dict(request.extra_params) == {}
    assert form().encoding(True) == Encoding(format="png", quality=100, transparency=True)
    assert form().encoding(False) == Encoding(format="png", quality=100, transparency=False)
    assert (form().stream, form().quality) == (False, "auto")


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("n", (1, 10), (0, 11, 1.5, True)),
        ("size", ("auto", "1x1", "1024x1024"), ("AUTO", "1024", "0x4", "1024X1024", "small")),
        ("output_format", ("png", "jpeg", "webp"), ("gif", "svg", "jpg", "PNG")),
        ("background", ("auto", "opaque", "transparent"), ("white", True)),
        ("quality", ("auto", "low", "medium", "high", "xhigh", "max", "standard", "hd"), ("best", 3)),
        ("moderation", ("auto", "low"), ("high",)),
        ("style", ("vivid", "natural"), ("odd",)),
        ("input_fidelity", ("high", "low"), ("medium",)),
        ("response_format", ("b64_json",), ("png", "b64")),
        ("stream", (True, False, "false", "1"), ("maybe", 2)),
        ("partial_images", (0, 3), (-1, 4, True)),
        ("layers", (1, 16), (0, 17)),
        ("seed", (0, 2**63 - 1), (-1, 2**63)),
        ("true_cfg_scale", (0, 20), (-1, 21, "nan")),
        ("resolution", (1, 1024), (0, "x")),
        ("strength", (0, "0.5", 1), (-0.1, 1.1, True)),
        ("prompt", ("x", " ", "x" * 32_000), ("", "x" * 32_001, 3, "\ud800")),
    ],
)
def test_ranges(name: str, inside: tuple[Any, ...], outside: tuple[Any, ...]) -> None:
    for value in inside:
        form(**{name: value}).to_request()
    for value in outside:
        assert refusal(**{name: value}) == (422, name, "invalid_value")


@pytest.mark.parametrize("quality", [-1, 101, True])
def test_compression_has_a_range(quality: Any) -> None:
    assert refusal(output_format="jpeg", output_compression=quality) == (422, "output_compression", "invalid_value")


def test_unknown_fields_are_named() -> None:
    with pytest.raises(RequestError, match="image, mask; known: background") as caught:
        validate(ImageForm, {"prompt": "a cat", "image": b"x", "mask": b"x"})
    assert (caught.value.status, caught.value.param, caught.value.code) == (422, "image", "unknown_parameter")
    assert refusal(complexity="low") == (422, "complexity", "unknown_parameter")


def test_how_images_are_written() -> None:
    for kind in ("jpeg", "webp"):
        assert form(output_format=kind, output_compression=0).encoding(False).quality == 0
        assert form(output_format=kind).encoding(False).quality == 100
    assert refusal(output_compression=100) == (400, "output_compression", "conflicting_parameters")
    assert form(background="transparent").encoding(True).transparency
    assert form(background="transparent", output_format="webp").encoding(True).transparency
    assert not form(background="opaque").encoding(True).transparency
    assert not form(output_format="jpeg").encoding(True).transparency
    assert refusal(background="transparent", output_format="jpeg") == (400, "background", "conflicting_parameters")
    assert refusal(False, background="transparent") == (400, "background", "unsupported_parameter")


def test_there_are_no_addresses() -> None:
    assert refusal(response_format="url") == (400, "response_format", "unsupported_parameter")
    with pytest.raises(RequestError, match="b64_json"):
        form(response_format="url").encoding(False)


def test_size_is_width_and_height() -> None:
    request = form(size="640x480", width=640).to_request()
    assert (request.width, request.height) == (640, 480)
    assert form(size="auto", width=640, height=480).to_request().height == 480
    assert refusal(size="640x480", height=640) == (400, "size", "conflicting_parameters")


def test_an_image_out_of_text_needs_words() -> None:
    with pytest.raises(RequestError, match="prompt: ") as caught:
        validate(ImageForm, {"prompt": " "})
    assert (caught.value.status, caught.value.param) == (422, "prompt")


def test_short_names_of_extra_parameters() -> None:
    assert form(strength=0.5).to_request().extra_params == {"strength": 0.5}
    assert refusal(strength=0.5, extra_params={"strength": 0.6}) == (400, "strength", "conflicting_parameters")
    assert form(resolution=640, extra_params={"a": 1}).to_request().extra_params == {"a": 1, "resolution": 640}
    assert form(resolution=640, extra_params={"resolution": 640}).to_request().extra_params == {"resolution": 640}
    assert refusal(resolution=640, extra_params={"resolution": 1024}) == (400, "resolution", "conflicting_parameters")


def test_how_a_clip_s_reference_fits_means_nothing_here() -> None:
    assert refusal(extra_params={"reference_fit": "crop"}) == (422, "extra_params", "unknown_parameter")


@pytest.mark.parametrize("name", ["image", "images", "url"])
def test_references_have_several_spellings(name: str) -> None:
    one = [Upload("data:x", name)]
    for value in ("data:x", {"image_url": "data:x"}, '{"image_url": "data:x"}', [{"image_url": "data:x"}], ["data:x"]):
        assert form(**{name: value}).references() == one
    two = form(**{name: [b"bytes", {"image_url": "data:x"}]}).references()
    assert [upload.source for upload in two] == [b"bytes", "data:x"]
    assert [upload.name for upload in two] == ["reference image 1", "reference image 2"]
    for value in ([], 3, {"file_id": "f"}, {"image_url": 3}, [["a"], ["b", "c"]], "[", [{"image_url": "a", "b": 1}]):
        assert refusal(**{"image": None, name: value}) == (422, name, "invalid_value")


def test_an_edit_needs_an_image_and_one_name_for_it() -> None:
    assert refusal(image=None) == (422, "image", "missing_required_parameter")
    assert refusal(images=["data:x"]) == (400, "images", "conflicting_parameters")
    assert refusal(url="data:x") == (400, "url", "conflicting_parameters")


def test_a_mask_has_two_names() -> None:
    assert form().mask_upload() is None
    assert form(mask=b"x").mask_upload() == Upload(b"x", "mask", "the mask")
    assert form(mask_image={"image_url": "data:x"}).mask_upload() == Upload("data:x", "mask_image", "the mask")
    assert refusal(mask=b"x", mask_image=b"x") == (400, "mask_image", "conflicting_parameters")
    assert refusal(mask=["a", "b"]) == (422, "mask", "invalid_value")
