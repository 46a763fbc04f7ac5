# SPDX-License-Identifier: Apache-2.0
"""What a server finds of the one before it: which jobs go on, which have failed, which files belong to none."""

from __future__ import annotations

import dataclasses
import itertools

from ..errors import ConfigurationError
from ..pipelines.request import Frames
from .index import JobIndex, Tombstone
from .job import Job, JobError, JobStatus
from .png import from_png
from .saved import job_of, record_of
from .storage import MediaFolder

_RESTARTED = JobError("server_restarted", "the server ended while the job ran; send the request again", 503)
_MISSING = JobError("files_missing", "the video's files are not where the server had put them", 500)


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """Jobs and tombstones of earlier servers.

    Attributes:
        jobs: In the order of creation; none of them runs.
        waiting: Those that are queued, with their reference images.
        tombstones: What is gone, the oldest first.
        serial: The last place in the order of creation that was given away.
    """

    jobs: list[Job]
    waiting: list[tuple[Job, tuple[Frames, ...]]]
    tombstones: list[Tombstone]
    serial: int


def restore(index: JobIndex, media: MediaFolder, *, ttl: float, now: int) -> Found:
    """Bring index and files to where a server can begin, and return what there is. Blocking.

    A job that ran has failed, and so has a completed one without its files; files of any other job are removed.

    Args:
        index: Just opened.
        media: Claimed by this process.
        ttl: Seconds that a finished clip is kept.
        now: Seconds since the epoch.

    Raises:
        ConfigurationError: the index has a row that this server cannot read.
    """
    try:
        jobs = [job_of(record, media.path, ttl) for record in index.records()]
        waiting = [(job, tuple(map(from_png, index.images(job.id)))) for job in jobs if job.status is JobStatus.QUEUED]
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise ConfigurationError(
            f"cannot read a job in {media.index}: {type(error).__name__}: {error}; bring back a copy of it, move the "
            "whole folder away to begin anew, or give another --media-storage-path"
        ) from None
    tombstones = index.tombstones()
    for job in jobs:
        if job.status is JobStatus.IN_PROGRESS:
            job.status, job.error, job.completed_at = JobStatus.FAILED, _RESTARTED, now
            index.change(record_of(job))
        elif job.status is JobStatus.COMPLETED and not media.holds(job.id):
            job.status, job.error, job.expires_at = JobStatus.FAILED, _MISSING, None
            index.change(record_of(job))
        elif job.status is JobStatus.COMPLETED:
            job.size_bytes = media.size(job.id)
    media.clean({job.id for job in jobs if job.status is JobStatus.COMPLETED})
    serials = itertools.chain((job.serial for job in jobs), (stone.serial for stone in tombstones))
    return Found(jobs, waiting, tombstones, max(serials, default=0))
