# SPDX-License-Identifier: Apache-2.0
"""Threads of one process as ranks. Where a real process group would wait for ever, this one raises."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from ..errors import DeadlockError, DisagreementError
from .communicator import Communicator, Message, Reduction

T = TypeVar("T")


class LocalWorld:
    """``size`` ranks in one process.

    A rank that waits while every other rank waits too, or has returned, can never go on: all waiting ranks then raise
    `DeadlockError`. So does a message that nobody took.
    """

    def __init__(self, size: int):
        self.size = size
        self._changed = threading.Condition()
        self._waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self._returned: set[int] = set()
        self._stuck: str | None = None
        self._mail: dict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
        self._steps: dict[int, dict[int, tuple[str, torch.Tensor]]] = defaultdict(dict)

    def run(self, function: Callable[[LocalCommunicator], T]) -> list[T]:
        """Call ``function`` on every rank at once and return the results in rank order.

        Raises:
            Exception: the error of the lowest rank that failed on its own account, else a rank's `DeadlockError`.
        """
        self._waiting, self._returned, self._stuck = {}, set(), None
        self._mail, self._steps = defaultdict(deque), defaultdict(dict)
        results: dict[int, T] = {}
        errors: dict[int, BaseException] = {}

        def body(rank: int) -> None:
            try:
                results[rank] = function(LocalCommunicator(self, rank))
            except BaseException as error:
                errors[rank] = error
            finally:
                self._leave(rank)

        threads = [threading.Thread(target=body, args=(rank,), name=f"rank-{rank}") for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for rank in sorted(errors, key=lambda r: (isinstance(errors[r], DeadlockError), r)):
            raise errors[rank]
        left = {pair: len(mail) for pair, mail in self._mail.items() if mail}
        if left:
            raise DeadlockError(f"messages that nobody received, by (from, to): {left}")
        return [results[rank] for rank in range(self.size)]

    def post(self, src: int, dst: int, tensor: torch.Tensor) -> None:
        """Leave a copy of ``tensor`` for ``dst``."""
        with self._changed:
            self._mail[src, dst].append(tensor.clone())
            self._changed.notify_all()

    def take(self, src: int, dst: int) -> torch.Tensor:
        """Wait for the next tensor from ``src``."""
        with self._changed:
            mail = self._mail[src, dst]
        self._wait(dst, lambda: bool(mail), f"a message from rank {src}")
        return mail.popleft()

    def meet(self, rank: int, step: int, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Bring ``tensor`` to collective number ``step`` and return what every rank brought, in rank order."""
        with self._changed:
            arrived = self._steps[step]
            arrived[rank] = (name, tensor.clone())
            self._changed.notify_all()
        self._wait(rank, lambda: len(arrived) == self.size, f"the others in {name}")
        kinds = {(n, t.shape, t.dtype) for n, t in arrived.values()}
        if len(kinds) > 1:
            raise DisagreementError(f"ranks met in different collectives: {sorted(map(str, kinds))}")
        return [arrived[r][1] for r in range(self.size)]

    def _wait(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        with self._changed:
            self._waiting[rank] = (ready, what)
            while not ready():
                self._look_for_deadlock()
                if self._stuck is not None:
                    raise DeadlockError(self._stuck)
                self._changed.wait()
            del self._waiting[rank]

    def _leave(self, rank: int) -> None:
        with self._changed:
            self._waiting.pop(rank, None)
            self._returned.add(rank)
            self._look_for_deadlock()
            self._changed.notify_all()

    def _look_for_deadlock(self) -> None:
        there = len(self._waiting) + len(self._returned)
        if self._waiting and there == self.size and not any(ready() for ready, _ in self._waiting.values()):
            waits = "; ".join(f"rank {r} waits for {what}" for r, (_, what) in sorted(self._waiting.items()))
            self._stuck = self._stuck or f"no rank can go on: {waits}; returned: {sorted(self._returned)}"
            self._changed.notify_all()


class LocalCommunicator(Communicator):
    """One rank of a `LocalWorld`."""

    def __init__(self, world: LocalWorld, rank: int):
        super().__init__(rank, world.size)
        self._world = world
        self._step = 0

    def _exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        for peer, tensor in sends:
            self._world.post(self.rank, peer, tensor)
        for peer, buffer in receives:
            arrived = self._world.take(peer, self.rank)
            if (arrived.numel(), arrived.dtype) != (buffer.numel(), buffer.dtype):
                raise DisagreementError(
                    f"rank {peer} sent {arrived.numel()} x {arrived.dtype}, "
                    f"rank {self.rank} expected {buffer.numel()} x {buffer.dtype}"
                )
            buffer.copy_(arrived.view(buffer.shape))

    def _meet(self, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._step += 1
        return self._world.meet(self.rank, self._step, name, tensor)

    def _all_gather(self, piece: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._meet("all_gather", piece))

    def _all_reduce(self, tensor: torch.Tensor, op: Reduction) -> None:
        stacked = torch.stack(self._meet(f"all_reduce {op}", tensor))
        tensor.copy_(stacked.sum(0) if op == "sum" else stacked.amax(0))

    def _reduce(self, tensor: torch.Tensor, dst: int) -> None:
        pieces = self._meet(f"reduce to {dst}", tensor)
        if self.rank == dst:
            tensor.copy_(torch.stack(pieces).sum(0))

    def _broadcast(self, tensor: torch.Tensor, src: int) -> None:
        tensor.copy_(self._meet(f"broadcast from {src}", tensor)[src])
