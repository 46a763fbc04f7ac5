# SPDX-License-Identifier: Apache-2.0
"""A job's way through the server: admitted, in the engine, exported, done; or stopped on the way."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context

from starlette.exceptions import HTTPException

from ..engine.api import JobEvent, JobHandle, Started
from ..errors import Cancelled, EngineError, QueueFullError, RankError, RequestError
from ..pipelines.request import Frames, GenerationRequest, GenerationResult, Stage
from .errors import RETRY_LATER
from .job import Job, JobError, JobStatus, Outcome
from .jobs import JobStore
from .lifecycle import EngineLifecycle
from .media import MediaError, export_clip
from .metrics import Metrics
from .pictures import Encoding, encode_pictures
from .request_id import request_id
from .storage import is_full

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
    # Taken back from the engine before it ran: the next server runs it.
    left: bool = False

    @property
    def in_engine(self) -> bool:
        return not self.handle.future.done()


class JobRunner:
    """Takes jobs to the engine, and their frames to files or images to bytes. Its methods are called on the event loop.

    Args:
        lifecycle: The engine and whether it takes jobs.
        store: Where jobs are kept.
        metrics: Told how jobs end.
        names: Names under which the model answers.
        max_queued_jobs: Jobs that may wait behind those that run, one on each replica.
        job_timeout: Seconds that one job may run, from its start to its files.
    """

    def __init__(
        self,
        lifecycle: EngineLifecycle,
        store: JobStore,
        metrics: Metrics,
        *,
        names: Sequence[str],
        max_queued_jobs: int,
        job_timeout: float,
    ) -> None:
        self._lifecycle = lifecycle
        self._store = store
        self._metrics = metrics
        self._names = names
        self._max_queued_jobs = max_queued_jobs
        self._job_timeout = job_timeout
        self._runs: dict[str, _Run] = {}
        self._accepting = 0
        self._exporter = ThreadPoolExecutor(1, thread_name_prefix="export")

    @property
    def live_jobs(self) -> list[Job]:
        """The jobs that wait or run now."""
        return [run.job for run in self._runs.values()]

    def check_open(self) -> None:
        """Refuse when no job can be taken now.

        Raises:
            HTTPException: 503, while the model is loading, after it failed to, or when the server is shutting down.
            QueueFullError: as many jobs wait as may.
        """
        if not self._lifecycle.ready:
            raise HTTPException(503, f"no jobs now: {self._lifecycle.health().reason}", headers=RETRY_LATER)
        self.resume()
        most = self._max_queued_jobs + self._lifecycle.engine.config.parallel.data_parallel_size
        if self._accepting + sum(run.in_engine for run in self._runs.values()) >= most:
            raise QueueFullError(f"{self._max_queued_jobs} jobs are waiting, the most that may; try again later")

    def resume(self) -> None:
        """Queue what waited when the last server ended, once jobs are taken and before any new one."""
        if not self._lifecycle.ready:
            return
        for job, request in self._store.take_waiting():
            error = self._misfit(job, request)
            if error is not None:
                self._store.fail(job, error)
                self._ended(job)
                continue
            with contextlib.suppress(EngineError):  # it has just given up: the job stays in the index
                Context().run(self._begin, job, request)  # not of the request that is being answered

    def _misfit(self, job: Job, request: GenerationRequest) -> JobError | None:
        """Why ``job``, which another server took, cannot be run by this one."""
        engine = self._lifecycle.engine
        if job.model not in self._names or job.pipeline != engine.card.pipeline_class:
            return JobError(
                "model_changed",
                f"the job waited for the model {job.model} ({job.pipeline}) and the server was started again with "
                f"{', '.join(self._names)} ({engine.card.pipeline_class}); send the request to a server that has it",
                409,
            )
        try:
            engine.resolve(request)
        except RequestError as error:
            return JobError(error.code, str(error), error.status)
        return None

    async def submit(
        self,
        request: GenerationRequest,
        *,
        model: str,
        seconds: str = "",
        encoding: Encoding | None = None,
        remixed_from: str | None = None,
        kept: bool = True,
    ) -> Job:
        """Queue a resolved request and return its job, which a restart of the server does not lose from then on.

        Args:
            request: What to make.
            model: The name under which it was asked for.
            seconds: A clip's length as OpenAI's string.
            encoding: How images are written.
            remixed_from: The job whose settings a clip has.
            kept: Whether a clip's job survives a restart; not one whose client waits for it.

        Raises:
            HTTPException, QueueFullError: see `check_open`.
            RequestError, EngineError: the engine does not take it, or the disk is full.
        """
        self.check_open()
        self._accepting += 1
        try:
            job = await self._store.create(
                request,
                model=model,
                pipeline=self._lifecycle.engine.card.pipeline_class,
                seconds=seconds,
                encoding=encoding,
                remixed_from=remixed_from,
                kept=kept,
            )
        finally:
            self._accepting -= 1
        if not self._lifecycle.ready and self._store.outlives(job):  # stopped meanwhile: the next server runs it
            return job
        try:
            self._begin(job, request)
        except BaseException:
            self._store.withdraw(job)
            raise
        return job

    def _begin(self, job: Job, request: GenerationRequest) -> None:
        loop = asyncio.get_running_loop()

        def listen(event: JobEvent) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to tell
                loop.call_soon_threadsafe(self._on_event, job, event)

        handle = self._lifecycle.engine.submit(request, job_id=job.id, listener=listen)
        run = self._runs[job.id] = _Run(job, request.images if job.encoding is None else (), handle)
        run.task = loop.create_task(self._run(run), name=job.id)

    async def wait(self, job: Job) -> None:
        """Return when the job is finished or gone."""
        while job.live:
            await job.changed.wait()

    async def delete(self, identity: str) -> bool:
        """Forget a job, stop it if it runs, and remove its files; False when there is no such job.

        Returns when no rank works on it and no file is left, or after `DELETE_WAIT_S`; the files go in any case. A
        restart does not bring it back.
        """
        job = self._store.delete(identity)
        if job is None:
            return False
        run = self._runs.get(identity)
        if run is None:
            await self._store.erase(job)
        elif run.task is not None:
            self._stop(run)
            await asyncio.wait({run.task}, timeout=DELETE_WAIT_S)
            if job.kept:
                await self._store.saved()
        return True

    async def expire(self) -> None:
        """Remove the files of jobs whose time is over."""
        for job in self._store.expire():
            await self._store.erase(job)

    async def drain(self, grace: float) -> None:
        """Take no more jobs, give the one that runs ``grace`` seconds, then fail it.

        Those that wait are left to the next server where it will find them, else they fail.
        """
        self._lifecycle.refuse_jobs()
        for run in list(self._runs.values()):
            if run.job.status is JobStatus.QUEUED:
                run.left = self._store.outlives(run.job)
                self._stop(run, None if run.left else _SHUTDOWN)
        running = [run for run in self._runs.values() if run.job.live and not run.left]
        if running:
            await asyncio.wait([asyncio.ensure_future(self.wait(run.job)) for run in running], timeout=grace)
        for run in list(self._runs.values()):
            self._stop(run, None if run.left else _SHUTDOWN)

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
        run = self._runs.get(job.id)
        if run is not None and run.left:
            return
        if self._store.start(job) and run is not None:
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
            await self._store.complete(job, outcome)
        except Exception as error:
            if not self._stays(run, error):
                self._store.fail(job, _reason(job, error))
        finally:
            if run.timer is not None:
                run.timer.cancel()
            self._ended(job)
            if job.gone is not None or job.status is not JobStatus.COMPLETED:
                await asyncio.to_thread(self._store.discard_files, job)
            del self._runs[job.id]

    def _ended(self, job: Job) -> None:
        if job.live:  # it was left to the next server
            return
        self._metrics.job_ended(job)
        if job.error is not None:
            reason = f"{job.error.code}: {job.error.message}"
            logger.warning("job %s of request %s failed: %s", job.id, request_id.get(), reason)

    def _stays(self, run: _Run, error: Exception) -> bool:
        """Whether the job goes on waiting, for the next server: it was left to it, or the engine has given up first."""
        given_up = isinstance(error, EngineError) and not self._lifecycle.engine.health().healthy
        return run.left or (given_up and run.job.status is JobStatus.QUEUED and self._store.outlives(run.job))

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
            vae_use=tuple(dataclasses.asdict(use) for use in result.vae_use),
            traces=tuple(result.traces),
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
        case OSError() if is_full(error):
            return JobError("storage_full", "the server's disk is full; delete some videos and send it again", 507)
        case _:
            logger.error("job %s failed", job.id, exc_info=error)
            return JobError("internal_error", "internal error; the server's log has the reason")
