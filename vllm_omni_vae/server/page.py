# SPDX-License-Identifier: Apache-2.0
"""The page at ``/``: a few files of this package, served as they are, without a key."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).with_name("static")
START = "index.html"
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# What is fetched with a key is played and shown from blobs; nothing comes from another host.
POLICY = (
    "default-src 'self'; img-src 'self' blob:; media-src 'self' blob:; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclasses.dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    etag: str


def _read(path: Path) -> _File:
    content = path.read_bytes()
    return _File(content, MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')


_FILES = {path.name: _read(path) for path in sorted(FOLDER.iterdir()) if path.suffix in MEDIA_TYPES}

PAGE_PATHS = frozenset({"/", *(f"/static/{name}" for name in _FILES)})
"""Paths of the page and its files."""


def page_routes() -> APIRouter:
    """Return ``/`` and ``/static/{name}``: the files that were there at the start, and nothing else of the disk.

    They name each other by relative addresses, so that the page also works behind a path prefix.
    """
    router = APIRouter(include_in_schema=False)

    async def start(request: Request) -> Response:
        return _answer(request, START)

    async def file(request: Request, name: str) -> Response:
        return _answer(request, name)

    router.add_api_route("/", start, methods=["GET", "HEAD"])
    router.add_api_route("/static/{name}", file, methods=["GET", "HEAD"])
    return router


def _answer(request: Request, name: str) -> Response:
    file = _FILES.get(name)
    if file is None:
        raise HTTPException(404)
    headers = {**HEADERS, "ETag": file.etag}
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if file.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)
