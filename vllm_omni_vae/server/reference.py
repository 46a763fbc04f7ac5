# SPDX-License-Identifier: Apache-2.0
"""Reference images: pixels as the model takes them, and of a clip's size for a clip."""

from __future__ import annotations

from enum import StrEnum

import numpy as np
from PIL import Image

from ..pipelines.request import Frames
from .decode import Upload, decode, to_rgb, to_rgba


class ReferenceFit(StrEnum):
    """How an image of another aspect becomes the clip's size."""

    CROP = "crop"
    PAD = "pad"


def load_reference(upload: Upload, *, max_pixels: int, transparency: bool = False) -> Frames:
    """Read a reference image in its own size, upright: ``(height, width, 3)`` uint8 RGB, what is transparent on white.

    Blocking; takes memory in proportion to ``max_pixels`` at most, whatever the file claims.

    Args:
        upload: A PNG, JPEG or WebP file, or a data URL of one.
        max_pixels: Most pixels that are decoded.
        transparency: Whether the model takes ``(height, width, 4)`` RGBA instead.

    Raises:
        RequestError: 400 for anything that is no such image, 413 for too many pixels.
    """
    return decode(upload, to_rgba if transparency else to_rgb, max_pixels=max_pixels)


def fit_reference(image: Frames, width: int, height: int, how: ReferenceFit) -> Frames:
    """Resize ``image`` to exactly ``width`` x ``height`` pixels, keeping its aspect.

    Args:
        image: ``(h, w, 3)`` uint8 RGB.
        width, height: Pixels of the clip.
        how: ``crop`` fills the frame and cuts evenly what sticks out; ``pad`` shows all of it between black bars.
    """
    source_height, source_width = image.shape[:2]
    if (source_width, source_height) == (width, height):
        return image
    picture = Image.fromarray(image)
    if how is ReferenceFit.CROP:
        scale = max(width / source_width, height / source_height)
        dx, dy = (source_width - width / scale) / 2, (source_height - height / scale) / 2
        box = (max(0.0, dx), max(0.0, dy), min(source_width, source_width - dx), min(source_height, source_height - dy))
        return np.asarray(picture.resize((width, height), Image.Resampling.LANCZOS, box=box))
    scale = min(width / source_width, height / source_height)
    inner = (max(1, min(width, round(source_width * scale))), max(1, min(height, round(source_height * scale))))
    canvas = Image.new("RGB", (width, height))
    resized = picture.resize(inner, Image.Resampling.LANCZOS)
    canvas.paste(resized, ((width - inner[0]) // 2, (height - inner[1]) // 2))
    return np.asarray(canvas)
