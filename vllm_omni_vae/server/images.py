# SPDX-License-Identifier: Apache-2.0
"""The routes of OpenAI's images API."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..errors import RequestError
from .errors import CLIENT_CLOSED_REQUEST
from .image_answers import image_events, images_body
from .image_form import EditForm, ImageForm
from .image_intake import ImageIntake, ImageOrder
from .runner import JobRunner
from .schema import body_of
from .waiting import JobStream, finished, job_headers

_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The images; with `stream` one event for each.",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {"schema": {"type": "string"}},
        },
    }
}


class ImageRoutes:
    """Everything below ``/v1/images``; ``router`` is what an application includes.

    While images are made they are a job like any other, which the video routes do not show. After the answer nothing of
    them is kept. A client that goes away cancels its job.

    Args:
        intake: Reads what is asked for.
        runner: Runs jobs.
    """

    def __init__(self, intake: ImageIntake, runner: JobRunner) -> None:
        self._intake = intake
        self._runner = runner
        self.router = APIRouter(prefix="/v1/images", tags=["images"])
        add = self.router.add_api_route
        generation = body_of(ImageForm, "application/json", "multipart/form-data")
        edit = body_of(EditForm, "multipart/form-data", "application/json")
        add("/generations", self.generate, methods=["POST"], openapi_extra=generation, responses=_ANSWERS)
        add("/edits", self.edit, methods=["POST"], openapi_extra=edit, responses=_ANSWERS)
        add("/variations", self.unsupported, methods=["POST"], include_in_schema=False)

    async def generate(self, request: Request) -> Response:
        """Make images and return them, or with `stream` an event for each."""
        self._runner.check_open()
        return await self._answer(request, await self._intake.generation(request), "image_generation")

    async def edit(self, request: Request) -> Response:
        """Make images out of others and return them, or with `stream` an event for each."""
        self._runner.check_open()
        return await self._answer(request, await self._intake.edit(request), "image_edit")

    async def unsupported(self, request: Request) -> Response:
        """Refuse what no model here can do."""
        raise RequestError(
            "this model makes no variations; it makes images at /v1/images/generations and /v1/images/edits",
            code="not_implemented",
            status=501,
        )

    async def _answer(self, request: Request, order: ImageOrder, kind: str) -> Response:
        job = await self._runner.submit(order.request, model=order.model, encoding=order.encoding)
        if order.stream:
            events = image_events(job, self._runner, kind=kind, quality=order.quality)
            return JobStream(events, self._runner, job)
        try:
            if not await finished(self._runner, job, request):
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            if job.error is not None:
                raise RequestError(job.error.message, code=job.error.code, status=job.error.status)
            body = await asyncio.to_thread(images_body, job, order.quality)
        finally:
            await self._runner.delete(job.id)
        return Response(body, media_type="application/json", headers=job_headers(job))
