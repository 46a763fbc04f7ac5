# SPDX-License-Identifier: Apache-2.0
"""Masks: which part of an image may change."""

from __future__ import annotations

from PIL import Image, ImageChops

from ..pipelines.request import Frames
from .decode import Upload, decode, to_grey, to_rgba

_HALF = 128


def load_mask(upload: Upload, size: tuple[int, int], *, max_pixels: int) -> Frames:
    """Read a mask as ``(height, width)`` uint8: 255 where the image may change, 0 elsewhere.

    A mask with transparency marks what is less than half opaque, as OpenAI's masks do. One without, or whose pixels are
    all opaque, marks what is at least half white.

    Args:
        upload: A PNG, JPEG or WebP file, or a data URL of one.
        size: Width and height of the image, pixels.
        max_pixels: Most pixels that are decoded.

    Raises:
        RequestError: 400 for what is no picture, has another size or marks nothing, 413 for too many pixels.
    """
    mask = decode(upload, _marked, max_pixels=max_pixels)
    height, width = mask.shape
    if (width, height) != size:
        raise upload.refusal(
            f"{upload.name} has {width}x{height} pixels and the image {size[0]}x{size[1]}; send a mask of its size",
            "invalid_mask",
        )
    if not mask.any():
        raise upload.refusal(
            f"{upload.name} marks nothing: make transparent, or white in a mask without transparency, what may change",
            "invalid_mask",
        )
    return mask


def _marked(image: Image.Image) -> Image.Image:
    opacity = to_rgba(image).getchannel("A")
    if opacity.getextrema() == (255, 255):
        return to_grey(image).point([255 * (level >= _HALF) for level in range(256)])
    return ImageChops.invert(opacity.point([255 * (level >= _HALF) for level in range(256)]))
