# SPDX-License-Identifier: Apache-2.0
"""The routes of OpenAI's videos API, and vLLM-Omni's synchronous one."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from ..errors import RequestError
from .content import RangedFile, check_range
from .errors import CLIENT_CLOSED_REQUEST
from .events import job_events
from .job import Job
from .jobs import JobStore, ListOrder
from .media import Variant
from .runner import JobRunner
from .schema import body_of
from .video_form import RemixForm, VideoForm
from .video_intake import VideoIntake
from .waiting import finished, job_headers

POLL_AFTER_MS = 500


class VideoRoutes:
    """Everything below ``/v1/videos``; ``router`` is what an application includes.

    Args:
        intake: Reads what is asked for.
        runner: Runs jobs.
        store: Knows jobs.
    """

    def __init__(self, intake: VideoIntake, runner: JobRunner, store: JobStore) -> None:
        self._intake = intake
        self._runner = runner
        self._store = store
        create = body_of(VideoForm, "multipart/form-data", "application/json")
        remix = body_of(RemixForm, "application/json", "multipart/form-data")
        self.router = APIRouter(prefix="/v1/videos", tags=["videos"])
        add = self.router.add_api_route
        add("", self.create_video, methods=["POST"], openapi_extra=create)
        add("", self.list_videos, methods=["GET"])
        add("/sync", self.create_video_sync, methods=["POST"], openapi_extra=create)
        for path in ("/edits", "/extensions", "/characters"):
            add(path, self.unsupported, methods=["POST"], include_in_schema=False)
        add("/characters/{video_id}", self.unsupported, methods=["GET"], include_in_schema=False)
        add("/{video_id}", self.retrieve_video, methods=["GET"])
        add("/{video_id}", self.delete_video, methods=["DELETE"])
        add("/{video_id}/content", self.download_content, methods=["GET"])
        add("/{video_id}/remix", self.remix_video, methods=["POST"], openapi_extra=remix)
        add("/{video_id}/events", self.follow_video, methods=["GET"])

    async def create_video(self, request: Request) -> Response:
        """Queue a video and return its job."""
        return _job_response(await self._accept(request))

    async def list_videos(
        self,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: ListOrder = "desc",
    ) -> Response:
        """Return the jobs that follow `after`, newest first unless `order` is `asc`."""
        await self._runner.expire()
        page = self._store.page(after=after, limit=limit, order=order)
        if page is None:
            raise RequestError(f"after is {after!r}; there is no such video", param="after", status=404)
        return JSONResponse(
            {
                "object": "list",
                "data": [job.to_json() for job in page.jobs],
                "first_id": page.jobs[0].id if page.jobs else None,
                "last_id": page.jobs[-1].id if page.jobs else None,
                "has_more": page.has_more,
            }
        )

    async def create_video_sync(self, request: Request) -> Response:
        """Make a video and return its mp4 bytes.

        While it is made it is a job like any other; after that neither job nor file is kept. A client that goes away
        cancels it.
        """
        job = await self._accept(request, kept=False)
        try:
            if not await finished(self._runner, job, request):
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            _require_clip(job, failed_status=job.error.status if job.error else 500)
            video = await asyncio.to_thread(job.path(Variant.VIDEO).read_bytes)
        except FileNotFoundError:
            raise _gone(job.id, "deleted") from None
        finally:
            await self._runner.delete(job.id)
        return Response(video, media_type=Variant.VIDEO.media_type, headers=job_headers(job))

    async def retrieve_video(self, video_id: str) -> Response:
        """Return a job; also one that failed is a 200."""
        return _job_response(await self._find(video_id))

    async def delete_video(self, video_id: str) -> Response:
        """Delete a job and its files; one that runs is cancelled."""
        await self._find(video_id)
        await self._runner.delete(video_id)
        return JSONResponse({"id": video_id, "object": "video.deleted", "deleted": True})

    async def download_content(self, request: Request, video_id: str, variant: Variant = Variant.VIDEO) -> Response:
        """Return a finished video, its thumbnail or its spritesheet, or the byte ranges of it that are asked for."""
        job = await self._find_clip(video_id)
        path = job.path(variant)
        try:
            stat = await asyncio.to_thread(os.stat, path)
        except FileNotFoundError:
            raise _gone(video_id, "deleted") from None
        check_range(request.headers.get("range"), stat.st_size)
        return RangedFile(path, stat, variant.media_type)

    async def remix_video(self, request: Request, video_id: str) -> Response:
        """Queue a video with a finished one's settings, its seed and reference image too, and a new prompt."""
        self._runner.check_open()
        self._store.check_room()
        source = await self._find_clip(video_id)
        resolved = await self._intake.remix(request, source.request, source.reference)
        job = await self._runner.submit(resolved, model=source.model, seconds=source.seconds, remixed_from=source.id)
        return _job_response(job)

    async def follow_video(self, video_id: str) -> Response:
        """Follow a job as server-sent events (`status`, `progress`, `deleted`) until it is finished or gone."""
        job = await self._find(video_id)
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(job_events(job), media_type="text/event-stream", headers=headers)

    async def unsupported(self, request: Request) -> Response:
        """Refuse what no model here can do."""
        raise RequestError(
            f"this model cannot do {request.method} {request.url.path}; it makes videos at /v1/videos",
            code="not_implemented",
            status=501,
        )

    async def _accept(self, request: Request, *, kept: bool = True) -> Job:
        self._runner.check_open()
        self._store.check_room()
        order = await self._intake.video(request)
        return await self._runner.submit(order.request, model=order.model, seconds=order.seconds, kept=kept)

    async def _find(self, video_id: str) -> Job:
        await self._runner.expire()
        job = self._store.get(video_id)
        if job is None:
            gone = self._store.gone(video_id)
            message = f"the video {video_id} is {gone}" if gone else f"there is no video {video_id!r}"
            raise RequestError(message, param="video_id", code="video_not_found", status=404)
        return job

    async def _find_clip(self, video_id: str) -> Job:
        await self._runner.expire()
        gone = self._store.gone(video_id)
        if gone is not None:
            raise _gone(video_id, gone)
        job = await self._find(video_id)
        _require_clip(job)
        return job


def _require_clip(job: Job, failed_status: int = 422) -> None:
    if job.error is not None:
        raise RequestError(job.error.message, code=job.error.code, status=failed_status)
    if job.gone is not None:
        raise _gone(job.id, job.gone)
    if job.live:
        raise RequestError(
            f"the video {job.id} is {job.status}; ask again when it is completed",
            param="video_id",
            code="video_not_ready",
            status=409,
        )


def _gone(video_id: str, how: str) -> RequestError:
    return RequestError(f"the video {video_id} is {how}", param="video_id", code=f"video_{how}", status=410)


def _job_response(job: Job) -> Response:
    headers = {"openai-poll-after-ms": str(POLL_AFTER_MS)} if job.live else None
    return JSONResponse(job.to_json(), headers=headers)
