# SPDX-License-Identifier: Apache-2.0
"""Owns the rank processes: queues jobs, runs one at a time, and restarts the ranks when they break."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np

from .. import checkpoint
from ..config import EngineConfig
from ..errors import Cancelled, ConfigurationError, EngineError, RequestError
from ..pipelines.processors import missing_torchvision
from ..pipelines.profile import read_json
from ..pipelines.request import RANGES, ComponentReport, GenerationRequest
from ..worker.messages import Cancel, Failure, Finished, FromRank, LoadFailed, Ready, Run, StageProgress
from ..worker.multiproc import RankStalled, WorkerGroup
from .api import Health, JobHandle, Listener, Progress, Started
from .job import EngineJob

logger = logging.getLogger(__name__)

_MAX_RESTARTS = 3
_LAGGARD_SECONDS = 5.0
_STOP_SECONDS = 5.0


class _Broken(Exception):
    """The ranks cannot be used any more; says why, and under which code the running job fails."""

    def __init__(self, message: str, code: str):
        super().__init__(message)
        self.code = code


class Engine:
    """Makes clips on rank processes, one at a time, in the order they were submitted. Thread-safe.

    A job that fails on all ranks alike leaves them running. A rank that dies, stalls, or fails alone fails the running
    job with its reason; the ranks then restart by themselves and the queue goes on. After three restarts without a
    finished job between them the engine gives up and says so in `health`.

    Args:
        config: The model and how to run it.

    Raises:
        ConfigurationError: the checkpoint is none, or cannot be run as asked.
    """

    def __init__(self, config: EngineConfig):
        found = checkpoint.require(config.model, revision=config.revision, cache_dir=config.download_dir)
        self.config = config
        self.profile = found.profile(config.model_class_name)
        folder = checkpoint.descriptions(found, revision=config.revision, cache_dir=config.download_dir)
        card = self.profile.card(folder)
        self.card = dataclasses.replace(card, pipeline_class=config.model_class_name or card.pipeline_class)
        refusals = self.profile.refusals(folder, config) + missing_torchvision(read_json(folder / checkpoint.INDEX))
        if refusals:
            raise ConfigurationError(f"{self.card.pipeline_class} cannot be run as asked: " + "; ".join(refusals))
        parallel = config.parallel
        if parallel.vae_ranks < parallel.vae_patch_parallel_size:
            logger.warning(
                "VAE parallel size %d falls back to %d, all the ranks there are",
                parallel.vae_patch_parallel_size,
                parallel.vae_ranks,
            )
        self.report: tuple[ComponentReport, ...] = ()
        self.device = self.dtype = ""
        self._restarts: Counter[str] = Counter()
        self._defaults: dict[str, Any] = dict(config.default_sampling_params)
        for name in ("boundary_ratio", "flow_shift"):
            if getattr(config, name) is not None:
                self._defaults[name] = getattr(config, name)
        self._check_defaults()
        self._done = 0
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._queue: deque[EngineJob] = deque()
        self._running: EngineJob | None = None
        self._closing = False
        self._health = Health(False, "loading")
        self._first: Future[None] = Future()
        self._group: WorkerGroup | None = None
        self._wake_out, self._wake_in = socket.socketpair()
        for end in (self._wake_out, self._wake_in):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._supervise, name="engine", daemon=True)

    def _check_defaults(self) -> None:
        """Refuse operator's defaults that would make every request that relies on them fail.

        Raises:
            ConfigurationError: an unknown field, or a value that the model cannot make.
        """
        unknown = sorted(set(self._defaults) - set(RANGES) - {"negative_prompt"})
        if unknown:
            known = ", ".join(sorted({*RANGES, "negative_prompt"}))
            raise ConfigurationError(f"default_sampling_params has no field {', '.join(unknown)}; it has {known}")
        card = self.card
        pictures = (np.zeros((1, 1, 3), np.uint8),) if all(task.needs_image for task in card.tasks) else ()
        try:
            self.resolve(GenerationRequest(prompt="", medium=card.medium, images=pictures))
        except RequestError as error:
            raise ConfigurationError(f"default_sampling_params: {error}") from None

    def start(self) -> None:
        """Start the ranks and return when all have loaded.

        Raises:
            ConfigurationError: the ranks refused what was asked.
            EngineError: they could not be started or did not load in time.
        """
        self._thread.start()
        self._first.result()

    def resolve(self, request: GenerationRequest) -> GenerationRequest:
        """Fill in every value that ``request`` leaves open, its seed too, or refuse it.

        Raises:
            RequestError: the model cannot make it exactly.
        """
        if request.seed is None:
            chosen = self._defaults.get("seed", self.config.seed)
            request = dataclasses.replace(request, seed=secrets.randbelow(2**31) if chosen is None else chosen)
        return self.profile.resolve(request, self.card, self._defaults)

    def submit(self, request: GenerationRequest, *, job_id: str, listener: Listener | None = None) -> JobHandle:
        """Queue a resolved request.

        Args:
            request: As `resolve` returned it.
            job_id: A name of the caller's choice, unique among its jobs.
            listener: Told of events on an engine thread; must return at once.

        Raises:
            EngineError: the engine is closed or has given up.
        """
        job = EngineJob(job_id, request, listener)
        with self._lock:
            if self._closing:
                raise EngineError(f"the engine takes no jobs: {self._health.reason}", code="engine_stopped")
            self._queue.append(job)
        self._wake()
        return JobHandle(job_id, job.future, lambda: self._cancel(job))

    def health(self) -> Health:
        """Whether jobs are taken and finished, and if not why."""
        return self._health

    @property
    def worker_pids(self) -> list[int]:
        """Process id of every rank; empty while there is none."""
        group = self._group
        return group.pids if group else []

    @property
    def restarts(self) -> Mapping[str, int]:
        """How often all ranks were started again, by the code under which the running job failed."""
        return dict(self._restarts)

    def wait(self) -> BaseException | None:
        """Block until the engine has ended; returns why it gave up, or None when it was closed."""
        self._thread.join()
        return self._failure

    def close(self) -> None:
        """Fail what waits and runs, end the ranks and wait for them. Idempotent; no process stays."""
        health = self._health if self._failure else Health(False, "stopped")
        self._end_with(EngineError("the engine was stopped", code="engine_stopped"), health)
        self._wake()
        if self._thread.ident is not None:
            self._thread.join()
        for end in (self._wake_out, self._wake_in):
            end.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it will wake anyway; closed: nobody is left to wake
            self._wake_in.send(b"\0")

    def _cancel(self, job: EngineJob) -> None:
        with self._lock:
            job.cancelled = True
            waiting = job in self._queue
            if waiting:
                self._queue.remove(job)
        if waiting:
            job.fail(Cancelled("the job was cancelled before it ran"))
        else:
            self._wake()

    def _supervise(self) -> None:
        """Thread body: one group of ranks after another."""
        restarts = 0
        while not self._closing:
            done_before = self._done
            group = self._group = WorkerGroup(self.config)
            try:
                self._load(group)
                self._run_jobs(group)
            except ConfigurationError as error:
                self._give_up(error)
            except _Broken as broken:
                logger.error("%s; running job: %s", broken, self._running.id if self._running else "none")
                restarts = 1 if self._done > done_before else restarts + 1
                failure = EngineError(str(broken), code=broken.code)
                if not self._first.done() or restarts > _MAX_RESTARTS:
                    self._give_up(failure)
                else:
                    self._restarts[broken.code] += 1
                    self._health = Health(False, f"restarting: {failure}")
                    self._fail_running(failure)
            except Exception as error:
                logger.exception("the engine failed")
                self._give_up(EngineError(f"the engine failed: {error}", code="engine_failed"))
            finally:
                group.close(_STOP_SECONDS if self._failure is None and self._closing else 0.0)
                self._group = None
        self._end_with(EngineError("the engine was stopped", code="engine_stopped"), self._health)

    def _load(self, group: WorkerGroup) -> None:
        group.start()
        deadline = time.monotonic() + self.config.startup_timeout
        waiting = set(range(group.size))
        while waiting and not self._closing:
            left = deadline - time.monotonic()
            if left <= 0:
                raise _Broken(f"ranks {sorted(waiting)} did not load within {self.config.startup_timeout} s", "startup")
            for rank, message in self._receive(group, left):
                if message is None:
                    raise _Broken(f"{group.describe_exit(rank)} while loading", "startup")
                if isinstance(message, LoadFailed):
                    if message.configuration:
                        raise ConfigurationError(message.message)
                    raise _Broken(f"rank {rank} could not load the model: {message.message}", "startup")
                if isinstance(message, Ready):
                    waiting.discard(rank)
                    if rank == 0:
                        self.report, self.device, self.dtype = message.components, message.device, message.dtype
        if not self._closing:
            self._health = Health(True)
            if not self._first.done():
                self._first.set_result(None)

    def _run_jobs(self, group: WorkerGroup) -> None:
        while not self._closing:
            self._start_next(group)
            job = self._running
            for rank, message in self._receive(group, self._patience(job)):
                if message is None:
                    raise _Broken(group.describe_exit(rank), "worker_died")
                if job is not None:
                    self._hear(job, rank, message)
            if job is not None:
                self._check(group, job)

    def _receive(self, group: WorkerGroup, timeout: float | None) -> list[tuple[int, FromRank | None]]:
        try:
            messages = group.receive(self._wake_out, timeout)
        except RankStalled as stalled:
            raise _Broken(_silence([stalled.rank], self.config.worker_timeout), "worker_stalled") from None
        with contextlib.suppress(BlockingIOError):
            self._wake_out.recv(4096)
        return messages

    def _patience(self, job: EngineJob | None) -> float | None:
        """Seconds until silence is too long."""
        if job is None:
            return None
        limit = _LAGGARD_SECONDS if job.failure else self.config.worker_timeout
        return max(0.0, job.heard + limit - time.monotonic())

    def _start_next(self, group: WorkerGroup) -> None:
        with self._lock:
            if self._running is not None or not self._queue:
                return
            job = self._queue.popleft()
            if not job.future.set_running_or_notify_cancel():
                self._wake()
                return
            self._running = job
        try:
            run = group.packed(Run(job.id, job.request))
        except Exception as error:
            self._fail_running(EngineError(f"the request cannot be sent: {error}", code="invalid_request"))
            return
        job.heard = time.monotonic()
        job.tell(Started())
        group.send_packed(run)

    def _hear(self, job: EngineJob, rank: int, message: FromRank) -> None:
        job.heard = time.monotonic()
        if isinstance(message, StageProgress):
            job.tell(Progress(message.stage, message.done, message.total))
        elif isinstance(message, Finished):
            job.reports[rank] = message

    def _check(self, group: WorkerGroup, job: EngineJob) -> None:
        """Forward a cancellation, end the job when every rank has reported, or find that one never will."""
        if job.cancelled and not job.told:
            job.told = True
            group.send_all(Cancel(job.id))
        if len(job.reports) == group.size:
            self._finish(job)
        elif self._patience(job) == 0.0:
            silent = sorted(set(range(group.size)) - set(job.reports))
            if job.failure:
                first = next(rank for rank, report in job.reports.items() if report is job.failure)
                reason = f"rank {first}: {job.failure.message}; ranks {silent} did not end with it"
                raise _Broken(reason, job.failure.failure or "")
            raise _Broken(_silence(silent, self.config.worker_timeout), "worker_stalled")

    def _finish(self, job: EngineJob) -> None:
        """Every rank has left the job and waits: hand out its outcome.

        Raises:
            _Broken: denoiser ranks ended differently for a reason that they did not share.
        """
        failed = job.failure
        if failed and failed.failure:
            dit = range(self.config.parallel.dit_world_size)
            alone = failed.failure is Failure.UNEXPECTED and not all(job.reports[rank].failure for rank in dit)
            if alone:
                raise _Broken(failed.message, failed.failure)
        self._done += 1
        result = job.reports[0].result
        if job.cancelled or (failed and failed.failure is Failure.CANCELLED):
            outcome: BaseException | None = Cancelled("the job was cancelled")
        elif failed:
            outcome = EngineError(failed.message, code=str(failed.failure))
        else:
            outcome = None
        with self._lock:
            self._running = None
        if outcome is not None or result is None:
            job.future.set_exception(outcome or EngineError("the output rank made nothing", code="generation_failed"))
            return
        job.complete(result)

    def _fail_running(self, error: BaseException) -> None:
        with self._lock:
            job, self._running = self._running, None
        if job is not None:
            job.fail(Cancelled("the job was cancelled") if job.cancelled else error)

    def _give_up(self, error: BaseException) -> None:
        self._failure = error
        self._end_with(error, Health(False, str(error)))

    def _end_with(self, error: BaseException, health: Health) -> None:
        """Take no more jobs and fail those there are. The running job is failed by the thread that runs it."""
        with self._lock:
            self._closing = True
            self._health = health
            waiting = list(self._queue)
            self._queue.clear()
        if not self._first.done():
            self._first.set_exception(error)
        for job in waiting:
            job.fail(error)
        if threading.current_thread() is self._thread:
            self._fail_running(error)


def _silence(ranks: list[int], seconds: float) -> str:
    return f"ranks {ranks} gave no sign of progress for {seconds:g} s"
