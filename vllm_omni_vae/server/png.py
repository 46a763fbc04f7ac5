# SPDX-License-Identifier: Apache-2.0
"""Reference images as files, without loss."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from ..pipelines.request import Frames


def to_png(image: Frames) -> bytes:
    """Return ``(height, width, 3)`` uint8 RGB as a PNG file of the same pixels."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def from_png(data: bytes) -> Frames:
    """Return the pixels of a file that `to_png` made."""
    return np.asarray(Image.open(io.BytesIO(data)))
