# SPDX-License-Identifier: Apache-2.0
"""The small routes: which model answers, whether it is well, which version this is, and what it has done."""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from .. import __version__
from .capabilities import capabilities
from .errors import error_response
from .lifecycle import LOADING, EngineLifecycle
from .metrics import Metrics
from .runner import JobRunner

OWNER = "vllm-omni-vae"


def model_routes(lifecycle: EngineLifecycle, names: tuple[str, ...]) -> APIRouter:
    """Return ``/v1/models``, ``/health``, ``/ping`` and ``/version``.

    ``/health`` and ``/ping`` answer 200 when jobs are taken, with the status ``degraded`` and the reason while not
    every replica takes them, else 503 with the reason as the error's message (``loading`` while the model is being
    loaded).

    Args:
        lifecycle: Knows how the engine is.
        names: Names under which the model answers.
    """
    router = APIRouter(tags=["server"])
    created = int(time.time())

    async def list_models() -> Response:
        """Return the names under which the model answers, and what can be asked of it."""
        able = capabilities(lifecycle.engine)
        data = [
            {"id": name, "object": "model", "created": created, "owned_by": OWNER, "capabilities": able}
            for name in names
        ]
        return JSONResponse({"object": "list", "data": data})

    async def health() -> Response:
        """Say whether jobs are taken and finished."""
        state = lifecycle.health()
        if state.healthy and state.reason:
            return JSONResponse({"status": "degraded", "reason": state.reason})
        if state.healthy:
            return JSONResponse({"status": "healthy"})
        return error_response(503, state.reason, code="loading" if state.reason == LOADING else "unhealthy")

    async def version() -> Response:
        """Return this package's version."""
        return JSONResponse({"version": __version__})

    router.add_api_route("/v1/models", list_models, methods=["GET"])
    router.add_api_route("/health", health, methods=["GET"])
    router.add_api_route("/ping", health, methods=["GET"], operation_id="ping")
    router.add_api_route("/version", version, methods=["GET"])
    return router


def metrics_route(metrics: Metrics, runner: JobRunner) -> APIRouter:
    """Return ``/metrics``, which needs a key where there are keys.

    Args:
        metrics: What is counted.
        runner: Knows the jobs that wait and run.
    """
    router = APIRouter(tags=["server"])

    async def scrape(request: Request) -> Response:
        """Return metrics in Prometheus' text format, or OpenMetrics if asked for."""
        body, content_type = metrics.render(runner.live_jobs, request.headers.get("accept", ""))
        return Response(body, media_type=content_type)

    router.add_api_route("/metrics", scrape, methods=["GET"], response_class=PlainTextResponse, operation_id="metrics")
    return router
