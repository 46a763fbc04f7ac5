# SPDX-License-Identifier: Apache-2.0
"""One job: where it stands, what came of it, and how it goes over the wire."""

from __future__ import annotations

import asyncio
import dataclasses
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from ..pipelines.request import GenerationRequest, Medium, Stage
from .media import REFERENCE, Variant
from .pictures import Encoding

Gone = Literal["deleted", "expired"]


class JobStatus(StrEnum):
    """A job's states, in OpenAI's words."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, slots=True)
class JobError:
    """Why a job failed; ``status`` is the HTTP status for a client that waits for it."""

    code: str
    message: str
    status: int = 500


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a finished job.

    Attributes:
        stage_durations: Seconds per stage.
        inference_s: Seconds in the engine.
        peak_memory_mb: MiB per rank.
        vae: The VAE's decisions.
        vae_use: What the VAE cost each rank: the fields of `VaeUse`.
        traces: Names of the ranks' traces.
        pictures: The files of an image model, one after the other; those of a clip are in the job's folder.
    """

    stage_durations: dict[str, float]
    inference_s: float
    peak_memory_mb: tuple[float, ...]
    vae: tuple[dict[str, Any], ...]
    vae_use: tuple[dict[str, Any], ...] = ()
    traces: tuple[str, ...] = ()
    pictures: tuple[bytes, ...] = ()


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One clip, or the images of one request, from acceptance on. Only `JobStore` changes it, only on the event loop.

    Attributes:
        id: Unguessable.
        serial: Place in the order of creation.
        model: The name under which it was asked for.
        pipeline: The class that is to run it.
        request: What is made, every value filled in, without its reference images and mask.
        seconds: The clip's length as OpenAI's string.
        encoding: How images are written; None of a clip.
        folder: Where a clip's files are once it is completed.
        kept: Whether it is in the index; not where a client waits on its connection for what is made.
        progress: 0 to 100; never falls.
        stage: What it does now, None before it runs.
        size_bytes: What its files take once it is completed.
        gone: Set once it is deleted or expired.
        changed: Set at the next change; take it before looking at the job, so that no change is missed.
    """

    id: str
    serial: int
    model: str
    request: GenerationRequest
    folder: Path
    created_at: int
    pipeline: str = ""
    kept: bool = False
    seconds: str = ""
    encoding: Encoding | None = None
    remixed_from: str | None = None
    status: JobStatus = JobStatus.QUEUED
    progress: int = 0
    stage: Stage | None = None
    completed_at: int | None = None
    expires_at: int | None = None
    error: JobError | None = None
    outcome: Outcome | None = None
    size_bytes: int = 0
    gone: Gone | None = None
    changed: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    @property
    def live(self) -> bool:
        """Whether it may still come to something: waiting or running, and not deleted."""
        return self.gone is None and self.status in (JobStatus.QUEUED, JobStatus.IN_PROGRESS)

    @property
    def listed(self) -> bool:
        """Whether clients can ask for it later: a clip, and not images, which are the answer to their request."""
        return self.request.medium is Medium.VIDEO

    def path(self, variant: Variant) -> Path:
        """Where the file of ``variant`` is once the job is completed."""
        return self.folder / variant.filename

    @property
    def reference(self) -> Path:
        """Where its reference image is once it is completed, if it had one."""
        return self.folder / REFERENCE

    def to_json(self) -> dict[str, Any]:
        """Return the job of a clip as it goes over the wire; every field is always there."""
        outcome = self.outcome
        return {
            "id": self.id,
            "object": "video",
            "model": self.model,
            "prompt": self.request.prompt,
            "status": self.status.value,
            "progress": self.progress,
            "created_at": self.created_at,
            "completed_at": self.completed_at,
            "expires_at": self.expires_at,
            "seconds": self.seconds,
            "size": f"{self.request.width}x{self.request.height}",
            "error": {"code": self.error.code, "message": self.error.message} if self.error else None,
            "remixed_from_video_id": self.remixed_from,
            "fps": self.request.fps,
            "num_frames": self.request.num_frames,
            "seed": self.request.seed,
            "stage_durations": outcome.stage_durations if outcome else None,
            "peak_memory_mb": list(outcome.peak_memory_mb) if outcome else None,
            "vae": list(outcome.vae) if outcome else None,
            "vae_use": list(outcome.vae_use) if outcome else None,
            "traces": list(outcome.traces) if outcome else None,
        }
