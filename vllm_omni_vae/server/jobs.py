# SPDX-License-Identifier: Apache-2.0
"""All jobs: their transitions, their order, their files, and what became of those that are gone."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from ..errors import ConfigurationError
from ..pipelines.request import GenerationRequest, Stage
from .job import Gone, Job, JobError, JobStatus, Outcome
from .pictures import Encoding

logger = logging.getLogger(__name__)

MAX_TOMBSTONES = 10_000
# Percent of a whole job that each stage stands for, in the stages' order; the clip is readable only at 100.
STAGE_WEIGHTS = {Stage.ENCODE: 5, Stage.DENOISE: 70, Stage.DECODE: 20, Stage.EXPORT: 5}

ListOrder = Literal["asc", "desc"]


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """Part of the list of jobs; ``has_more`` says whether jobs follow it."""

    jobs: list[Job]
    has_more: bool


class JobStore:
    """Every job by its id, in the order of creation, and what became of those that are gone.

    Not thread-safe: called on the event loop only, except `discard_files` and `close`. A transition that comes too late
    (for a job that is finished or gone) changes nothing and returns False, so that whoever is first wins.

    Args:
        folder: Where files go; None for a temporary folder that `close` removes.
        ttl: Seconds that a finished job and its files are kept.
        clock: Seconds since the epoch.

    Raises:
        ConfigurationError: the folder cannot be made or written to.
    """

    def __init__(self, folder: str | None, ttl: float, *, clock: Callable[[], float] = time.time) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="vllm-omni-vae-") if folder is None else None
        self.folder = Path(self._temporary.name if self._temporary else str(folder)).resolve()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.folder).close()
        except OSError as error:
            raise ConfigurationError(
                f"cannot keep videos in {self.folder}: {error}; see --media-storage-path"
            ) from None
        self._ttl = ttl
        self._clock = clock
        self._jobs: dict[str, Job] = {}
        self._tombstones: dict[str, tuple[int, Gone]] = {}
        self._serial = 0

    def create(
        self,
        request: GenerationRequest,
        *,
        model: str,
        seconds: str = "",
        encoding: Encoding | None = None,
        remixed_from: str | None = None,
    ) -> Job:
        """Add a queued job for ``request``; its reference images and mask are not kept in memory."""
        self._serial += 1
        identity = f"{request.medium}_{secrets.token_hex(16)}"
        job = Job(
            id=identity,
            serial=self._serial,
            model=model,
            request=dataclasses.replace(request, images=(), mask=None),
            seconds=seconds,
            encoding=encoding,
            folder=self.folder / identity,
            created_at=int(self._clock()),
            remixed_from=remixed_from,
        )
        self._jobs[identity] = job
        return job

    def get(self, identity: str) -> Job | None:
        """Return the job, or None when there is none that is listed (or none any more: see `gone`)."""
        job = self._jobs.get(identity)
        return job if job is not None and job.listed else None

    def gone(self, identity: str) -> Gone | None:
        """Say why there is no such job any more; None for an id that never was."""
        tombstone = self._tombstones.get(identity)
        return tombstone[1] if tombstone else None

    def page(self, *, after: str | None, limit: int, order: ListOrder) -> Page | None:
        """Return up to ``limit`` listed jobs that follow ``after`` (which may be gone by now); None if it never was."""
        jobs = [job for job in self._jobs.values() if job.listed]
        if order == "desc":
            jobs.reverse()
        if after is not None:
            serial = self._serial_of(after)
            if serial is None:
                return None
            jobs = [job for job in jobs if (job.serial < serial if order == "desc" else job.serial > serial)]
        return Page(jobs[:limit], len(jobs) > limit)

    def _serial_of(self, identity: str) -> int | None:
        if job := self.get(identity):
            return job.serial
        tombstone = self._tombstones.get(identity)
        return tombstone[0] if tombstone else None

    def start(self, job: Job) -> bool:
        """The job left the queue."""
        if not job.live or job.status is JobStatus.IN_PROGRESS:
            return False
        job.status = JobStatus.IN_PROGRESS
        self._notify(job)
        return True

    def advance(self, job: Job, stage: Stage, done: int, total: int) -> bool:
        """Count ``done`` of ``total`` units of ``stage``; stages before it count as done."""
        if not job.live:
            return False
        self.start(job)
        before = (job.stage, job.progress)
        earlier = sum(weight for other, weight in STAGE_WEIGHTS.items() if _place(other) < _place(stage))
        reached = earlier + STAGE_WEIGHTS[stage] * min(done, total) // max(total, 1)
        job.progress = max(job.progress, min(99, reached))
        if job.stage is None or _place(stage) > _place(job.stage):
            job.stage = stage
        if (job.stage, job.progress) != before:
            self._notify(job)
        return True

    def complete(self, job: Job, outcome: Outcome) -> bool:
        """The job's files are readable."""
        if not job.live:
            return False
        now = self._clock()
        job.status, job.progress, job.outcome = JobStatus.COMPLETED, 100, outcome
        job.completed_at, job.expires_at = int(now), int(now + self._ttl)
        self._notify(job)
        return True

    def fail(self, job: Job, error: JobError) -> bool:
        """The job will not be finished; it stays readable, for the reason, as long as a clip would."""
        if not job.live:
            return False
        job.status, job.error, job.completed_at = JobStatus.FAILED, error, int(self._clock())
        self._notify(job)
        return True

    def delete(self, identity: str) -> Job | None:
        """Forget a job in whatever state; the caller sees to what runs and to the files. None when there is none."""
        return self._bury(identity, "deleted")

    def withdraw(self, job: Job) -> None:
        """Take back a job that was never really accepted; it leaves no trace."""
        del self._jobs[job.id]

    def expire(self) -> list[Job]:
        """Forget finished jobs whose time is over and return them; the caller removes their files."""
        now = self._clock()
        over = [
            job for job in self._jobs.values() if job.completed_at is not None and job.completed_at + self._ttl <= now
        ]
        for job in over:
            self._bury(job.id, "expired")
        return over

    def _bury(self, identity: str, reason: Gone) -> Job | None:
        job = self._jobs.pop(identity, None)
        if job is None:
            return None
        job.gone = reason
        if job.listed:
            self._tombstones[identity] = (job.serial, reason)
        while len(self._tombstones) > MAX_TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]
        self._notify(job)
        return job

    @staticmethod
    def _notify(job: Job) -> None:
        job.changed.set()
        job.changed = asyncio.Event()

    @staticmethod
    def discard_files(job: Job) -> None:
        """Remove a job's files, if it has any. Blocking; from any thread."""
        try:
            shutil.rmtree(job.folder)
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning("cannot remove the files of %s: %s", job.id, error)

    def close(self) -> None:
        """Remove the temporary folder, if the store made it. Blocking; safe to call again."""
        if self._temporary is not None:
            self._temporary.cleanup()


def _place(stage: Stage) -> int:
    return list(STAGE_WEIGHTS).index(stage)
