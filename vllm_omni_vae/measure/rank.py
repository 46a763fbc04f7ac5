# SPDX-License-Identifier: Apache-2.0
"""What one rank of a measurement does."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from ..autoencoders import Operation
from ..autoencoders.dry_run import LiveBytes
from ..distributed import give_back
from ..worker.loader import rank_device
from ..worker.meeting import meet
from .arms import Arm, Kind
from .judge import Judge
from .messages import ArmSeen, Job, Progress, RankSeen, Setup, Work
from .subject import Subject, check_runs_as

_SPARE_S = 30.0
"""By so much ranks wait longer for each other than the command waits for them, so that it is the one who tells."""


def measure(setup: Setup, tell: Callable[[Progress], None]) -> RankSeen:
    """Collective over all ranks of the job. Run every arm of every operation, and return what this rank saw.

    A process measures one job after the other; nothing of one is left when the next begins.

    Args:
        setup: The job, and who this rank is.
        tell: Told of progress, on rank 0.
    """
    job = setup.job
    device = rank_device(setup.rank)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    patience = timedelta(seconds=job.timeout + _SPARE_S)
    backend = meet(setup.init_method, setup.rank, job.ranks, device, patience)
    steps = _Steps(job, tell if setup.rank == 0 else None)
    steps.begin("loading")
    subject = Subject(job, device)
    run = _Run(job, setup.rank, subject, steps)
    seen = {work.operation: run.measure(work) for work in job.works}
    weights, threads = subject.weight_bytes, torch.get_num_threads()
    run.end()
    del run, subject
    dist.destroy_process_group()
    give_back(device)
    return RankSeen(str(device), backend, threads, weights, seen)


class _Steps:
    """Tells what comes next, and how much of all that is."""

    def __init__(self, job: Job, tell: Callable[[Progress], None] | None):
        rounds = 1 + max(1, job.warmup) + job.repeats
        self._total = sum(rounds * len(work.arms) for work in job.works)
        self._done = -1
        self._tell = tell

    def begin(self, what: str) -> None:
        """The step before is over, ``what`` begins."""
        self._done += 1
        if self._tell:
            self._tell(Progress(max(0, self._done - 1), self._total, what))


class _Run:
    def __init__(self, job: Job, rank: int, subject: Subject, steps: _Steps):
        self._job = job
        self._rank = rank
        self._subject = subject
        self._steps = steps
        self._device = subject.device
        self._meeting = dist.new_group(backend="gloo", timeout=timedelta(seconds=job.timeout + _SPARE_S))

    def measure(self, work: Work) -> dict[str, ArmSeen]:
        """Collective. Compare once, measure memory once, then time in rounds that run every arm once."""
        operation, arms = Operation(work.operation), work.arms
        x = self._subject.input(operation, work.shape)
        seen = {arm.name: ArmSeen() for arm in arms}
        judge = Judge(self._subject, operation, x, self._job.exact) if self._rank == 0 else None
        for arm in arms:
            self._begin(arm, operation, "comparing")
            result = self._run_first(arm, operation, x, seen[arm.name])
            if judge is not None and arm.kind is not Kind.SILENT:
                for judged, comparison in judge.judge(arm, result).items():
                    seen[judged.name].comparison = comparison
            del result
        del judge
        for arm in arms:
            self._begin(arm, operation, "memory")
            self._measure_peak(arm, operation, x, seen[arm.name])
        for turn in range(1 - max(1, self._job.warmup), self._job.repeats):
            what = f"repeat {turn + 1} of {self._job.repeats}" if turn >= 0 else "warm-up"
            for arm in _rotated(arms, turn):
                self._begin(arm, operation, what)
                wall, cpu = self._time(arm, operation, x)
                if turn >= 0:
                    seen[arm.name].wall_s.append(wall)
                    seen[arm.name].cpu_s.append(cpu)
        return seen

    def end(self) -> None:
        """Collective. Nobody leaves while another may still be sent something."""
        dist.barrier(self._meeting)

    def _begin(self, arm: Arm, operation: Operation, what: str) -> None:
        """Collective. Every rank is here; one that has nothing to do in this arm sleeps in the next such call."""
        self._steps.begin(f"{operation}: {what}: {arm.name}")
        dist.barrier(self._meeting)

    def _runs(self, arm: Arm) -> bool:
        return self._rank == 0 or not arm.alone

    def _run_first(self, arm: Arm, operation: Operation, x: torch.Tensor, seen: ArmSeen) -> torch.Tensor:
        """Collective. The first run: what it decides, sends and gives."""
        if not self._runs(arm):
            return x
        before = self._subject.traffic(arm)
        result = self._subject.run(arm, operation, x)
        after = self._subject.traffic(arm)
        seen.messages = after.messages - before.messages
        seen.bytes = after.bytes - before.bytes
        seen.broadcast_bytes = after.broadcast_bytes - before.broadcast_bytes
        seen.reduced_bytes = after.reduced_bytes - before.reduced_bytes
        counted = {name: n - before.collectives.get(name, 0) for name, n in after.collectives.items()}
        seen.collectives = {name: n for name, n in counted.items() if n}
        if not arm.alone:
            decision = self._subject.decisions[-1]
            check_runs_as(arm, decision)
            seen.decision = decision.to_json()
        return result

    def _measure_peak(self, arm: Arm, operation: Operation, x: torch.Tensor, seen: ArmSeen) -> None:
        """Collective. Most bytes at one time, the input's included and the weights' not."""
        if not self._runs(arm):
            return
        seen.input_bytes = x.nbytes
        if self._device.type == "cpu":
            with self._subject.countable(), LiveBytes() as held:
                self._subject.run(arm, operation, x.clone())
            seen.peak_bytes = held.peak
            return
        memory = torch.accelerator.memory
        memory.reset_peak_memory_stats(self._device)
        before = memory.memory_allocated(self._device) - x.nbytes
        self._subject.run(arm, operation, x)
        seen.peak_bytes = memory.max_memory_allocated(self._device) - before

    def _time(self, arm: Arm, operation: Operation, x: torch.Tensor) -> tuple[float, float]:
        """Collective. Wall and CPU seconds of this rank."""
        if not self._runs(arm):
            return 0.0, 0.0
        self._synchronize()
        wall, cpu = time.perf_counter(), time.process_time()
        self._subject.run(arm, operation, x)
        self._synchronize()
        return time.perf_counter() - wall, time.process_time() - cpu

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def _rotated(arms: tuple[Arm, ...], turn: int) -> tuple[Arm, ...]:
    """Another order in each round, so that none of them always follows the same one."""
    start = turn % len(arms)
    return arms[start:] + arms[:start]
