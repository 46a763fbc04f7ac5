# SPDX-License-Identifier: Apache-2.0
"""Pages of other sites: what they may have a browser send."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import error_response

_READS = frozenset({"GET", "HEAD", "OPTIONS"})


class KnownOrigins:
    """ASGI middleware that answers 403 to what a browser sends for a page of a site that was not allowed to.

    CORS only keeps such a page from reading answers: a form is sent without being asked about. A browser says where a
    request comes from, which a page cannot change; other clients say nothing and are let through.

    Args:
        app: The application behind it.
        allowed: Origins whose pages may send, or ``*``.
    """

    def __init__(self, app: ASGIApp, allowed: Iterable[str]) -> None:
        self._app = app
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in _READS or self._is_known(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        origin = Headers(scope=scope)["origin"]
        response = error_response(
            403,
            f"a page of {origin} may not send this; the operator can allow that with --allowed-origins",
            code="unknown_origin",
        )
        await response(scope, receive, send)

    def _is_known(self, headers: Headers) -> bool:
        origin = headers.get("origin")
        if origin is None or origin in self._allowed or "*" in self._allowed:
            return True
        # Browsers leave it out where the connection is no secure one; then the server's own name has to do.
        site = headers.get("sec-fetch-site")
        return site == "same-origin" if site is not None else _host(origin) == headers.get("host", "").lower()


def _host(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None
