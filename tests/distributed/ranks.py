# SPDX-License-Identifier: Apache-2.0
"""Real processes in a gloo group that run one case after another.

A case is a module-level function ``case(rank, size, **arguments)``; what it returns on each rank travels back as JSON.
Starting a process costs seconds of imports, so one server process imports everything once and forks the ranks, and a
`World` is kept for many cases. A case that fails or hangs ends its world; the next case gets a new one.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOADED = (
    "diffusers.models.autoencoders.autoencoder_kl_wan",
    "diffusers.video_processor",
    "pytest",
    "vllm_omni_vae.autoencoders",
    "vllm_omni_vae.tiny.common",
)
START_SECONDS = 90.0
CASE_SECONDS = 60.0
# Every gloo group has threads that wake up a hundred times a second, also when a case is done with it.
MOST_CASES = 25
_READY = "ready"
_QUIT = None


class RankFailure(AssertionError):
    """A rank raised, died or did not answer in time; carries what every rank said."""


class World:
    """``size`` processes in one gloo group, each waiting for its next case.

    Args:
        size: Ranks.
        folder: Where the processes find each other; a fresh file in it is their rendezvous.
    """

    def __init__(self, size: int, folder: Path):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        self.size = size
        self.alive = True
        self.cases = 0
        self._connections: list[Connection] = []
        self._processes = []
        rendezvous = folder / uuid.uuid4().hex
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(rank, size, str(rendezvous), theirs), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        deadline = time.monotonic() + START_SECONDS
        for rank, connection in enumerate(self._connections):
            if not connection.poll(max(0.0, deadline - time.monotonic())) or connection.recv() != _READY:
                self.close(kill=True)
                raise RankFailure(f"rank {rank} of {size} did not start within {START_SECONDS:g} s")

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return [process.pid for process in self._processes]

    def run(
        self, case: Callable[..., Any], *, dying: Iterable[int] = (), seconds: float = CASE_SECONDS, **arguments: Any
    ) -> list[Any]:
        """Run ``case`` on every rank at once and return the results in rank order; None for a rank in ``dying``.

        With any such rank the world is over: the others end when they have answered, as a program does that has failed.

        Raises:
            RankFailure: a rank raised, a rank that is not in ``dying`` died, or ``seconds`` passed. The world is over.
        """
        dying = set(dying)
        self.cases += 1
        answers: dict[int, tuple[bool, str]] = {}
        with self._over_unless_all_is_well() as well:
            for connection in self._connections:
                connection.send((case, arguments, bool(dying)))
            deadline = time.monotonic() + seconds
            while missing := {self._connections[r]: r for r in range(self.size) if r not in answers}:
                ready = wait(list(missing), timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    break
                for connection in ready:
                    rank = missing[connection]
                    try:
                        answers[rank] = connection.recv()
                    except (EOFError, ConnectionResetError):
                        answers[rank] = (True, "null") if rank in dying else (False, "died")
            for rank in range(self.size):
                answers.setdefault(rank, (False, f"no answer within {seconds:g} s"))
            if not all(fine for fine, _ in answers.values()):
                raise RankFailure("\n".join(f"rank {r}: {answers[r][1]}" for r in range(self.size)))
            if not dying:
                well.append(True)
        return [json.loads(answers[rank][1]) for rank in range(self.size)]

    @contextlib.contextmanager
    def _over_unless_all_is_well(self) -> Any:
        well: list[bool] = []
        try:
            yield well
        finally:
            if not well:
                self.close(kill=True)

    def close(self, *, kill: bool = False) -> None:
        """End every process and wait until it is gone."""
        self.alive = False
        for connection, process in zip(self._connections, self._processes, strict=True):
            if kill:
                process.kill()
            else:
                with contextlib.suppress(OSError):
                    connection.send(_QUIT)
        for connection, process in zip(self._connections, self._processes, strict=True):
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()
            connection.close()


class Worlds:
    """One world of each size, started on first use and again after a failure or `MOST_CASES`."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._worlds: dict[int, World] = {}

    def __getitem__(self, size: int) -> World:
        world = self._worlds.get(size)
        if world is not None and world.alive and world.cases >= MOST_CASES:
            world.close()
        if world is None or not world.alive:
            world = self._worlds[size] = World(size, self._folder)
        return world

    def fresh(self, size: int) -> World:
        """A world in which nothing has happened yet; it replaces the one there is."""
        if size in self._worlds and self._worlds[size].alive:
            self._worlds[size].close()
        return self[size]

    def close(self) -> None:
        """End every world."""
        for world in self._worlds.values():
            if world.alive:
                world.close()


def _rank(rank: int, size: int, rendezvous: str, connection: Connection) -> None:
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=CASE_SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=timeout)
    connection.send(_READY)
    while True:
        try:
            message = connection.recv()
        except EOFError:  # the test process is gone
            os._exit(1)
        if message is _QUIT:
            break
        case, arguments, last = message
        try:
            with torch.no_grad():
                answer = True, json.dumps(case(rank, size, **arguments))
        except BaseException:
            answer = False, traceback.format_exc()
        connection.send(answer)
        if last:
            os._exit(0)
    dist.destroy_process_group()
