# SPDX-License-Identifier: Apache-2.0
"""One rank: loads its part of the model, then runs one job after another until told to stop."""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..distributed import Communicator, TorchCommunicator, give_back, is_out_of_memory
from ..errors import Cancelled, ConfigurationError, DisagreementError, RankError
from ..pipelines.request import GenerationResult, Stage
from . import loader, runner
from .log import RankLog
from .meeting import meet
from .messages import Cancel, Failure, Finished, FromRank, LoadFailed, Ready, Run, Setup, StageProgress, Stop, ToRank
from .rendezvous import LeaderRendezvous, dismiss, follow
from .trace import JobTrace
from .use import UseMeter

logger = logging.getLogger(__name__)

_AS_LONG_AS_IT_TAKES = timedelta(days=30)
"""Ranks wait for each other while one loads or denoises; the engine watches for silence and ends those that wait."""


class EngineConnection(Protocol):
    """As much of a `multiprocessing.connection.Connection` to the engine as a rank uses."""

    def poll(self, timeout: float) -> bool: ...

    def recv(self) -> Any: ...

    def send(self, message: Any, /) -> None: ...


_REMEDY = (
    "; it ran out of memory. Ask for a smaller size or fewer frames, or start the server with smaller tiles "
    "(--vae-tile-size), or with more VAE ranks in a spatial_shard mode"
)


class RankWorker:
    """The life of one rank.

    Args:
        connection: The way to the engine.
        setup: Who this rank is and what to load.
        log: Told which job runs.
    """

    def __init__(self, connection: EngineConnection, setup: Setup, log: RankLog):
        self._pipe = connection
        self._setup = setup
        self._log = log
        self._inbox: deque[ToRank] = deque()
        self._denoisers: Communicator | None = None
        self._control: Communicator | None = None

    def serve(self) -> None:
        """Load, report, and take jobs until `Stop` or until the engine is gone."""
        try:
            model = self._load()
        except Exception as error:
            refused = isinstance(error, ConfigurationError)
            logger.error("cannot load the model: %s", error, exc_info=not refused)
            self._send(LoadFailed(str(error) if refused else f"{type(error).__name__}: {error}", refused))
            return
        self._send(Ready(model.reports, str(model.device), model.dtype))
        while True:
            message = self._next()
            if isinstance(message, Stop):
                return
            if isinstance(message, Run):
                with self._log.job(message.job_id):
                    self._send(self._finish(model, message))

    def _load(self) -> loader.LoadedModel:
        setup = self._setup
        device = loader.rank_device(setup.place)
        if device.type != "cpu":
            torch.accelerator.set_device_index(device.index)
        if setup.world_size > 1:
            meet(setup.init_method, setup.rank, setup.world_size, device, _AS_LONG_AS_IT_TAKES)
        model = loader.load(setup.config, setup.rank, _AS_LONG_AS_IT_TAKES, place=setup.place)
        if setup.world_size > 1:
            self._join_groups(model)
        return model

    def _join_groups(self, model: loader.LoadedModel) -> None:
        """Collective over the world."""
        dit = self._setup.config.parallel.dit_world_size
        world, rank = self._setup.world_size, self._setup.rank
        denoisers = dist.new_group(list(range(dit)), _AS_LONG_AS_IT_TAKES, "gloo")
        if rank < dit and dit > 1:
            self._denoisers = TorchCommunicator(denoisers)
        led = [0, *range(dit, world)]
        control = dist.new_group(led, _AS_LONG_AS_IT_TAKES, "gloo")
        if rank in led and len(led) > 1:
            self._control = TorchCommunicator(control)
        for place, vae in enumerate(model.vaes.values()):
            state = getattr(vae, "parallel_state", None)
            if state is None:
                continue
            state.stoppable = True
            if rank < dit:
                state.alike = self._denoisers
                state.rendezvous = LeaderRendezvous(place, state.groups.domain, self._control, len(led) > 1)

    def _finish(self, model: loader.LoadedModel, run: Run) -> Finished:
        """Run one job to its end; whatever happens, this rank is ready for the next message afterwards."""
        failure: Failure | None = None
        message = ""
        result: GenerationResult | None = None
        meter = UseMeter(self._setup.rank)
        trace = self._trace(run)
        runner.reset_peak_memory(model.device)
        try:
            with contextlib.ExitStack() as recorded:
                if trace is not None:
                    recorded.enter_context(trace.recording(model.vaes.values(), model.denoisers))
                result = self._run(model, run, meter, trace)
        except Cancelled as error:
            failure, message = Failure.CANCELLED, str(error)
        except runner.InvalidOutput as error:
            failure, message = Failure.INVALID_OUTPUT, str(error)
        except (RankError, DisagreementError) as error:
            logger.error("job %s: %s", run.job_id, error, exc_info=error.__cause__)
            failure, message = Failure.RANK_FAILED, str(error)
            if is_out_of_memory(error):
                failure, message = Failure.OUT_OF_MEMORY, f"{message}{_REMEDY}"
        except Exception as error:
            logger.exception("job %s failed", run.job_id)
            failure, message = Failure.UNEXPECTED, f"{type(error).__name__}: {error}"
            if is_out_of_memory(error):
                failure, message = Failure.OUT_OF_MEMORY, f"rank {self._setup.rank} failed: {message}{_REMEDY}"
        if failure is not None:
            give_back(model.device)
        peak = runner.peak_memory_mb(model.device)
        logger.debug("the autoencoders took %s", list(meter.uses))
        written = "" if trace is None else trace.written
        return Finished(run.job_id, failure, message, result, peak, meter.uses, written)

    def _trace(self, run: Run) -> JobTrace | None:
        folder = self._setup.config.torch_profiler_dir
        return JobTrace(folder, run.job_id, self._setup.rank) if folder and run.request.trace else None

    def _run(
        self, model: loader.LoadedModel, run: Run, meter: UseMeter, trace: JobTrace | None
    ) -> GenerationResult | None:
        if model.pipeline is None:
            if self._control is not None:
                follow(model.vaes, self._control, model.device, lambda: self._cancelled(run.job_id), meter)
            return None
        try:
            return runner.run_job(
                model,
                run.request,
                self._denoisers,
                lambda: self._cancelled(run.job_id),
                lambda stage, done, total: self._progress(run.job_id, stage, done, total, trace),
                is_output=self._setup.rank == 0,
                meter=meter,
            )
        finally:
            if self._setup.rank == 0:
                dismiss(self._control)

    def _progress(self, job_id: str, stage: Stage, done: int, total: int, trace: JobTrace | None) -> None:
        if trace is not None:
            trace.end_step(stage)
        if self._setup.rank == 0:
            self._send(StageProgress(job_id, stage, done, total))

    def _cancelled(self, job_id: str) -> bool:
        while self._pipe.poll(0):
            self._inbox.append(self._pipe.recv())
        return any(isinstance(m, Stop) or (isinstance(m, Cancel) and m.job_id == job_id) for m in self._inbox)

    def _next(self) -> ToRank:
        return self._inbox.popleft() if self._inbox else self._pipe.recv()

    def _send(self, message: FromRank) -> None:
        self._pipe.send(message)


def run_rank(connection: Any) -> None:
    """Serve one rank over ``connection``; returns when the engine says so or is gone."""
    try:
        setup = connection.recv()
        log = RankLog(setup.rank)
        log.install(logging.getLogger().handlers[0])
        RankWorker(connection, setup, log).serve()
    except (EOFError, ConnectionError):
        logger.warning("the engine is gone; leaving")
    finally:
        connection.close()
        logging.shutdown()
        os._exit(0)
