# SPDX-License-Identifier: Apache-2.0
"""What the engine tells its callers while a job runs, and the handle they hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future

from ..pipelines.request import GenerationResult, Stage


@dataclasses.dataclass(frozen=True, slots=True)
class Started:
    """The job left the queue; the workers have it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """``done`` of ``total`` units of a stage: denoising steps, or tiles of all ranks."""

    stage: Stage
    done: int
    total: int


JobEvent = Started | Progress
Listener = Callable[[JobEvent], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Health:
    """Whether the engine takes and finishes jobs; ``reason`` says why not."""

    healthy: bool
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class JobHandle:
    """A submitted job.

    Attributes:
        id: The name it was submitted under.
        future: Resolves to the result, or raises `RequestError`, `Cancelled`, `RankError` or `EngineError`.
        cancel: Asks for the job to stop, wherever it is; the future then raises `Cancelled` (unless it was done).
    """

    id: str
    future: Future[GenerationResult]
    cancel: Callable[[], None]
