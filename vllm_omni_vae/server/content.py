# SPDX-License-Identifier: Apache-2.0
"""Finished files over HTTP, whole or in part."""

from __future__ import annotations

import os
import re

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse
from starlette.types import Receive, Scope, Send

# Numbers of at most 18 digits: more than a file has bytes, and fewer than Python refuses to read.
_PART = r"(\d{1,18}-\d{0,18}|-\d{1,18})"
_RANGE = re.compile(rf"bytes=\s*{_PART}(\s*,\s*{_PART})*\s*", re.IGNORECASE)


class RangedFile(FileResponse):
    """A file, or the byte ranges of it that the client asks for.

    A malformed Range header is ignored, as HTTP wants it.

    Args:
        path: The file.
        stat: Its state, so that it was there a moment ago.
        media_type: Its Content-Type.
    """

    def __init__(self, path: os.PathLike[str], stat: os.stat_result, media_type: str) -> None:
        super().__init__(path, stat_result=stat, media_type=media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        header = Headers(scope=scope).get("range")
        if header is not None and not is_range(header):
            scope = {**scope, "headers": [pair for pair in scope["headers"] if pair[0] != b"range"]}
        await super().__call__(scope, receive, send)


def is_range(header: str) -> bool:
    """Whether ``header`` is a well-formed byte Range header."""
    if not _RANGE.fullmatch(header):
        return False
    pairs = re.findall(r"(\d+)-(\d+)", header)
    return all(int(first) <= int(last) for first, last in pairs)


def check_range(header: str | None, size: int) -> None:
    """Refuse a Range of which a part begins after the end of a file of ``size`` bytes.

    Raises:
        HTTPException: 416 with the file's size in Content-Range.
    """
    if header is None or not is_range(header):
        return
    beyond = any(int(first) >= size for first in re.findall(r"(\d+)-", header))
    if beyond or re.search(r"(?<!\d)-0+(?!\d)", header):
        message = f"the range {header} is not within the {size} bytes of the file"
        raise HTTPException(416, message, headers={"Content-Range": f"bytes */{size}"})
