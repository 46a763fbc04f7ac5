# SPDX-License-Identifier: Apache-2.0
"""Start, reach and end the rank processes of one engine on this machine. Imports no torch."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

from .. import envs
from ..config import EngineConfig
from .messages import FromRank, Setup, Stop, ToRank

logger = logging.getLogger(__name__)


class RankStalled(Exception):
    """A rank stopped in the middle of a message."""

    def __init__(self, rank: int):
        super().__init__(f"rank {rank} stopped in the middle of a message")
        self.rank = rank


class WorkerGroup:
    """One process per rank, each with a private pipe that only it inherits. Nothing of it outlives `close`.

    Args:
        config: What the ranks are to load.
    """

    def __init__(self, config: EngineConfig):
        self._config = config
        self.size = config.parallel.world_size
        self._folder = Path(tempfile.mkdtemp(prefix="vllm-omni-vae-"))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []

    def start(self) -> None:
        """Start every rank and send it its setup; they then load by themselves."""
        environment = envs.worker_environment(threads=max(1, len(os.sched_getaffinity(0)) // self.size))
        for rank in range(self.size):
            ours, theirs = multiprocessing.Pipe()
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "vllm_omni_vae.worker", str(theirs.fileno())],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            _bound_waits(ours, self._config.worker_timeout)
            self._processes.append(process)
            self._pipes.append(ours)
            self.send(rank, Setup(self._config, rank, self.size, f"file://{self._folder / 'rendezvous'}"))

    @property
    def pids(self) -> list[int]:
        """Process id of every rank."""
        return [process.pid for process in self._processes]

    def send(self, rank: int, message: ToRank) -> None:
        """Send to one rank; a rank that is gone or does not take it is found out by `receive` or by its silence."""
        self._send_bytes(rank, self.packed(message))

    def send_all(self, message: ToRank) -> None:
        """Send to every rank in order."""
        self.send_packed(self.packed(message))

    @staticmethod
    def packed(message: ToRank) -> bytes:
        """``message`` as it travels.

        Raises:
            Exception: it holds something that cannot travel.
        """
        return bytes(ForkingPickler.dumps(message))

    def send_packed(self, data: bytes) -> None:
        """Send what `packed` made to every rank in order."""
        for rank in range(self.size):
            self._send_bytes(rank, data)

    def _send_bytes(self, rank: int, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self._pipes[rank].send_bytes(data)

    def receive(self, also: socket.socket, timeout: float | None) -> list[tuple[int, FromRank | None]]:
        """Wait until ranks have said something, ``also`` is readable, or ``timeout`` seconds are over.

        Returns:
            (rank, message) for each message; None instead of a message when the rank's process is gone.

        Raises:
            RankStalled: a message began and did not go on for ``worker_timeout`` seconds.
        """
        messages: list[tuple[int, FromRank | None]] = []
        for ready in wait([*self._pipes, also], timeout):
            if ready is also:
                continue
            rank = self._pipes.index(ready)  # type: ignore[arg-type]
            try:
                messages.append((rank, self._pipes[rank].recv()))
            except BlockingIOError:
                raise RankStalled(rank) from None
            except (EOFError, OSError):
                messages.append((rank, None))
        return messages

    def close(self, grace: float = 0.0) -> None:
        """End every rank: ask for it and wait ``grace`` seconds, then kill. Idempotent."""
        if grace and self._pipes:
            self.send_all(Stop())
            self._wait(grace)
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for pipe in self._pipes:
            pipe.close()
        self._pipes = []
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


def _bound_waits(pipe: Connection, seconds: float) -> None:
    """Let no read or write in the middle of a message last longer than ``seconds``: a stopped rank blocks nobody."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(pipe.fileno())) as ours:
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, limit)
