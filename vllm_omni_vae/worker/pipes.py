# SPDX-License-Identifier: Apache-2.0
"""Talk to ranks over one private pipe each. Imports no torch."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import struct
from multiprocessing.connection import Connection, wait

from .group import RankStalled
from .messages import FromRank


class RankPipes:
    """The engine's ends of the pipes to its ranks.

    Args:
        patience: Seconds that a message may stand still in the middle.
    """

    def __init__(self, patience: float):
        self._patience = patience
        self._pipes: list[Connection] = []

    def __len__(self) -> int:
        return len(self._pipes)

    def open(self) -> Connection:
        """Make a pipe to the next rank and return the rank's end of it."""
        ours, theirs = multiprocessing.Pipe()
        _bound_waits(ours, self._patience)
        self._pipes.append(ours)
        return theirs

    def send(self, rank: int, data: bytes) -> None:
        """Send to one rank; a rank that is gone or does not take it is found out by `receive` or by its silence."""
        with contextlib.suppress(OSError):
            self._pipes[rank].send_bytes(data)

    def receive(self, also: socket.socket, timeout: float | None) -> list[tuple[int, FromRank | None]]:
        """As `WorkerGroup.receive`; a rank whose pipe is closed is gone."""
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

    def close(self) -> None:
        """Close them, by which the ranks know that the engine is gone. Idempotent."""
        for pipe in self._pipes:
            pipe.close()
        self._pipes = []


def _bound_waits(pipe: Connection, seconds: float) -> None:
    """Let no read or write in the middle of a message last longer than ``seconds``: a stopped rank blocks nobody."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(pipe.fileno())) as ours:
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, limit)
