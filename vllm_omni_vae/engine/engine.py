# SPDX-License-Identifier: Apache-2.0
"""Owns the model's replicas: queues jobs and hands each to a replica that is free."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any

import numpy as np

from .. import checkpoint
from ..config import EngineConfig
from ..config.engine import ExecutorBackend
from ..errors import Cancelled, ConfigurationError, EngineError, RequestError
from ..pipelines.processors import missing_torchvision
from ..pipelines.profile import read_json
from ..pipelines.request import RANGES, ComponentReport, GenerationRequest
from ..worker.backends import worker_backend
from .api import Health, JobHandle, Listener
from .job import EngineJob
from .queue import JobQueue
from .replica import Replica

logger = logging.getLogger(__name__)


class Engine:
    """Makes clips on ranks, one at a time on each replica, begun in the order they were submitted. Thread-safe.

    A job that fails on all ranks alike leaves them running. A rank that dies, stalls, or fails alone fails the job that
    runs with it, with its reason; the ranks of that replica then restart by themselves and the queue goes on. After
    three restarts without a finished job between them the replica gives up. The engine gives up with the last one, or
    with one that does not load at the start, and says so in `health`.

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
        if config.torch_profiler_dir is not None:
            _make_folder(config.torch_profiler_dir)
        self._defaults: dict[str, Any] = dict(config.default_sampling_params)
        for name in ("boundary_ratio", "flow_shift"):
            if getattr(config, name) is not None:
                self._defaults[name] = getattr(config, name)
        self._check_defaults()
        self._failure: BaseException | None = None
        self._ended: Health | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._first: Future[None] = Future()
        self._queue = JobQueue()
        self._backend = worker_backend(config)
        self._replicas = tuple(
            Replica(number, config, self._backend, self._queue, self._closing, self._changed)
            for number in range(parallel.data_parallel_size)
        )

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
            seed = self._defaults.get("seed", 0)
            self.resolve(GenerationRequest(prompt="", medium=card.medium, images=pictures, seed=seed))
        except RequestError as error:
            raise ConfigurationError(f"default_sampling_params: {error}") from None

    def start(self) -> None:
        """Start the ranks and return when those of every replica have loaded.

        Raises:
            ConfigurationError: the ranks refused what was asked.
            EngineError: they could not be started or did not load in time.
        """
        for replica in self._replicas:
            replica.start()
        self._first.result()

    def resolve(self, request: GenerationRequest) -> GenerationRequest:
        """Fill in every value that ``request`` leaves open, its seed too, or refuse it.

        Raises:
            RequestError: the model cannot make it exactly.
        """
        if request.trace and self.config.torch_profiler_dir is None:
            raise RequestError(
                "trace was asked for, but this engine has no folder for traces; start it with --torch-profiler-dir, or "
                "leave trace out",
                param="trace",
                code="unsupported_parameter",
                status=400,
            )
        if request.seed is None:
            chosen = self._defaults.get("seed", self.config.seed)
            if chosen is None and self.config.distributed_executor_backend is ExecutorBackend.EXTERNAL_LAUNCHER:
                raise RequestError(
                    "no seed was given, and with external_launcher every rank would draw another; give one here or to "
                    "the engine",
                    param="seed",
                    status=400,
                )
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
        if not self._queue.put(job):
            raise EngineError(f"the engine takes no jobs: {self.health().reason}", code="engine_stopped")
        self._wake()
        return JobHandle(job_id, job.future, lambda: self._cancel(job))

    def health(self) -> Health:
        """Whether jobs are taken and finished, and if not why. Where some replicas do so, why not the others."""
        if self._ended is not None:
            return self._ended
        states = self.replicas
        if len(states) == 1:
            return states[0]
        reasons = [f"replica {number}: {state.reason}" for number, state in enumerate(states) if not state.healthy]
        return Health(len(reasons) < len(states), "; ".join(reasons))

    @property
    def replicas(self) -> tuple[Health, ...]:
        """How each replica is."""
        return tuple(replica.health for replica in self._replicas)

    @property
    def report(self) -> tuple[ComponentReport, ...]:
        """What happened to each autoencoder; the same in every replica."""
        ready = self._replicas[0].ready
        return ready.components if ready else ()

    @property
    def device(self) -> str:
        """Where the first replica's rank 0 holds its modules; empty before it has loaded."""
        ready = self._replicas[0].ready
        return ready.device if ready else ""

    @property
    def dtype(self) -> str:
        """Type of the denoiser; empty before it has loaded."""
        ready = self._replicas[0].ready
        return ready.dtype if ready else ""

    @property
    def worker_pids(self) -> list[int]:
        """Process id of every rank, replica after replica; empty while there is none."""
        return [pid for replica in self._replicas for pid in replica.pids]

    @property
    def restarts(self) -> Mapping[str, int]:
        """How often all ranks of a replica were started again, by the code under which the running job failed."""
        return dict(sum((replica.restarts for replica in self._replicas), Counter()))

    def wait(self) -> BaseException | None:
        """Block until the engine has ended; returns why it gave up, or None when it was closed."""
        for replica in self._replicas:
            replica.join()
        return self._failure

    def close(self) -> None:
        """Fail what waits and runs, end the ranks and wait for them. Idempotent; no process stays."""
        self._end_with(EngineError("the engine was stopped", code="engine_stopped"), Health(False, "stopped"))
        for replica in self._replicas:
            replica.join()
            replica.close()
        self._backend.close()

    def _wake(self) -> None:
        for replica in self._replicas:
            replica.wake()

    def _cancel(self, job: EngineJob) -> None:
        if self._queue.cancel(job):
            job.fail(Cancelled("the job was cancelled before it ran"))
        else:
            self._wake()

    def _changed(self, replica: Replica) -> None:
        """A replica has loaded for the first time, or has given up. On its thread."""
        if replica.failure is None:
            if all(one.ready for one in self._replicas):
                self._resolve_start(None)
            return
        failure = replica.failure
        with self._lock:
            left = [one.number for one in self._replicas if one.failure is None]
            over = self._failure is None and (not left or not self._first.done())
            if over:
                self._failure = failure
        if over:
            self._end_with(failure, Health(False, str(failure)))
        elif left:
            logger.error("replica %d has given up; jobs run on %s: %s", replica.number, left, failure)

    def _end_with(self, error: BaseException, health: Health) -> None:
        """Take no more jobs and fail those that wait. A running job is failed by the thread that runs it."""
        with self._lock:
            self._ended = self._ended or health
        self._closing.set()
        self._resolve_start(error)
        for job in self._queue.close():
            job.fail(error)
        self._wake()

    def _resolve_start(self, error: BaseException | None) -> None:
        with contextlib.suppress(InvalidStateError):
            if error is None:
                self._first.set_result(None)
            else:
                self._first.set_exception(error)


def _make_folder(name: str) -> None:
    """Make sure that ranks of this machine can write traces.

    Raises:
        ConfigurationError: they could not.
    """
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigurationError(f"torch_profiler_dir {name} cannot be written to: {error}; give another one") from None
