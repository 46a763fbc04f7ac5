# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics: their declarations, and the values of one application."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter as Tally
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder

from .. import __version__
from .job import Job, JobStatus, Outcome
from .lifecycle import EngineLifecycle

M = TypeVar("M", Counter, Gauge, Histogram)

SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
MAX_REASONS = 32
OTHER = "other"
CANCELLED = "cancelled"


@dataclasses.dataclass(frozen=True, slots=True)
class Declared(Generic[M]):
    """One metric, the same in every application.

    Attributes:
        kind: What it is to Prometheus.
        name: As it is scraped.
        meaning: What its value is.
        labels: What it is told by.
    """

    kind: type[M]
    name: str
    meaning: str
    labels: tuple[str, ...] = ()

    def on(self, registry: CollectorRegistry, **settings: Any) -> M:
        """Return a new one, in ``registry``."""
        return self.kind(self.name, self.meaning, self.labels, registry=registry, **settings)


BUILD = Declared(
    Gauge,
    "vllm_omni_vae_build_info",
    "Always 1; the labels say what runs.",
    ("version", "pipeline_class", "vae_parallel_mode", "vae_ranks", "ranks"),
)
HEALTHY = Declared(Gauge, "vllm_omni_vae_healthy", "1 where /health answers 200, else 0.")
JOBS = Declared(Gauge, "vllm_omni_vae_jobs", "Jobs that wait (queued) or run (in_progress) now.", ("state",))
QUEUE_LIMIT = Declared(Gauge, "vllm_omni_vae_queue_limit_jobs", "Jobs that may wait: --max-queued-jobs.")
FINISHED = Declared(
    Counter,
    "vllm_omni_vae_jobs_finished_total",
    "Jobs that came to an end: completed, failed with the error code of the job, or cancelled.",
    ("state", "code"),
)
STAGE_SECONDS = Declared(
    Histogram, "vllm_omni_vae_stage_seconds", "Seconds that a completed job spent in a stage.", ("stage",)
)
VAE_SECONDS = Declared(
    Counter,
    "vllm_omni_vae_vae_seconds_total",
    "Seconds that a rank spent in the VAE's encode or decode, its waiting for other ranks included.",
    ("operation", "strategy", "rank"),
)
VAE_TILES = Declared(
    Counter, "vllm_omni_vae_vae_tiles_total", "Tiles that a rank encoded or decoded.", ("operation", "rank")
)
VAE_SENT = Declared(
    Counter,
    "vllm_omni_vae_vae_sent_bytes_total",
    "Bytes that a rank sent for the VAE: messages, what it broadcast, counted once, and what it brought to sums.",
    ("operation", "rank"),
)
FALLBACKS = Declared(
    Counter,
    "vllm_omni_vae_vae_fallbacks_total",
    "Times that a job could not have the forced mode, or had no memory for it, by the reason with N for every number.",
    ("operation", "reason"),
)
PEAK_MEMORY = Declared(
    Gauge,
    "vllm_omni_vae_peak_memory_bytes",
    "Peak memory of a rank of its replica in the job that was completed last: of the accelerator, or of the process on "
    "a CPU.",
    ("rank",),
)
REPLICAS = Declared(
    Gauge,
    "vllm_omni_vae_replicas",
    "Replicas that take jobs (running), and that do not: they load, start again or have given up (down).",
    ("state",),
)
RESTARTS = Declared(
    Counter,
    "vllm_omni_vae_worker_restarts_total",
    "Times that all ranks of a replica were started again, by the code of the failure.",
    ("code",),
)
REQUESTS = Declared(
    Counter, "vllm_omni_vae_http_requests_total", "Answers to HTTP requests.", ("route", "method", "status")
)
METRICS: tuple[Declared[Any], ...] = (
    BUILD,
    HEALTHY,
    JOBS,
    QUEUE_LIMIT,
    FINISHED,
    STAGE_SECONDS,
    VAE_SECONDS,
    VAE_TILES,
    VAE_SENT,
    FALLBACKS,
    PEAK_MEMORY,
    REPLICAS,
    RESTARTS,
    REQUESTS,
)
"""Everything that is scraped, besides the ``process_*`` metrics of the server process."""


class Metrics:
    """The values of one application, from its start on. Not thread-safe: called on the event loop only.

    Args:
        lifecycle: The engine and how it is.
        max_queued_jobs: Jobs that may wait.
    """

    def __init__(self, lifecycle: EngineLifecycle, max_queued_jobs: int) -> None:
        registry = self._registry = CollectorRegistry()
        self._lifecycle = lifecycle
        self._build, self._healthy, self._jobs = BUILD.on(registry), HEALTHY.on(registry), JOBS.on(registry)
        self._finished, self._restarts = FINISHED.on(registry), RESTARTS.on(registry)
        self._stage_seconds = STAGE_SECONDS.on(registry, buckets=SECONDS)
        self._vae_seconds, self._tiles, self._sent = (one.on(registry) for one in (VAE_SECONDS, VAE_TILES, VAE_SENT))
        self._fallbacks, self._peak_memory = FALLBACKS.on(registry), PEAK_MEMORY.on(registry)
        self._requests, self._replicas = REQUESTS.on(registry), REPLICAS.on(registry)
        self._seen_restarts: dict[str, int] = {}
        self._reasons: set[str] = set()
        ProcessCollector(registry=registry)
        QUEUE_LIMIT.on(registry).set(max_queued_jobs)
        for state in (JobStatus.COMPLETED, CANCELLED):
            self._finished.labels(state, "")

    def job_ended(self, job: Job) -> None:
        """Count a job that has come to an end, whichever."""
        if job.status is JobStatus.COMPLETED and job.outcome is not None:
            self._finished.labels(JobStatus.COMPLETED, "").inc()
            self._took(job.outcome)
        elif job.error is not None and job.error.code != CANCELLED:
            self._finished.labels(JobStatus.FAILED, job.error.code).inc()
        else:
            self._finished.labels(CANCELLED, "").inc()

    def _took(self, outcome: Outcome) -> None:
        for stage, seconds in outcome.stage_durations.items():
            self._stage_seconds.labels(stage).observe(seconds)
        for use in outcome.vae_use:
            operation, rank = use["operation"], use["rank"]
            self._vae_seconds.labels(operation, use["strategy"], rank).inc(use["seconds"])
            self._tiles.labels(operation, rank).inc(use["tiles"])
            self._sent.labels(operation, rank).inc(use["sent_bytes"])
        for decision in outcome.vae:
            if decision.get("fallback"):
                self._fallbacks.labels(decision["operation"], self._few(decision["reason"])).inc()
        for rank, megabytes in enumerate(outcome.peak_memory_mb):
            self._peak_memory.labels(rank).set(megabytes * 2**20)

    def _few(self, reason: str) -> str:
        """``reason`` without its numbers, and no more of them than `MAX_REASONS` in all."""
        reason = re.sub(r"\d+(\.\d+)?", "N", reason)
        if len(self._reasons) < MAX_REASONS:
            self._reasons.add(reason)
        return reason if reason in self._reasons else OTHER

    def answered(self, route: str, method: str, status: int) -> None:
        """Count an answer."""
        self._requests.labels(route, method if method in METHODS else OTHER, status).inc()

    def render(self, live: Iterable[Job], accept: str) -> tuple[bytes, str]:
        """Return what is scraped, and its content type.

        Args:
            live: The jobs that wait or run.
            accept: What the scraper asks for: OpenMetrics, or else Prometheus' text.
        """
        states = Tally(job.status for job in live)
        for state in (JobStatus.QUEUED, JobStatus.IN_PROGRESS):
            self._jobs.labels(state).set(states[state])
        engine = self._lifecycle.engine
        parallel = engine.config.parallel
        what = (__version__, engine.card.pipeline_class, parallel.vae_parallel_mode.value)
        self._build.labels(*what, parallel.vae_ranks, parallel.world_size).set(1)
        self._healthy.set(self._lifecycle.health().healthy)
        running = sum(state.healthy for state in engine.replicas)
        self._replicas.labels("running").set(running)
        self._replicas.labels("down").set(len(engine.replicas) - running)
        for code, count in engine.restarts.items():
            self._restarts.labels(code).inc(count - self._seen_restarts.get(code, 0))
            self._seen_restarts[code] = count
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type
