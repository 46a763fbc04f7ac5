# SPDX-License-Identifier: Apache-2.0
"""What the engine needs of the ranks of one model, however they were started. Imports no torch."""

from __future__ import annotations

import socket
from multiprocessing.reduction import ForkingPickler
from typing import Protocol

from .messages import FromRank, ToRank


class RankStalled(Exception):
    """A rank stopped in the middle of a message."""

    def __init__(self, rank: int):
        super().__init__(f"rank {rank} stopped in the middle of a message")
        self.rank = rank


class WorkerGroup(Protocol):
    """The ranks that share one model. Nothing of it outlives `close`. One thread uses it."""

    @property
    def size(self) -> int:
        """Ranks that this group talks to."""
        ...

    @property
    def has_output(self) -> bool:
        """Whether its rank 0 is the one that has the result of a job."""
        ...

    @property
    def pids(self) -> list[int]:
        """Process id of every rank on its machine, as far as they are known."""
        ...

    def start(self) -> None:
        """Start every rank and have its setup sent; they then load by themselves.

        Raises:
            ConfigurationError: ranks can never be started here.
        """
        ...

    def send_packed(self, data: bytes) -> None:
        """Send what `packed` made to every rank in order; one that is gone is found out by `receive`."""
        ...

    def receive(self, also: socket.socket, timeout: float | None) -> list[tuple[int, FromRank | None]]:
        """Wait until ranks have said something, ``also`` is readable, or ``timeout`` seconds are over.

        Returns:
            (rank, message) for each message; None instead of a message when the rank is gone.

        Raises:
            RankStalled: a message began and did not go on for ``worker_timeout`` seconds.
        """
        ...

    def describe_exit(self, rank: int) -> str:
        """How ``rank`` ended, in words."""
        ...

    def close(self, grace: float = 0.0) -> None:
        """End every rank: ask for it and wait ``grace`` seconds, then end it by force. Idempotent."""
        ...


class WorkerBackend(Protocol):
    """Makes one group after another, and holds what outlives them. Thread-safe.

    Attributes:
        max_restarts: How often in a row a group that broke is followed by another.
    """

    max_restarts: int

    def group(self, replica: int) -> WorkerGroup:
        """A group for this replica, not started yet."""
        ...

    def close(self) -> None:
        """Give back what groups shared; every group is closed before. Idempotent."""
        ...


def packed(message: ToRank | FromRank) -> bytes:
    """``message`` as it travels.

    Raises:
        Exception: it holds something that cannot travel.
    """
    return bytes(ForkingPickler.dumps(message))
