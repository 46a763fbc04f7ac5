# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for their job: one that goes away takes its job along."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from .job import Job
from .runner import JobRunner


async def finished(runner: JobRunner, job: Job, request: Request) -> bool:
    """Return True when ``job`` is over, or False when the client has gone away before that."""
    waiting = {asyncio.create_task(runner.wait(job)), asyncio.create_task(_disconnected(request))}
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
    return not job.live


def job_headers(job: Job) -> dict[str, str]:
    """The headers of an answer that is what ``job`` made; what it measured is there once it is finished."""
    headers = {"X-Request-Id": job.id, "X-Model": job.model.encode("ascii", "replace").decode()}
    if job.outcome is not None:
        headers["X-Inference-Time-S"] = f"{job.outcome.inference_s:.3f}"
        headers["X-Stage-Durations"] = json.dumps(job.outcome.stage_durations)
        headers["X-Peak-Memory-MB"] = f"{max(job.outcome.peak_memory_mb, default=0.0):.1f}"
    return headers


class JobStream(StreamingResponse):
    """A stream about one job, which is deleted when the stream has ended or its client has gone, begun or not."""

    def __init__(self, content: AsyncIterator[str], runner: JobRunner, job: Job) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **job_headers(job)}
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._runner = runner
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._runner.delete(self._job.id)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
