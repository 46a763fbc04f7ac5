# SPDX-License-Identifier: Apache-2.0
"""Uploaded pictures: any usual file or data URL in, pixels out."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import io
import re
import struct
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from ..errors import RequestError
from ..pipelines.request import Frames

FORMATS = ("PNG", "JPEG", "WEBP")
_DATA_URL = re.compile(r"data:[\w.+-]+/[\w.+-]+(?:;[\w.+-]+=[^;,]*)*;base64,", re.IGNORECASE)
# Characters before the data of a data URL, of which no more are looked at.
_MAX_HEAD = 256
_BROKEN = (OSError, SyntaxError, ValueError, TypeError, KeyError, IndexError, OverflowError, EOFError, struct.error)


@dataclasses.dataclass(frozen=True, slots=True)
class Upload:
    """A picture as a client sent it.

    Attributes:
        source: The file's bytes, or a base64 data URL.
        param: The request field that it came in.
        name: What messages call it.
    """

    source: bytes | str
    param: str
    name: str = "the reference image"

    def refusal(self, message: str, code: str, status: int = 400) -> RequestError:
        """An error that names the field."""
        return RequestError(message, param=self.param, code=code, status=status)


def decode(upload: Upload, convert: Callable[[Image.Image], Image.Image], *, max_pixels: int) -> Frames:
    """Read a picture, upright, as ``convert`` returns it.

    Blocking; takes memory in proportion to ``max_pixels`` at most, whatever the file claims.

    Args:
        upload: The picture. The type is judged by the bytes alone: PNG, JPEG or WebP; of an animation the first frame.
        convert: Brings any mode to the one that is needed.
        max_pixels: Most pixels that are decoded.

    Raises:
        RequestError: 400 for anything that is no such picture, 413 for too many pixels.
    """
    data = _decode_url(upload, upload.source) if isinstance(upload.source, str) else upload.source
    if not data:
        raise upload.refusal(f"{upload.name} is empty; send the bytes of a PNG, JPEG or WebP file", "empty_image")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise upload.refusal(
                    f"{upload.name} has {width}x{height} pixels; this server takes at most {max_pixels}",
                    "image_too_large",
                    413,
                )
            return np.asarray(convert(ImageOps.exif_transpose(image)))
    except Image.DecompressionBombError:
        raise upload.refusal(
            f"{upload.name} has too many pixels; this server takes at most {max_pixels}", "image_too_large", 413
        ) from None
    except RequestError:
        raise
    except _BROKEN as error:
        known = not isinstance(error, UnidentifiedImageError)  # else it says where in memory the bytes are
        reason = f" ({type(error).__name__}: {error})" if known else ""
        raise upload.refusal(f"{upload.name} cannot be read as PNG, JPEG or WebP{reason}", "invalid_image") from None


def _decode_url(upload: Upload, url: str) -> bytes:
    if url[:8].lower().startswith(("http://", "https://")):
        raise upload.refusal(
            "this server fetches nothing from the network; upload the image or send it as a data URL",
            "unsupported_url",
        )
    head = _DATA_URL.match(url[:_MAX_HEAD])
    if head is None:
        raise upload.refusal(
            f"{upload.name} is no file and no data URL; write 'data:image/png;base64,' and the base64 text",
            "invalid_data_url",
        )
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise upload.refusal(f"the data URL's base64 text is malformed: {error}", "invalid_data_url") from None


def to_rgb(image: Image.Image) -> Image.Image:
    """Any mode as RGB, transparency on white; 16-bit grey keeps its upper eight bits."""
    if image.mode.startswith("I"):
        return _upper_bits(image).convert("RGB")
    return on_white(image.convert("RGBA")) if image.has_transparency_data else image.convert("RGB")


def to_rgba(image: Image.Image) -> Image.Image:
    """Any mode as RGBA; what has no transparency is opaque."""
    if image.has_transparency_data and not image.mode.startswith("I"):
        return image.convert("RGBA")
    return to_rgb(image).convert("RGBA")


def to_grey(image: Image.Image) -> Image.Image:
    """Any mode as 8-bit grey, transparency left out."""
    return _upper_bits(image) if image.mode.startswith("I") else image.convert("RGB").convert("L")


def on_white(image: Image.Image) -> Image.Image:
    """An RGBA picture as RGB, on white."""
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def _upper_bits(image: Image.Image) -> Image.Image:
    grey = np.asarray(image).astype(np.uint32) >> 8
    return Image.fromarray(np.minimum(grey, 255).astype(np.uint8))
