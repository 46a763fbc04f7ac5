# SPDX-License-Identifier: Apache-2.0
"""A job as the index keeps it, and back again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from ..pipelines.request import GenerationRequest, Medium
from .index import JobRecord
from .job import Job, JobError, JobStatus, Outcome

_PIXELS = frozenset({"images", "mask"})
# What clients can ask for of a clip's outcome.
_MADE = ("stage_durations", "inference_s", "peak_memory_mb", "vae", "vae_use", "traces")


def request_to_json(request: GenerationRequest) -> str:
    """Return every field but the pixels, which are kept as files."""
    names = [field.name for field in dataclasses.fields(request) if field.name not in _PIXELS]
    values = {name: getattr(request, name) for name in names}
    return json.dumps({**values, "extra_params": dict(request.extra_params)})


def request_from_json(text: str) -> GenerationRequest:
    """Return what `request_to_json` was given, without its pixels.

    Raises:
        ValueError, TypeError, KeyError: it was not.
    """
    values = json.loads(text)
    return GenerationRequest(**{**values, "medium": Medium(values["medium"])})


def record_of(job: Job) -> JobRecord:
    """Return where ``job`` stands now."""
    made = None if job.outcome is None else {name: getattr(job.outcome, name) for name in _MADE}
    return JobRecord(
        id=job.id,
        serial=job.serial,
        pipeline=job.pipeline,
        model=job.model,
        seconds=job.seconds,
        remixed_from=job.remixed_from,
        created_at=job.created_at,
        request=request_to_json(job.request),
        status=job.status.value,
        progress=job.progress,
        completed_at=job.completed_at,
        error=None if job.error is None else json.dumps(dataclasses.asdict(job.error)),
        outcome=None if made is None else json.dumps(made),
    )


def job_of(record: JobRecord, folder: Path, ttl: float) -> Job:
    """Return the job that ``record`` tells of.

    Args:
        record: As the index has it.
        folder: Where all clips are.
        ttl: Seconds that a finished clip is kept now, whatever it was when this one was made.

    Raises:
        ValueError, TypeError, KeyError: no `record_of` made it.
    """
    status = JobStatus(record.status)
    expires = status is JobStatus.COMPLETED and record.completed_at is not None
    return Job(
        id=record.id,
        serial=record.serial,
        pipeline=record.pipeline,
        model=record.model,
        request=request_from_json(record.request),
        seconds=record.seconds,
        folder=folder / record.id,
        created_at=record.created_at,
        remixed_from=record.remixed_from,
        status=status,
        progress=record.progress,
        completed_at=record.completed_at,
        expires_at=int((record.completed_at or 0) + ttl) if expires else None,
        error=None if record.error is None else JobError(**json.loads(record.error)),
        outcome=None if record.outcome is None else _outcome(json.loads(record.outcome)),
        kept=True,
    )


def _outcome(made: dict[str, Any]) -> Outcome:
    lists = {name: tuple(made.get(name, ())) for name in ("peak_memory_mb", "vae", "vae_use", "traces")}
    return Outcome(**{**made, **lists})
