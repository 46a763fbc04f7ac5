# SPDX-License-Identifier: Apache-2.0
"""Images as files: read back with Pillow, the same bytes each time, and an error for what was not asked for."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vllm_omni_vae.server.media import MediaError
from vllm_omni_vae.server.pictures import Encoding, encode_pictures


def noise(count: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (count, 30, 40, channels), dtype=np.uint8)


def encode(pictures: np.ndarray, encoding: Encoding, **more: Any) -> tuple[bytes, ...]:
    asked = {"size": (40, 30), "count": len(pictures), "transparency": pictures.shape[-1] == 4}
    return encode_pictures(pictures, encoding, **{**asked, **more})


def opened(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


@pytest.mark.parametrize(("channels", "mode"), [(3, "RGB"), (4, "RGBA")])
def test_png_keeps_every_pixel(channels: int, mode: str) -> None:
    pictures = noise(3, channels)
    files = encode(pictures, Encoding(transparency=channels == 4))
    assert len(files) == 3
    for data, pixels in zip(files, pictures, strict=True):
        assert (opened(data).format, opened(data).mode) == ("PNG", mode)
        assert np.array_equal(np.asarray(opened(data)), pixels)


@pytest.mark.parametrize("kind", ["jpeg", "webp"])
def test_quality_is_what_the_encoder_gets(kind: Any) -> None:
    smooth = np.linspace(0, 255, 40, dtype=np.uint8)[None, None, :, None] * np.ones((1, 30, 1, 3), np.uint8)
    best, worst = (encode(smooth, Encoding(format=kind, quality=quality))[0] for quality in (100, 0))
    assert opened(best).format == kind.upper() and len(worst) < len(best)
    errors = [np.abs(np.asarray(opened(data)).astype(int) - smooth[0]).max() for data in (best, worst)]
    assert errors[0] <= 3 < errors[1]


def test_what_is_transparent_is_put_on_white_where_the_file_has_no_room_for_it() -> None:
    picture = np.zeros((1, 30, 40, 4), np.uint8)
    picture[0, :, 20:] = (10, 20, 30, 255)
    flat = np.asarray(opened(encode(picture, Encoding())[0]))
    assert flat.shape == (30, 40, 3) and (flat[:, :20] == 255).all() and (flat[:, 20:] == (10, 20, 30)).all()
    jpeg = np.asarray(opened(encode(picture, Encoding(format="jpeg"))[0]))
    assert jpeg[:, :12].min() >= 250
    webp = np.asarray(opened(encode(picture, Encoding(format="webp", transparency=True))[0]))
    assert np.array_equal(webp[..., 3], picture[0, ..., 3])


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_the_same_pictures_give_the_same_bytes(kind: Any) -> None:
    pictures = noise(2, 4)
    view = np.ascontiguousarray(pictures.transpose(3, 0, 1, 2)).transpose(1, 2, 3, 0)
    assert not view.flags.c_contiguous
    encoding = Encoding(format=kind, quality=80, transparency=kind != "jpeg")
    assert encode(pictures, encoding) == encode(pictures, encoding) == encode(view, encoding)


@pytest.mark.parametrize(
    ("pictures", "more"),
    [
        (noise(1)[:0], {"count": 1}),
        (noise(2), {"count": 3}),
        (noise(1), {"size": (30, 40)}),
        (noise(1), {"transparency": True}),
        (noise(1, 4), {"transparency": False}),
        (noise(1).astype(np.float32), {}),
    ],
)
def test_what_was_not_asked_for_is_no_image(pictures: np.ndarray, more: dict[str, Any]) -> None:
    with pytest.raises(MediaError, match=r"pictures of shape \(.*\) instead of uint8 \(.*\)"):
        encode(pictures, Encoding(), **more)


def test_an_export_that_is_stopped() -> None:
    seen = []

    def stop(done: int, total: int) -> None:
        seen.append((done, total))
        if done == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        encode(noise(3), Encoding(), on_picture=stop)
    assert seen == [(1, 3), (2, 3)]
