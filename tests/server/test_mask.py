# SPDX-License-Identifier: Apache-2.0
"""Masks: what is marked, by transparency or by white, and what is no mask of this image."""

from typing import Any

import numpy as np
import pytest
from PIL import Image

from vllm_omni_vae.errors import RequestError
from vllm_omni_vae.server.decode import Upload
from vllm_omni_vae.server.mask import load_mask

from .test_reference import LIMIT, saved

SIZE = (40, 30)


def load(image: Image.Image, kind: str = "PNG", size: tuple[int, int] = SIZE, **options: Any) -> np.ndarray:
    return load_mask(Upload(saved(image, kind, **options), "mask", "the mask"), size, max_pixels=LIMIT)


def refusal(image: Image.Image, **more: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        load(image, **more)
    assert caught.value.param == "mask"
    return caught.value


def left_half(background: Any, marked: Any, mode: str) -> Image.Image:
    image = Image.new(mode, SIZE, background)
    image.paste(marked, (0, 0, 20, 30))
    return image


def assert_left_half(mask: np.ndarray) -> None:
    assert mask.shape == (30, 40) and mask.dtype == np.uint8
    assert (mask[:, :20] == 255).all() and (mask[:, 20:] == 0).all()


@pytest.mark.parametrize(
    ("mode", "background", "marked"),
    [
        ("RGBA", (0, 0, 0, 255), (0, 0, 0, 0)),
        ("RGBA", (255, 255, 255, 255), (255, 255, 255, 0)),
        ("RGBA", (9, 9, 9, 128), (255, 255, 255, 127)),
        ("LA", (255, 255), (0, 0)),
        ("L", 0, 255),
        ("L", 127, 128),
        ("1", 0, 1),
        ("RGB", (0, 0, 0), (255, 255, 255)),
        ("RGBA", (0, 0, 0, 255), (255, 255, 255, 255)),
    ],
)
def test_transparent_or_white_is_what_may_change(mode: str, background: Any, marked: Any) -> None:
    assert_left_half(load(left_half(background, marked, mode)))


def test_sixteen_bits_of_grey() -> None:
    grey = np.full((30, 40), 0x7FFF, np.uint16)
    grey[:, :20] = 0x8000
    assert_left_half(load(Image.fromarray(grey)))


@pytest.mark.parametrize(("kind", "options"), [("JPEG", {"quality": 95}), ("WEBP", {"lossless": True})])
def test_other_types_of_file(kind: str, options: dict[str, Any]) -> None:
    mask = load(left_half(0, 255, "L"), kind, **options)
    assert set(np.unique(mask)) == {0, 255} and (mask[:, :16] == 255).all() and (mask[:, 24:] == 0).all()


def test_a_palette_and_its_transparent_colour() -> None:
    image = left_half(0, 1, "P")
    image.putpalette([0, 0, 0, 255, 255, 255])
    assert_left_half(load(image))
    assert_left_half(load(image, transparency=1))
    assert (load(image, transparency=0)[:, 20:] == 255).all(), "transparency goes before white"


def test_a_mask_stands_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    mask = load(left_half(0, 255, "L"), size=(30, 40), exif=exif)
    assert mask.shape == (40, 30) and (mask[:20] == 255).all() and (mask[20:] == 0).all()


def test_another_size_is_refused() -> None:
    error = refusal(left_half(0, 255, "L"), size=(30, 40))
    assert (error.status, error.code) == (400, "invalid_mask")
    assert "the mask has 40x30 pixels and the image 30x40" in str(error)


@pytest.mark.parametrize("image", [Image.new("L", SIZE, 127), Image.new("RGBA", SIZE, (255, 0, 0, 200))])
def test_a_mask_that_marks_nothing_is_refused(image: Image.Image) -> None:
    error = refusal(image)
    assert (error.status, error.code) == (400, "invalid_mask") and "marks nothing" in str(error)


def test_a_mask_that_is_no_picture() -> None:
    with pytest.raises(RequestError, match="the mask cannot be read") as caught:
        load_mask(Upload(b"x", "mask_image", "the mask"), SIZE, max_pixels=LIMIT)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "mask_image", "invalid_image")
    with pytest.raises(RequestError) as caught:
        load_mask(Upload(saved(Image.new("1", (LIMIT, 2))), "mask"), SIZE, max_pixels=LIMIT)
    assert (caught.value.status, caught.value.code) == (413, "image_too_large")
