# SPDX-License-Identifier: Apache-2.0
"""The limit on request bodies, held while they stream in."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import RequestError
from .errors import error_response


class UploadLimit:
    """ASGI middleware that answers 413 to a body above ``max_bytes``.

    No more than ``max_bytes`` reach the application, with or without a Content-Length and also when chunked.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._message = f"the request body is larger than {max_bytes} bytes, the most that this server takes"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            await error_response(413, self._message, code="body_too_large")(scope, receive, send)
            return
        taken = 0

        async def limited() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._max_bytes:
                raise RequestError(self._message, code="body_too_large", status=413)
            return message

        await self._app(scope, limited, send)
