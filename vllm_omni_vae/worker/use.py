# SPDX-License-Identifier: Apache-2.0
"""What the autoencoders cost one rank in one job."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from ..autoencoders import Decision, Operation, Strategy
from ..pipelines.request import VaeUse


class UseMeter:
    """Adds up this rank's seconds, tiles and bytes by operation and strategy. One call is measured at a time.

    Args:
        rank: This rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._sums: dict[tuple[Operation, Strategy], tuple[float, int, int]] = {}
        self._strategy = Strategy.DIRECT
        self._tiles = 0

    @property
    def uses(self) -> tuple[VaeUse, ...]:
        """What was measured so far, one value for each operation and strategy."""
        return tuple(
            VaeUse(self._rank, operation.value, strategy.value, seconds, tiles, sent)
            for (operation, strategy), (seconds, tiles, sent) in self._sums.items()
        )

    @contextlib.contextmanager
    def call(self, vae: Any, operation: Operation, device: torch.device) -> Iterator[None]:
        """Measure one call. One that raises is not counted.

        The device is waited for at both ends, so that the seconds are those of the call and of nothing else.

        Args:
            vae: The autoencoder that is called.
            operation: What it does.
            device: Where it does it.
        """
        self._strategy, self._tiles = Strategy.DIRECT, 0
        _settle(device)
        sent, begun = _sent_bytes(vae), time.perf_counter()
        yield
        _settle(device)
        seconds, tiles, total = self._sums.get((operation, self._strategy), (0.0, 0, 0))
        self._sums[operation, self._strategy] = (
            seconds + time.perf_counter() - begun,
            tiles + self._tiles,
            total + _sent_bytes(vae) - sent,
        )

    def decided(self, decision: Decision) -> None:
        """The call that runs takes this strategy."""
        self._strategy = decision.strategy

    def add_tiles(self, count: int) -> None:
        """This rank ran ``count`` tiles of the call that runs."""
        self._tiles += count

    def on_progress(self, done: int) -> None:
        """``done`` units of a shared call are done on this rank: told before the first, and after or before each."""
        if done and self._strategy is Strategy.TILE:
            self._tiles += 1


def _settle(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _sent_bytes(vae: Any) -> int:
    """Bytes that this rank has given to the groups of ``vae``: messages, what it broadcast, what it brought to sums."""
    state = getattr(vae, "parallel_state", None)
    if state is None:
        return 0
    groups = state.groups
    comms = {id(comm): comm for comm in (groups.domain, groups.work, groups.halo) if comm is not None}
    sent = (comm.traffic for comm in comms.values())
    return sum(traffic.bytes + traffic.broadcast_bytes + traffic.reduced_bytes for traffic in sent)
