# SPDX-License-Identifier: Apache-2.0
"""Finished images as PNG, JPEG or WebP. It blocks; run it in a thread."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from PIL import Image

from ..pipelines.request import Frames
from .decode import on_white
from .media import MediaError

PictureFormat = Literal["png", "jpeg", "webp"]
WEBP_SIDE = 16_383
"""Pixels that a side of a WebP file has at most; the other formats have room for whatever can be asked for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Encoding:
    """How images are written.

    Attributes:
        format: The type of file.
        quality: 0 to 100, of JPEG and WebP: 100 is the best.
        transparency: Whether the files have an alpha channel; what a model makes transparent is put on white else.
    """

    format: PictureFormat = "png"
    quality: int = 100
    transparency: bool = False


def encode_pictures(
    pictures: Frames,
    encoding: Encoding,
    *,
    size: tuple[int, int],
    count: int,
    transparency: bool,
    on_picture: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[bytes, ...]:
    """Return one file for each picture, in their order. The same pictures give the same bytes.

    Args:
        pictures: ``(N, H, W, 3)`` uint8 RGB, or ``(N, H, W, 4)`` RGBA.
        encoding: How to write them.
        size: Width and height that were asked for, pixels.
        count: Pictures that were asked for.
        transparency: Whether the model's pictures have an alpha channel.
        on_picture: Called after each picture with the pictures done and all; an exception from it stops the export.

    Raises:
        MediaError: ``pictures`` are not as asked for.
    """
    wanted = (count, size[1], size[0], 4 if transparency else 3)
    if pictures.shape != wanted or pictures.dtype != np.uint8:
        raise MediaError(
            f"the model returned {pictures.dtype} pictures of shape {pictures.shape} instead of uint8 {wanted}"
        )
    files = []
    for pixels in pictures:
        files.append(_encode(Image.fromarray(np.ascontiguousarray(pixels)), encoding))
        on_picture(len(files), count)
    return tuple(files)


def _encode(picture: Image.Image, encoding: Encoding) -> bytes:
    if picture.mode == "RGBA" and not encoding.transparency:
        picture = on_white(picture)
    options: dict[str, Any] = {}
    if encoding.format == "jpeg":
        options = {"quality": encoding.quality, "subsampling": 0}
    elif encoding.format == "webp":
        options = {"quality": encoding.quality}
    buffer = io.BytesIO()
    picture.save(buffer, encoding.format.upper(), **options)
    return buffer.getvalue()
