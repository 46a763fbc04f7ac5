# SPDX-License-Identifier: Apache-2.0
"""Every request has a name, by which its answer is found in the logs, and every answer is counted."""

from __future__ import annotations

import logging
import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import BaseRoute, Match, Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .auth import OPEN_PATHS
from .metrics import Metrics
from .request_id import REQUEST_ID, request_id

logger = logging.getLogger(__name__)

UNMATCHED = "unmatched"
# What a client may call its request: nothing that could end a header or a line of the log, and not too much of it.
_SANE = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestTracking:
    """ASGI middleware, the outermost: gives answers their ``X-Request-Id``, counts them, and logs 500 and above.

    The id is the client's own where that is sane, else the one that the answer has already, else a new one. Answers of
    `OPEN_PATHS` are not logged: probes ask for them again and again.

    Args:
        app: The application behind it.
        metrics: Where answers are counted.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        echoed = _SANE.fullmatch(given) is not None
        identity = given if echoed else f"req_{secrets.token_hex(16)}"
        request_id.set(identity)  # for good: unexpected errors are answered behind this, in the same task
        method, route, begun = scope["method"], route_of(scope), False

        def answered(status: int) -> None:
            nonlocal begun
            begun = True
            self._metrics.answered(route, method, status)
            if status >= 500 and route not in OPEN_PATHS:
                logger.error("request %s: %s %s is answered %d", identity, method, route, status)

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if echoed or REQUEST_ID not in headers:
                    headers[REQUEST_ID] = identity
                answered(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, tagged)
        except Exception:
            if not begun:
                answered(500)
            raise


def route_of(scope: Scope) -> str:
    """Return the template of the route that is asked for, such as ``/v1/videos/{video_id}``, or `UNMATCHED`.

    Known also for a request that will be refused before it gets there, and for a method that the route does not have.
    """
    routes: list[BaseRoute] = scope["app"].routes
    found = [(route.matches(scope)[0], route) for route in routes if isinstance(route, Route | Mount)]
    for wanted in (Match.FULL, Match.PARTIAL):
        for match, route in found:
            if match is wanted:
                return route.path or "/"
    return UNMATCHED
