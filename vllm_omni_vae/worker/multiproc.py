# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes of this machine: start, reach and end them. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .. import envs
from ..config import EngineConfig
from .group import packed
from .messages import FromRank, Setup, Stop
from .pipes import RankPipes


class MultiprocBackend:
    """Groups of processes. Replicas take the machine's devices in their order.

    Args:
        config: What the ranks are to load.
    """

    max_restarts = 3

    def __init__(self, config: EngineConfig):
        self._config = config

    def group(self, replica: int) -> MultiprocGroup:
        """A group for this replica, not started yet."""
        return MultiprocGroup(self._config, replica)

    def close(self) -> None:
        """Nothing is shared."""


class MultiprocGroup:
    """One process per rank, each with a private pipe that only it inherits. Nothing of it outlives `close`.

    Args:
        config: What the ranks are to load.
        replica: Which of the replicas on this machine they are.
    """

    has_output = True

    def __init__(self, config: EngineConfig, replica: int = 0):
        self._config = config
        self._first_place = replica * config.parallel.world_size
        self.size = config.parallel.world_size
        self._folder = Path(tempfile.mkdtemp(prefix="vllm-omni-vae-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes = RankPipes(config.worker_timeout)

    def start(self) -> None:
        """Start every rank and send it its setup; they then load by themselves."""
        ranks = self.size * self._config.parallel.data_parallel_size
        environment = envs.worker_environment(threads=max(1, len(os.sched_getaffinity(0)) // ranks))
        for rank in range(self.size):
            with self._pipes.open() as theirs:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "vllm_omni_vae.worker", str(theirs.fileno())],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            self._processes.append(process)
            meeting = f"file://{self._folder / 'rendezvous'}"
            setup = Setup(self._config, rank, self.size, meeting, self._first_place + rank)
            self._pipes.send(rank, packed(setup))

    @property
    def pids(self) -> list[int]:
        """Process id of every rank."""
        return [process.pid for process in self._processes]

    def send_packed(self, data: bytes) -> None:
        """Send what `packed` made to every rank in order."""
        for rank in range(len(self._pipes)):
            self._pipes.send(rank, data)

    def receive(self, also: socket.socket, timeout: float | None) -> list[tuple[int, FromRank | None]]:
        """As `WorkerGroup.receive`."""
        return self._pipes.receive(also, timeout)

    def close(self, grace: float = 0.0) -> None:
        """End every rank: ask for it and wait ``grace`` seconds, then kill. Idempotent."""
        if grace and len(self._pipes):
            self.send_packed(packed(Stop()))
            self._wait(grace)
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._pipes.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def describe_exit(self, rank: int) -> str:
        """How the process of ``rank`` ended, in words."""
        process = self._processes[rank]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        code = process.returncode
        if code is None:
            how = "closed its connection"
        else:
            how = f"died by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"the worker of rank {rank} {how}"
