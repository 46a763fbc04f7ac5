# SPDX-License-Identifier: Apache-2.0
"""All jobs: their transitions, their order, their files, and what became of those that are gone."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal, cast

from ..errors import ConfigurationError, RequestError
from ..pipelines.request import Frames, GenerationRequest, Stage
from .index import MAX_TOMBSTONES, JobIndex, Tombstone
from .job import Gone, Job, JobError, JobStatus, Outcome
from .pictures import Encoding
from .png import to_png
from .restart import restore
from .saved import record_of
from .storage import MediaFolder, is_full

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

    What a client has been told is on disk before it is told: `create`, `complete` and `saved` return only then. Other
    changes are written in their order, soon after they are made.

    Not thread-safe: called on the event loop only, except `open`, `discard_files` and `close`. A transition that comes
    too late (for a job that is finished or gone) changes nothing and returns False, so that whoever is first wins.

    Args:
        folder: Where files and the index go; None for a temporary folder that `close` removes.
        ttl: Seconds that a finished job and its files are kept.
        max_bytes: Bytes of finished clips from which on `check_room` refuses; None for no limit.
        clock: Seconds since the epoch.

    Raises:
        ConfigurationError: the folder cannot be made or written to.
    """

    def __init__(
        self, folder: str | None, ttl: float, *, max_bytes: int | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._media = MediaFolder(folder)
        self.folder = self._media.path
        self._index: JobIndex | None = None
        self._ttl = ttl
        self._max_bytes = max_bytes
        self._clock = clock
        self._jobs: dict[str, Job] = {}
        self._tombstones: dict[str, Tombstone] = {}
        self._waiting: list[tuple[Job, tuple[Frames, ...]]] = []
        self._serial = 0

    def open(self) -> None:
        """Take the folder for this process, and up what an earlier one left in it. Blocking; safe to call again.

        Raises:
            ConfigurationError: another server has the folder, or its index cannot be read or written.
        """
        if self._index is not None:
            return
        self._media.claim()
        try:
            index = JobIndex(self._media.index)
            try:
                found = restore(index, self._media, ttl=self._ttl, now=int(self._clock()))
                index.flush().result()
            except BaseException as error:
                index.close()
                if isinstance(error, (OSError, sqlite3.Error)):
                    raise ConfigurationError(
                        f"cannot write to {self._media.index}: {error}; make room, or give another --media-storage-path"
                    ) from None
                raise
        except BaseException:
            self._media.close()
            raise
        self._index = index
        self._jobs = {job.id: job for job in found.jobs}
        self._tombstones = {stone.id: stone for stone in found.tombstones}
        self._waiting, self._serial = found.waiting, found.serial

    def take_waiting(self) -> list[tuple[Job, GenerationRequest]]:
        """Return, once, the jobs that waited when the last server ended, with all of their requests."""
        waiting, self._waiting = self._waiting, []
        return [(job, dataclasses.replace(job.request, images=images)) for job, images in waiting if job.live]

    def outlives(self, job: Job) -> bool:
        """Whether the next server will find ``job``."""
        return job.kept and self._media.lasting

    def check_room(self) -> None:
        """Refuse another clip when those there are take all the room they may.

        Raises:
            RequestError: 507.
        """
        used = sum(job.size_bytes for job in self._jobs.values())
        if self._max_bytes is not None and used >= self._max_bytes:
            raise RequestError(
                f"finished videos take {used} bytes, and {self._max_bytes} are all they may; delete some of them",
                code="storage_full",
                status=507,
            )

    async def create(
        self,
        request: GenerationRequest,
        *,
        model: str,
        pipeline: str = "",
        seconds: str = "",
        encoding: Encoding | None = None,
        remixed_from: str | None = None,
        kept: bool = True,
    ) -> Job:
        """Add a queued job for ``request``; its reference images and mask are not kept in memory.

        Args:
            request: Every value filled in.
            model: The name under which it was asked for.
            pipeline: The class that is to run it.
            seconds: A clip's length as OpenAI's string.
            encoding: How images are written.
            remixed_from: The job whose settings a clip has.
            kept: Whether a clip's job goes into the index.

        Raises:
            RequestError: 507, the disk is full.
        """
        self._serial += 1
        identity = f"{request.medium}_{secrets.token_hex(16)}"
        job = Job(
            id=identity,
            serial=self._serial,
            model=model,
            pipeline=pipeline,
            request=dataclasses.replace(request, images=(), mask=None),
            seconds=seconds,
            encoding=encoding,
            folder=self.folder / identity,
            created_at=int(self._clock()),
            remixed_from=remixed_from,
        )
        job.kept = kept and job.listed
        if job.kept:
            try:
                await _written(self._open_index.add(record_of(job), lambda: list(map(to_png, request.images))))
            except OSError as error:
                if not is_full(error):
                    raise
                message = "the server's disk is full; delete some videos, or try again later"
                raise RequestError(message, code="storage_full", status=507) from None
        self._jobs[identity] = job
        return job

    @property
    def _open_index(self) -> JobIndex:
        if self._index is None:
            raise RuntimeError("the job store is not open")
        return self._index

    def get(self, identity: str) -> Job | None:
        """Return the job, or None when there is none that is listed (or none any more: see `gone`)."""
        job = self._jobs.get(identity)
        return job if job is not None and job.listed else None

    def gone(self, identity: str) -> Gone | None:
        """Say why there is no such job any more; None for an id that never was."""
        tombstone = self._tombstones.get(identity)
        return cast(Gone, tombstone.reason) if tombstone else None

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
        return tombstone.serial if tombstone else None

    def start(self, job: Job) -> bool:
        """The job left the queue."""
        if not job.live or job.status is JobStatus.IN_PROGRESS:
            return False
        job.status = JobStatus.IN_PROGRESS
        self._save(job, final=False)
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
        if job.progress != before[1]:
            self._save(job, final=False)
        if (job.stage, job.progress) != before:
            self._notify(job)
        return True

    async def complete(self, job: Job, outcome: Outcome) -> bool:
        """The job's files are readable, and stay so.

        Raises:
            OSError: they could not be brought to the disk.
        """
        now = self._clock()
        over = dataclasses.replace(job, status=JobStatus.COMPLETED, progress=100, outcome=outcome)
        over.completed_at, over.expires_at = int(now), int(now + self._ttl)
        if job.live and job.kept:
            over.size_bytes = await asyncio.to_thread(self._media.settle, job.id)
            if job.live:
                await _written(self._open_index.change(record_of(over)))
        if not job.live:
            return False
        job.status, job.progress, job.outcome = over.status, over.progress, over.outcome
        job.completed_at, job.expires_at, job.size_bytes = over.completed_at, over.expires_at, over.size_bytes
        self._notify(job)
        return True

    def fail(self, job: Job, error: JobError) -> bool:
        """The job will not be finished; it stays readable, for the reason, as long as a clip would."""
        if not job.live:
            return False
        job.status, job.error, job.completed_at = JobStatus.FAILED, error, int(self._clock())
        self._save(job)
        self._notify(job)
        return True

    def delete(self, identity: str) -> Job | None:
        """Forget a job in whatever state; the caller sees to what runs and to the files. None when there is none."""
        return self._bury(identity, "deleted")

    def withdraw(self, job: Job) -> None:
        """Take back a job that was never really accepted; it leaves no trace."""
        del self._jobs[job.id]
        if job.kept:
            self._open_index.remove(job.id)

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
            stone = self._tombstones[identity] = Tombstone(identity, job.serial, reason)
            if job.kept:
                self._open_index.bury(stone)
        while len(self._tombstones) > MAX_TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]
        self._notify(job)
        return job

    def _save(self, job: Job, *, final: bool = True) -> None:
        if job.kept:
            self._open_index.change(record_of(job), final=final)

    async def saved(self) -> None:
        """Return when every change so far is on disk.

        Raises:
            OSError, sqlite3.Error: some cannot be written; they are tried again with the next change.
        """
        await _written(self._open_index.flush())

    async def erase(self, job: Job) -> None:
        """Remove the files of a job that is gone; a crash in between leaves it gone.

        Raises:
            OSError, sqlite3.Error: as for `saved`.
        """
        if job.kept:
            with contextlib.suppress(OSError, sqlite3.Error):  # a full disk has room once the files are gone
                await self.saved()
        await asyncio.to_thread(self.discard_files, job)
        if job.kept:
            await self.saved()

    @staticmethod
    def _notify(job: Job) -> None:
        job.changed.set()
        job.changed = asyncio.Event()

    def discard_files(self, job: Job) -> None:
        """Remove a job's files, if it has any. Blocking; from any thread."""
        self._media.discard(job.id)

    def close(self) -> None:
        """Write what is left, and leave the folder, or remove it if it is temporary. Blocking; safe to call again."""
        if self._index is not None:
            self._index.close()
        self._media.close()


async def _written(change: Future[None]) -> None:
    # Shielded: a change that is on its way is not taken back, whoever waits for it.
    await asyncio.shield(asyncio.wrap_future(change))


def _place(stage: Stage) -> int:
    return list(STAGE_WEIGHTS).index(stage)
