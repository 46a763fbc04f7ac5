# SPDX-License-Identifier: Apache-2.0
"""One replica of the model: runs one job of the queue at a time, and restarts its ranks when they break."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

from ..config import EngineConfig
from ..errors import Cancelled, ConfigurationError, EngineError
from ..worker.group import RankStalled, WorkerBackend, WorkerGroup, packed
from ..worker.messages import Cancel, Failure, Finished, FromRank, LoadFailed, Ready, Run, StageProgress
from .api import Health, Progress, Started
from .job import EngineJob
from .queue import JobQueue

logger = logging.getLogger(__name__)

_LAGGARD_SECONDS = 5.0
_STOP_SECONDS = 5.0


class _Broken(Exception):
    """The ranks cannot be used any more; says why, and under which code the running job fails."""

    def __init__(self, message: str, code: str):
        super().__init__(message)
        self.code = code


class Replica:
    """Supervises one group of ranks after another, on a thread of its own, until it is told to close or gives up.

    What breaks here fails the job that runs here and no other. Attributes are written by its thread and read by others.

    Args:
        number: Which replica this is.
        config: The model and how to run it.
        backend: Starts ranks.
        queue: Where jobs come from.
        closing: Set, with a call of `wake` after it, when the replica is to end.
        changed: Told on its thread, when it has loaded for the first time and when it has given up.

    Attributes:
        number: Which replica this is.
        ready: What rank 0 reported when it had loaded last; None before the first time.
        health: Whether its ranks take jobs.
        failure: Why it has given up.
        restarts: How often its ranks were started again, by the code under which the running job failed.
    """

    def __init__(
        self,
        number: int,
        config: EngineConfig,
        backend: WorkerBackend,
        queue: JobQueue,
        closing: threading.Event,
        changed: Callable[[Replica], None],
    ):
        self.number = number
        self.ready: Ready | None = None
        self.health = Health(False, "loading")
        self.failure: BaseException | None = None
        self.restarts: Counter[str] = Counter()
        self._config = config
        self._backend = backend
        self._queue = queue
        self._closing = closing
        self._changed = changed
        self._done = 0
        self._running: EngineJob | None = None
        self._group: WorkerGroup | None = None
        self._wake_out, self._wake_in = socket.socketpair()
        for end in (self._wake_out, self._wake_in):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._supervise, name=f"replica-{number}", daemon=True)

    def start(self) -> None:
        """Begin to load; returns at once."""
        self._thread.start()

    def wake(self) -> None:
        """Have it look at the queue, at its job and at whether it is to end."""
        with contextlib.suppress(OSError):  # full: it will wake anyway; closed: nobody is left to wake
            self._wake_in.send(b"\0")

    def join(self) -> None:
        """Return when it has ended and no rank is left."""
        if self._thread.ident is not None:
            self._thread.join()

    def close(self) -> None:
        """Free what it holds; it has ended, or was never started. Idempotent."""
        for end in (self._wake_out, self._wake_in):
            end.close()

    @property
    def pids(self) -> list[int]:
        """Process id of every rank; empty while there is none."""
        group = self._group
        return group.pids if group else []

    @property
    def _over(self) -> bool:
        return self._closing.is_set() or self.failure is not None

    def _supervise(self) -> None:
        """Thread body: one group of ranks after another."""
        restarts = 0
        while not self._over:
            done_before = self._done
            group = self._group = self._backend.group(self.number)
            try:
                self._load(group)
                self._run_jobs(group)
            except ConfigurationError as error:
                self._give_up(error)
            except _Broken as broken:
                logger.error("%s; running job: %s", broken, self._running.id if self._running else "none")
                restarts = 1 if self._done > done_before else restarts + 1
                failure = EngineError(str(broken), code=broken.code)
                if self.ready is None or restarts > self._backend.max_restarts:
                    self._give_up(failure)
                else:
                    self.restarts[broken.code] += 1
                    self.health = Health(False, f"restarting: {failure}")
                    self._fail_running(failure)
            except Exception as error:
                logger.exception("the engine failed")
                self._give_up(EngineError(f"the engine failed: {error}", code="engine_failed"))
            finally:
                group.close(_STOP_SECONDS if self.failure is None and self._closing.is_set() else 0.0)
                self._group = None
        self._fail_running(EngineError("the engine was stopped", code="engine_stopped"))

    def _give_up(self, error: BaseException) -> None:
        self.failure = error
        self.health = Health(False, str(error))
        self._changed(self)
        self._fail_running(error)

    def _load(self, group: WorkerGroup) -> None:
        group.start()
        limit = self._config.startup_timeout
        deadline = time.monotonic() + limit
        waiting = set(range(group.size))
        ready: Ready | None = None
        while waiting and not self._over:
            left = deadline - time.monotonic()
            if left <= 0:
                raise _Broken(f"ranks {sorted(waiting)} did not load within {limit} s", "startup")
            for rank, message in self._receive(group, left):
                if message is None:
                    raise _Broken(f"{group.describe_exit(rank)} while loading", "startup")
                if isinstance(message, LoadFailed):
                    if message.configuration:
                        raise ConfigurationError(message.message)
                    raise _Broken(f"rank {rank} could not load the model: {message.message}", "startup")
                if isinstance(message, Ready):
                    waiting.discard(rank)
                    ready = message if rank == 0 else ready
        if not self._over:
            first, self.ready = self.ready is None, ready
            self.health = Health(True)
            if first:
                self._changed(self)

    def _run_jobs(self, group: WorkerGroup) -> None:
        while not self._over:
            self._start_next(group)
            job = self._running
            for rank, message in self._receive(group, self._patience(group, job)):
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
            raise _Broken(_silence([stalled.rank], self._config.worker_timeout), "worker_stalled") from None
        with contextlib.suppress(BlockingIOError):
            self._wake_out.recv(4096)
        return messages

    def _patience(self, group: WorkerGroup, job: EngineJob | None) -> float | None:
        """Seconds until silence is too long. Who does not hear the output rank's progress cannot judge it."""
        if job is None or not group.has_output:
            return None
        limit = _LAGGARD_SECONDS if job.failure else self._config.worker_timeout
        return max(0.0, job.heard + limit - time.monotonic())

    def _start_next(self, group: WorkerGroup) -> None:
        if self._running is not None:
            return
        job = self._running = self._queue.take()
        if job is None:
            return
        try:
            run = packed(Run(job.id, job.request))
        except Exception as error:
            self._fail_running(EngineError(f"the request cannot be sent: {error}", code="invalid_request"))
            self.wake()
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
            group.send_packed(packed(Cancel(job.id)))
        if len(job.reports) == group.size:
            self._finish(group, job)
        elif self._patience(group, job) == 0.0:
            silent = sorted(set(range(group.size)) - set(job.reports))
            if job.failure:
                first = next(rank for rank, report in job.reports.items() if report is job.failure)
                reason = f"rank {first}: {job.failure.message}; ranks {silent} did not end with it"
                raise _Broken(reason, job.failure.failure or "")
            raise _Broken(_silence(silent, self._config.worker_timeout), "worker_stalled")

    def _finish(self, group: WorkerGroup, job: EngineJob) -> None:
        """Every rank has left the job and waits: hand out its outcome.

        Raises:
            _Broken: denoiser ranks ended differently for a reason that they did not share.
        """
        failed = job.failure
        if failed and failed.failure:
            dit = range(min(self._config.parallel.dit_world_size, group.size))
            unshared = failed.failure in (Failure.UNEXPECTED, Failure.OUT_OF_MEMORY)
            alone = unshared and not all(job.reports[rank].failure for rank in dit)
            if alone:
                raise _Broken(failed.message, failed.failure)
        self._done += 1
        self._running = None
        result = job.reports[0].result
        if job.cancelled or (failed and failed.failure is Failure.CANCELLED):
            job.fail(Cancelled("the job was cancelled"))
        elif failed:
            job.fail(EngineError(failed.message, code=str(failed.failure)))
        elif result is None and group.has_output:
            job.fail(EngineError("the output rank made nothing", code="generation_failed"))
        else:
            job.complete(result)

    def _fail_running(self, error: BaseException) -> None:
        job, self._running = self._running, None
        if job is not None:
            job.fail(Cancelled("the job was cancelled") if job.cancelled else error)


def _silence(ranks: list[int], seconds: float) -> str:
    return f"ranks {ranks} gave no sign of progress for {seconds:g} s"
