# SPDX-License-Identifier: Apache-2.0
"""A job's way through the server: admitted, in the engine, exported, done; or stopped on the way."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from starlette.exceptions import HTTPException

from ..engine.api import JobEvent, JobHandle, Started
from ..errors import Cancelled, EngineError, QueueFullError, RankError, RequestError
from ..pipelines.request import Frames, GenerationRequest, GenerationResult, Stage
from .errors import RETRY_LATER
from .job import Job, JobError, JobStatus, Outcome
from .jobs import JobStore
from .lifecycle import EngineLifecycle
from .media import MediaError, export_clip
from .pictures import Encoding, encode_pictures

logger = logging.getLogger(__name__)

# Seconds that a deletion waits for the ranks to leave the job before it answers all the same.
DELETE_WAIT_S = 5.0

_SHUTDOWN = JobError("server_shutdown", "the server was shut down before the job was finished", 503)


@dataclasses.dataclass(slots=True, eq=False)
class _Run:
    job: Job
    images: tuple[Frames, ...]
    handle: JobHandle
    stopped: threading.Event = dataclasses.field(default_factory=threading.Event)
    started: float | None = None
    timer: asyncio.TimerHandle | None = None
    task: asyncio.Task[None] | None = None

    @property
    def in_engine(self) -> bool:
        return not self.handle.future.done()


class JobRunner:
    """Takes jobs to the engine, and their frames to files or images to bytes. Its methods are called on the event loop.

    Args:
        lifecycle: The engine and whether it takes jobs.
        store: Where jobs are kept.
        max_queued_jobs: Jobs that may wait behind the one that runs.
        job_timeout: Seconds that one job may run, from its start to its files.
    """

    def __init__(
        self, lifecycle: EngineLifecycle, store: JobStore, *, max_queued_jobs: int, job_timeout: float
    ) -> None:
        self._lifecycle = lifecycle
        self._store = store
        self._max_queued_jobs = max_queued_jobs
        self._job_timeout = job_timeout
        self._runs: dict[str, _Run] = {}
        self._exporter = ThreadPoolExecutor(1, thread_name_prefix="export")

    def check_open(self) -> None:
        """Refuse when no job can be taken now.

        Raises:
            HTTPException: 503, while the model is loading, after it failed to, or when the server is shutting down.
            QueueFullError: as many jobs wait as may.
        """
        if not self._lifecycle.ready:
            raise HTTPException(503, f"no jobs now: {self._lifecycle.health().reason}", headers=RETRY_LATER)
        if sum(run.in_engine for run in self._runs.values()) > self._max_queued_jobs:
            raise QueueFullError(f"{self._max_queued_jobs} jobs are waiting, the most that may; try again later")

    def submit(
        self,
        request: GenerationRequest,
        *,
        model: str,
        seconds: str = "",
        encoding: Encoding | None = None,
        remixed_from: str | None = None,
    ) -> Job:
        """Queue a resolved request and return its job.

        Args:
            request: What to make.
            model: The name under which it was asked for.
            seconds: A clip's length as OpenAI's string.
            encoding: How images are written.
            remixed_from: The job whose settings a clip has.

        Raises:
            HTTPException, QueueFullError: see `check_open`.
            RequestError, EngineError: the engine does not take it.
        """
        self.check_open()
        loop = asyncio.get_running_loop()
        job = self._store.create(request, model=model, seconds=seconds, encoding=encoding, remixed_from=remixed_from)

        def listen(event: JobEvent) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to tell
                loop.call_soon_threadsafe(self._on_event, job, event)

        try:
            handle = self._lifecycle.engine.submit(request, job_id=job.id, listener=listen)
        except BaseException:
            self._store.withdraw(job)
            raise
        run = self._runs[job.id] = _Run(job, request.images if encoding is None else (), handle)
        run.task = loop.create_task(self._run(run), name=job.id)
        return job

    async def wait(self, job: Job) -> None:
        """Return when the job is finished or gone."""
        while job.live:
            await job.changed.wait()

    async def delete(self, identity: str) -> bool:
        """Forget a job, stop it if it runs, and remove its files; False when there is no such job.

        Returns when no rank works on it and no file is left, or after `DELETE_WAIT_S`; the files go in any case.
        """
        job = self._store.delete(identity)
        if job is None:
            return False
        run = self._runs.get(identity)
        if run is None:
            await asyncio.to_thread(self._store.discard_files, job)
        elif run.task is not None:
            self._stop(run)
            await asyncio.wait({run.task}, timeout=DELETE_WAIT_S)
        return True

    async def expire(self) -> None:
        """Remove the files of jobs whose time is over."""
        for job in self._store.expire():
            await asyncio.to_thread(self._store.discard_files, job)

    async def drain(self, grace: float) -> None:
        """Take no more jobs, fail those that wait, give the others ``grace`` seconds, then fail them too."""
        self._lifecycle.refuse_jobs()
        for run in list(self._runs.values()):
            if run.job.status is JobStatus.QUEUED:
                self._stop(run, _SHUTDOWN)
        running = [run for run in self._runs.values() if run.job.live]
        if running:
            await asyncio.wait([asyncio.ensure_future(self.wait(run.job)) for run in running], timeout=grace)
        for run in list(self._runs.values()):
            self._stop(run, _SHUTDOWN)

    async def close(self, timeout: float) -> None:
        """Wait for what still runs after the engine was closed, so that no partial file stays."""
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout)
        self._exporter.shutdown(wait=False, cancel_futures=True)

    def _stop(self, run: _Run, error: JobError | None = None) -> None:
        if error is not None:
            self._store.fail(run.job, error)
        run.stopped.set()
        run.handle.cancel()

    def _on_event(self, job: Job, event: JobEvent) -> None:
        if self._store.start(job) and (run := self._runs.get(job.id)):
            run.started = time.monotonic()
            message = f"the job ran longer than {self._job_timeout:g} s, the most that one may"
            late = JobError("timeout", message, 504)
            run.timer = asyncio.get_running_loop().call_later(self._job_timeout, self._stop, run, late)
        if not isinstance(event, Started):
            self._store.advance(job, event.stage, event.done, event.total)

    async def _run(self, run: _Run) -> None:
        job = run.job
        try:
            outcome = await self._make(run)
        except Exception as error:
            self._store.fail(job, _reason(job, error))
        else:
            self._store.complete(job, outcome)
        finally:
            if run.timer is not None:
                run.timer.cancel()
            if job.gone is not None or job.status is not JobStatus.COMPLETED:
                await asyncio.to_thread(self._store.discard_files, job)
            del self._runs[job.id]

    async def _make(self, run: _Run) -> Outcome:
        # Waited for, never cancelled: a future that asyncio cancels is one that the engine can no longer resolve.
        future = asyncio.wrap_future(run.handle.future)
        await asyncio.wait([future])
        if future.cancelled():
            raise Cancelled(f"{run.job.id} was cancelled")
        result = future.result()
        inference_s = time.monotonic() - run.started if run.started is not None else 0.0
        loop = asyncio.get_running_loop()
        begun = time.monotonic()
        pictures = await loop.run_in_executor(self._exporter, self._export, run, result, loop)
        return Outcome(
            stage_durations={**result.stage_durations, Stage.EXPORT.value: time.monotonic() - begun},
            inference_s=inference_s,
            peak_memory_mb=tuple(result.peak_memory_mb),
            vae=tuple(dict(decision) for decision in result.decisions),
            pictures=pictures,
        )

    def _export(self, run: _Run, result: GenerationResult, loop: asyncio.AbstractEventLoop) -> tuple[bytes, ...]:
        request, encoding = run.job.request, run.job.encoding

        def on_frame(done: int, total: int) -> None:
            if run.stopped.is_set():
                raise Cancelled(f"{run.job.id} was stopped")
            loop.call_soon_threadsafe(self._store.advance, run.job, Stage.EXPORT, done, total)

        if request.width is None or request.height is None or request.pictures is None:
            raise MediaError("the request was not resolved before it ran")
        size, count = (request.width, request.height), request.runs * request.pictures
        if encoding is not None:
            return encode_pictures(
                result.frames,
                encoding,
                size=size,
                count=count,
                transparency=self._lifecycle.engine.card.transparency,
                on_picture=on_frame,
            )
        if result.fps is None:
            raise MediaError("the clip has no frame rate")
        export_clip(
            result.frames,
            audio=result.audio,
            fps=result.fps,
            size=size,
            num_frames=count,
            folder=run.job.folder,
            reference=run.images[0] if run.images else None,
            on_frame=on_frame,
        )
        return ()


def _reason(job: Job, error: Exception) -> JobError:
    match error:
        case RequestError():
            return JobError(error.code, str(error), error.status)
        case Cancelled():
            return JobError("cancelled", "the job was cancelled")
        case EngineError():
            return JobError(error.code, str(error))
        case RankError():
            return JobError("rank_failed", str(error))
        case MediaError():
            return JobError("invalid_output", str(error))
        case _:
            logger.error("job %s failed", job.id, exc_info=error)
            return JobError("internal_error", "internal error; the server's log has the reason")
