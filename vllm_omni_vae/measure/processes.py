# SPDX-License-Identifier: Apache-2.0
"""Start the rank processes of one measurement, hear them out, and leave none behind. Imports no torch."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType

from .. import envs
from ..errors import EngineError
from .messages import Failed, FromRank, Job, Progress, RankSeen, Setup

_LAST_WORDS_S = 2.0
"""Seconds in which the other ranks may say why, once one has failed."""
_LEAVE_S = 10.0
_LOG_LINES = 20


def run_job(job: Job, on_progress: Callable[[Progress], None]) -> list[RankSeen]:
    """Run ``job`` on processes of its own and return what each rank saw, in rank order.

    When this returns or raises, also by Ctrl-C, every one of them is gone; they end with this process too.

    Args:
        job: What to measure.
        on_progress: Told what comes next.

    Raises:
        EngineError: a rank failed, died, or gave no sign for ``job.timeout`` seconds; with its reason and the end of
            what it logged.
    """
    with Ranks(job.ranks) as ranks:
        return ranks.run(job, on_progress)


class Ranks:
    """Rank processes, from entering to leaving the block; then none of them is left, whatever happened.

    Args:
        size: How many.
    """

    def __init__(self, size: int):
        self._size = size
        self._jobs = 0
        self._folder = Path(tempfile.mkdtemp(prefix="vllm-omni-vae-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Ranks:
        try:
            self._start()
        except BaseException:
            self._end(0.0)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(_LEAVE_S if error is None else 0.0)

    def _start(self) -> None:
        environment = envs.worker_environment(threads=max(1, len(os.sched_getaffinity(0)) // self._size))
        for rank in range(self._size):
            ours, theirs = multiprocessing.Pipe()
            self._pipes.append(ours)
            with theirs, self._log(rank).open("wb") as log:
                command = [sys.executable, "-P", "-m", "vllm_omni_vae.measure", str(theirs.fileno())]
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            self._processes.append(process)

    def run(self, job: Job, on_progress: Callable[[Progress], None]) -> list[RankSeen]:
        """As `run_job`, on these processes. After an error, also one of ``on_progress``, they take no more jobs.

        Args:
            job: For as many ranks as there are.
            on_progress: Told what comes next.
        """
        self._jobs += 1
        meeting = f"file://{self._folder / f'rendezvous{self._jobs}'}"
        for rank, pipe in enumerate(self._pipes):
            with contextlib.suppress(OSError):  # one that died already is found when it is listened to
                pipe.send(Setup(job, rank, meeting, os.getpid()))
        return self._hear_out(job, on_progress)

    def _hear_out(self, job: Job, on_progress: Callable[[Progress], None]) -> list[RankSeen]:
        """Listen until every rank has told what it saw."""
        seen: dict[int, RankSeen] = {}
        failed: dict[int, Failed | None] = {}
        until = time.monotonic() + job.timeout
        while silent := [rank for rank in range(self._size) if rank not in seen and rank not in failed]:
            heard = wait([self._pipes[rank] for rank in silent], max(0.0, until - time.monotonic()))
            if not heard and not failed:
                raise EngineError(f"ranks {silent} gave no sign for {job.timeout:g} s", code="worker_stalled")
            if not heard:
                break
            for pipe in heard:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                message = self._receive(rank)
                if isinstance(message, Progress):
                    on_progress(message)
                elif isinstance(message, RankSeen):
                    seen[rank] = message
                else:
                    failed[rank] = message
            until = time.monotonic() + (_LAST_WORDS_S if failed else job.timeout)
        if failed:
            raise self._error(failed)
        return [seen[rank] for rank in range(self._size)]

    def _receive(self, rank: int) -> FromRank | None:
        try:
            message: FromRank = self._pipes[rank].recv()
        except (EOFError, OSError):
            return None
        return message

    def _error(self, failed: dict[int, Failed | None]) -> EngineError:
        """What the rank that knows most says: one that died, else one that did not only lose another."""

        def place(rank: int) -> tuple[int, int]:
            said = failed[rank]
            return (0 if said is None else 2 if said.lost_peer else 1), rank

        rank = min(failed, key=place)
        said = failed[rank]
        how = self._how_it_ended(rank) if said is None else f"failed: {said.reason}"
        lines = self._log(rank).read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return EngineError("\n".join([f"rank {rank} {how}", *(f"  {line}" for line in lines)]))

    def _how_it_ended(self, rank: int) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[rank].wait(1.0)
        code = self._processes[rank].returncode
        if code is None:
            return "closed its connection"
        return f"died by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"

    def _end(self, grace: float) -> None:
        """Ranks that have told everything leave by themselves; what is there after ``grace`` seconds is killed."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + grace
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
