# SPDX-License-Identifier: Apache-2.0
"""Bearer keys: who may call the server."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import error_response
from .page import PAGE_PATHS

OPEN_PATHS = frozenset({"/health", "/ping", "/version"})


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class BearerAuth:
    """ASGI middleware that answers 401 unless the client presents one of the keys.

    The time that a comparison takes says nothing about a key. `OPEN_PATHS` and the page need no key.

    Args:
        app: The application behind it.
        keys: Accepted keys, at least one.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_open(scope) or self._is_known(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        response = error_response(
            401,
            "no valid API key; send the header 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await response(scope, receive, send)

    @staticmethod
    def _is_open(scope: Scope) -> bool:
        path: str = scope["path"]
        below = path.removeprefix(scope.get("root_path", "")) or "/"
        return below in OPEN_PATHS or below in PAGE_PATHS

    def _is_known(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = _digest(key.strip().encode("latin-1"))
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(matches)
