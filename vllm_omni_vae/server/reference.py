# SPDX-License-Identifier: Apache-2.0
"""Reference images as clients send them: any usual file or data URL in, RGB pixels of the clip's size out."""

from __future__ import annotations

import base64
import binascii
import io
import re
import struct
from enum import StrEnum

import numpy as np
from PIL import Image, ImageOps

from ..errors import RequestError
from ..pipelines.request import Frames

FORMATS = ("PNG", "JPEG", "WEBP")
_DATA_URL = re.compile(r"data:[\w.+-]+/[\w.+-]+(?:;[\w.+-]+=[^;,]*)*;base64,", re.IGNORECASE)
_BROKEN = (OSError, SyntaxError, ValueError, TypeError, KeyError, IndexError, OverflowError, EOFError, struct.error)


class ReferenceFit(StrEnum):
    """How an image of another aspect becomes the clip's size."""

    CROP = "crop"
    PAD = "pad"


def _refusal(message: str, code: str, status: int = 400) -> RequestError:
    return RequestError(message, param="input_reference", code=code, status=status)


def load_reference(source: bytes | str, *, max_pixels: int) -> Frames:
    """Read a reference image as ``(height, width, 3)`` uint8 RGB, upright, transparency on white.

    Blocking; takes memory in proportion to ``max_pixels`` at most, whatever the file claims.

    Args:
        source: The file's bytes, or a base64 data URL. The type is judged by the bytes alone: PNG, JPEG or WebP.
        max_pixels: Most pixels that are decoded.

    Raises:
        RequestError: 400 for anything that is no such image, 413 for too many pixels.
    """
    data = _decode_url(source) if isinstance(source, str) else source
    if not data:
        raise _refusal("the reference image is empty; send the bytes of a PNG, JPEG or WebP file", "empty_image")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise _refusal(
                    f"the reference image has {width}x{height} pixels; this server takes at most {max_pixels}",
                    "image_too_large",
                    413,
                )
            return np.asarray(_to_rgb(ImageOps.exif_transpose(image)))
    except Image.DecompressionBombError:
        raise _refusal(
            f"the reference image has too many pixels; this server takes at most {max_pixels}", "image_too_large", 413
        ) from None
    except RequestError:
        raise
    except _BROKEN as error:
        raise _refusal(
            f"the reference image cannot be read as PNG, JPEG or WebP ({type(error).__name__}: {error})",
            "invalid_image",
        ) from None


def _decode_url(url: str) -> bytes:
    if url[:8].lower().startswith(("http://", "https://")):
        raise _refusal(
            "this server fetches nothing from the network; upload the image or send it as a data URL",
            "unsupported_url",
        )
    head = _DATA_URL.match(url)
    if head is None:
        raise _refusal(
            "image_url is no data URL; write 'data:image/png;base64,' and the base64 text", "invalid_data_url"
        )
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refusal(f"the data URL's base64 text is malformed: {error}", "invalid_data_url") from None


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        grey = np.asarray(image).astype(np.uint32) >> 8
        return Image.fromarray(np.minimum(grey, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


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
