# SPDX-License-Identifier: Apache-2.0
"""Ranks as actors of a Ray cluster, on one machine or on several. Imports Ray when they start, and no torch."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import pickle
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from .. import envs
from ..config import EngineConfig
from ..errors import ConfigurationError
from .group import packed
from .messages import FromRank, Setup, Stop
from .ray_cluster import CLUSTER, require_ray
from .ray_rank import FROM_RANK, TO_RANK, Place, RankActor

logger = logging.getLogger(__name__)

_CAUSE = "The actor is dead because "
_END_SECONDS = 10.0


class RayBackend:
    """Groups of actors in the cluster of this process. Ray places replicas and ranks.

    Args:
        config: What the ranks are to load.

    Raises:
        ConfigurationError: Ray is not installed.
    """

    max_restarts = 3

    def __init__(self, config: EngineConfig):
        require_ray()
        self._config = config
        self._lock = threading.Lock()
        self._joined = False

    def group(self, replica: int) -> RayGroup:
        """A group, not started yet."""
        return RayGroup(self._config, self._join)

    def _join(self) -> None:
        with self._lock:
            if not self._joined:
                parallel = self._config.parallel
                CLUSTER.join(parallel.world_size * parallel.data_parallel_size)
                self._joined = True

    def close(self) -> None:
        """Leave the cluster; one that was started for this ends. Idempotent."""
        with self._lock:
            if self._joined:
                CLUSTER.leave()
                self._joined = False


class RayGroup:
    """One actor per rank in a placement group, a GPU each where the cluster has GPUs. Nothing outlives `close`.

    Args:
        config: What the ranks are to load.
        join: Connects this process to the cluster.
    """

    has_output = True

    def __init__(self, config: EngineConfig, join: Callable[[], None]):
        self._config = config
        self._join = join
        self.size = config.parallel.world_size
        self._folder = Path(tempfile.mkdtemp(prefix="vllm-omni-vae-"))
        self._ray: Any = None
        self._room: Any = None
        self._actors: list[Any] = []
        self._places: list[Place] = []
        self._threads: list[threading.Thread] = []
        self._said: SimpleQueue[tuple[int, bytes | None]] = SimpleQueue()
        self._exits: dict[int, str] = {}
        self._wake_out, self._wake_in = socket.socketpair()
        for end in (self._wake_out, self._wake_in):
            end.setblocking(False)

    def start(self) -> None:
        """Ask for the actors; they are placed, meet and load by themselves.

        Raises:
            ConfigurationError: there is no cluster where there should be one, or a new one has too few GPUs.
        """
        self._join()
        ray = self._ray = importlib.import_module("ray")
        util = importlib.import_module("ray.util.placement_group")
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        resource = "GPU" if ray.cluster_resources().get("GPU") else "CPU"
        self._check_room(resource, int(ray.cluster_resources().get(resource, 0)))
        self._room = util.placement_group([{resource: 1}] * self.size, strategy="PACK")
        actor = ray.remote(concurrency_groups={TO_RANK: 1, FROM_RANK: 1})(RankActor)
        for rank in range(self.size):
            where = strategies.PlacementGroupSchedulingStrategy(self._room, placement_group_bundle_index=rank)
            cpus, gpus = int(resource == "CPU"), int(resource == "GPU")
            self._actors.append(actor.options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=where).remote())
            self._begin_thread(self._listen, rank)
        self._begin_thread(self._introduce)

    def _check_room(self, resource: str, has: int) -> None:
        needed = self.size * self._config.parallel.data_parallel_size
        if has >= needed:
            return
        if CLUSTER.local:
            raise ConfigurationError(f"{needed} ranks need a {resource} each and this machine has {has}; ask for fewer")
        logger.warning("the Ray cluster has %d %ss for %d ranks; waiting for more", has, resource, needed)

    def _begin_thread(self, body: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=body, args=arguments, name="ray-rank", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _introduce(self) -> None:
        """Thread body: once all are placed, tell each who it is and where they meet."""
        try:
            places = self._ray.get([actor.place.remote() for actor in self._actors])
            self._places = places
            meeting = f"file://{self._folder / 'rendezvous'}" if CLUSTER.local else f"tcp://{places[0].address}"
            ranks = self.size * self._config.parallel.data_parallel_size
            threads = max(1, len(os.sched_getaffinity(0)) // ranks) if CLUSTER.local else 1
            settings = envs.actor_environment(threads, one_machine=CLUSTER.local)
            setups = [Setup(self._config, rank, self.size, meeting, rank) for rank in range(self.size)]
            log_level = envs.log_level()
            calls = zip(self._actors, setups, strict=True)
            self._ray.get([actor.begin.remote(setup, settings, log_level) for actor, setup in calls])
        except self._ray.exceptions.RayActorError:
            return  # `_listen` tells which
        except Exception as error:
            for rank in range(self.size):
                self._lose(rank, error)

    def _listen(self, rank: int) -> None:
        """Thread body: take what ``rank`` says until it is gone."""
        call = self._actors[rank].receive.options(concurrency_group=FROM_RANK)
        data: bytes | None = b""
        while data is not None:
            try:
                said = self._ray.get(call.remote())
            except Exception as error:
                self._lose(rank, error)
                return
            for data in said:
                self._said.put((rank, data))
            self._wake()

    def _lose(self, rank: int, error: Exception) -> None:
        self._exits.setdefault(rank, _cause(error))
        self._said.put((rank, None))
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_in.send(b"\0")

    @property
    def pids(self) -> list[int]:
        """Process id of every rank on its node; empty until all are placed."""
        return [place.pid for place in self._places]

    def send_packed(self, data: bytes) -> None:
        """Send what `packed` made to every rank in order."""
        for actor in self._actors:
            actor.send.options(concurrency_group=TO_RANK).remote(data)

    def receive(self, also: socket.socket, timeout: float | None) -> list[tuple[int, FromRank | None]]:
        """As `WorkerGroup.receive`."""
        wait([also, self._wake_out], timeout)
        with contextlib.suppress(BlockingIOError):
            self._wake_out.recv(4096)
        messages: list[tuple[int, FromRank | None]] = []
        while not self._said.empty():
            rank, data = self._said.get()
            messages.append((rank, None if data is None else pickle.loads(data)))
        return messages

    def describe_exit(self, rank: int) -> str:
        """What Ray knows of the end of ``rank``."""
        return f"the worker of rank {rank} died: {self._exits.get(rank, 'it left')}"

    def close(self, grace: float = 0.0) -> None:
        """End every rank: ask for it and wait ``grace`` seconds, then kill. Idempotent."""
        if grace and self._actors:
            self.send_packed(packed(Stop()))
            self._wait(grace)
        for actor in self._actors:
            with contextlib.suppress(Exception):  # the cluster may be gone, and everything with it
                self._ray.kill(actor)
        if self._room is not None:
            with contextlib.suppress(Exception):
                importlib.import_module("ray.util.placement_group").remove_placement_group(self._room)
        self._wait(_END_SECONDS)
        self._actors, self._places, self._threads, self._room = [], [], [], None
        for end in (self._wake_out, self._wake_in):
            end.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _cause(error: Exception) -> str:
    """Ray's reason in a few words: whether a process or its node died."""
    text = str(error)
    start = text.find(_CAUSE)
    return text.splitlines()[0] if start < 0 else text[start + len(_CAUSE) :].partition(".")[0]
