# SPDX-License-Identifier: Apache-2.0
"""Errors as the `openai` client reads them: ``{"error": {"message", "type", "param", "code"}}`` with an HTTP status."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from ..errors import EngineError, QueueFullError, RequestError
from .request_id import REQUEST_ID, request_id

RETRY_AFTER_S = 5
MAX_TEXT = 2000
"""Characters of an error's message, and of the field that it names."""

CLIENT_CLOSED_REQUEST = 499
NO_RETRY = {"x-should-retry": "false"}
RETRY_LATER = {"Retry-After": str(RETRY_AFTER_S)}


def error_response(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """Return the OpenAI-shaped answer for an error.

    Args:
        status: HTTP status; the error's type follows from it.
        message: What was asked, what was found, what to do.
        param: The request field at fault, if it is one.
        code: Short machine-readable reason; the status' own name when absent.
        headers: Further headers, such as ``Retry-After``.
    """
    return JSONResponse(
        error_body(status, message, param=param, code=code), status_code=status, headers=dict(headers or {})
    )


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return the object that `error_response` sends, for an answer that has begun already."""
    kind = "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
    code = code or HTTPStatus(status).name.lower()
    return {"error": {"message": _printable(message), "type": kind, "param": param and _printable(param), "code": code}}


def _printable(text: str) -> str:
    # A client can name a field with half of a surrogate pair, which UTF-8 cannot carry back, or at great length.
    text = text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "..."
    return text.encode("utf-8", "replace").decode("utf-8")


async def _on_request_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    headers = NO_RETRY if error.status >= 500 else None
    return error_response(error.status, str(error), param=error.param, code=error.code, headers=headers)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code in (404, 405) and message == HTTPStatus(error.status_code).phrase:
        message = f"{request.method} {request.url.path} is not served here; see /docs for the routes"
    return error_response(error.status_code, message, headers=error.headers)


async def _on_validation_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = str(first["loc"][-1])
    return error_response(422, f"{param}: {first['msg']}", param=param, code="invalid_value")


async def _on_queue_full(_: Request, error: Exception) -> Response:
    return error_response(429, str(error), code="queue_full", headers=RETRY_LATER)


async def _on_engine_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, EngineError)
    return error_response(503, str(error), code=error.code, headers=RETRY_LATER)


async def _on_disconnect(_: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)  # counted, read by nobody


async def _on_unexpected(_: Request, error: Exception) -> Response:
    headers = {REQUEST_ID: request_id.get()}
    message = "internal error; the server's log has the reason"
    return error_response(500, message, code="internal_error", headers=headers)


def install_error_handlers(app: FastAPI) -> None:
    """Make every error of ``app`` OpenAI-shaped, also unknown routes and bugs; a traceback stays in the log."""
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(QueueFullError, _on_queue_full)
    app.add_exception_handler(EngineError, _on_engine_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_unexpected)
