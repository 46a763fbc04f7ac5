# SPDX-License-Identifier: Apache-2.0
"""One job as the engine holds it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from concurrent.futures import Future, InvalidStateError

import numpy as np

from ..pipelines.request import GenerationRequest, GenerationResult
from ..worker.messages import Finished
from .api import JobEvent, Listener

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True, eq=False)
class EngineJob:
    """A request on its way, and what every rank has reported of it.

    Attributes:
        id: The caller's name for it.
        request: Resolved.
        listener: Told of events.
        future: Its outcome.
        cancelled: Its owner wants it no more.
        told: The ranks have heard of that.
        reports: The last word of each rank that has left it.
        heard: When a rank last gave a sign of progress.
    """

    id: str
    request: GenerationRequest
    listener: Listener | None
    future: Future[GenerationResult] = dataclasses.field(default_factory=Future)
    cancelled: bool = False
    told: bool = False
    reports: dict[int, Finished] = dataclasses.field(default_factory=dict)
    heard: float = 0.0

    @property
    def failure(self) -> Finished | None:
        """The first report that the job failed."""
        return next((report for report in self.reports.values() if report.failure), None)

    def tell(self, event: JobEvent) -> None:
        """Tell the listener, if there is one; what it raises is logged."""
        if self.listener is None:
            return
        try:
            self.listener(event)
        except Exception:
            logger.exception("the listener of job %s failed", self.id)

    def fail(self, error: BaseException) -> None:
        """Give it its error, unless its owner has cancelled the future itself."""
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error)

    def complete(self, result: GenerationResult | None) -> None:
        """Give it its result, with what every rank has reported. None: it is elsewhere, and what it gets is empty."""
        result = result or self._nothing()
        reports = [self.reports[rank] for rank in sorted(self.reports)]
        peaks = tuple(round(report.peak_memory_mb, 1) for report in reports)
        uses = tuple(use for report in reports for use in report.vae_use)
        traces = tuple(report.trace for report in reports if report.trace)
        self.future.set_result(dataclasses.replace(result, peak_memory_mb=peaks, vae_use=uses, traces=traces))

    def _nothing(self) -> GenerationResult:
        request = self.request
        frames = np.zeros((0, request.height or 0, request.width or 0, 3), np.uint8)
        return GenerationResult(
            frames=frames, fps=request.fps, seed=request.seed or 0, stage_durations={}, decisions=(), peak_memory_mb=()
        )
