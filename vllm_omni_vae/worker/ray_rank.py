# SPDX-License-Identifier: Apache-2.0
"""One rank inside a Ray actor. Imports no torch before the rank begins."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import pickle
import socket
import threading
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any

from .. import envs
from .group import packed
from .messages import FromRank, Setup, ToRank

TO_RANK, FROM_RANK = "to_rank", "from_rank"
"""The actor's concurrency groups. Each has one thread, so that the messages of a direction keep their order."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where an actor is: its process, and an address of its node at which ranks can meet."""

    pid: int
    address: str


class RankActor:
    """Runs `RankWorker`. What it hears and says passes through methods that the engine's process calls."""

    def __init__(self) -> None:
        self._line = _Line()

    def place(self) -> Place:
        """Where this is, with a port that is free now."""
        node = importlib.import_module("ray.util").get_node_ip_address()
        family = socket.AF_INET6 if ":" in node else socket.AF_INET
        with socket.socket(family) as free:
            free.bind((node, 0))
            port = free.getsockname()[1]
        return Place(os.getpid(), f"[{node}]:{port}" if ":" in node else f"{node}:{port}")

    def begin(self, setup: Setup, settings: Mapping[str, str], log_level: str) -> None:
        """Start the rank on a thread, in an environment with ``settings``."""
        envs.settle(settings)
        threading.Thread(target=self._live, args=(setup, log_level), name="rank", daemon=True).start()

    def send(self, data: bytes) -> None:
        """Hand the rank a packed message."""
        self._line.inbox.put(data)

    def receive(self) -> list[bytes | None]:
        """Wait for the rank; return what it has said, packed, with None at the end when it has left."""
        said = [self._line.outbox.get()]
        while not self._line.outbox.empty():
            said.append(self._line.outbox.get())
        return said

    def _live(self, setup: Setup, log_level: str) -> None:
        try:
            from .log import RankLog, begin_log
            from .worker import RankWorker

            begin_log(log_level)
            log = RankLog(setup.rank)
            for handler in logging.getLogger().handlers[:1]:
                log.install(handler)
            RankWorker(self._line, setup, log).serve()
        finally:
            self._line.outbox.put(None)


class _Line:
    """The rank's end of a connection that is no pipe."""

    def __init__(self) -> None:
        self.inbox: SimpleQueue[bytes] = SimpleQueue()
        self.outbox: SimpleQueue[bytes | None] = SimpleQueue()

    def poll(self, timeout: float) -> bool:
        """Whether a message waits; never waits for one itself."""
        return not self.inbox.empty()

    def recv(self) -> Any:
        """The next message."""
        message: ToRank = pickle.loads(self.inbox.get())
        return message

    def send(self, message: FromRank) -> None:
        """Say something."""
        self.outbox.put(packed(message))
