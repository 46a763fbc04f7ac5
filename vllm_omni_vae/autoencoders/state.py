# SPDX-License-Identifier: Apache-2.0
"""What a distributed autoencoder holds beyond its diffusers class."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from ..config import IN_TILES, VaeParallelMode, VaeSplits, VaeTileMerge
from ..distributed import Communicator, VaeGroups, agree
from ..errors import Cancelled
from ..tiling import DistributedVaeExecutor
from .arguments import outline
from .policy import Decision
from .spec import Operation, Vae
from .twin import switches

logger = logging.getLogger(__name__)


class Rendezvous(Protocol):
    """Brings ranks that have no input of their own to a collective call."""

    def announce(
        self, operation: Operation, x: torch.Tensor, arguments: Mapping[str, Any]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Collective. Tell every rank what comes, and return ``x`` and the further arguments with the leader's tensors.

        Raises:
            UnsupportedError: an argument cannot be sent, on every rank that calls.
        """
        ...


class ParallelState:
    """Groups, executor and bookkeeping of one distributed autoencoder. A copy of the module does not take it along.

    Attributes:
        groups: The ranks.
        placement: What the groups were made for; asked for again, they are kept.
        mode: What was asked for.
        merge: How tiles become one result.
        splits: Which operations are split by rank instead of in tiles.
        pieces: Into how many pieces: as many as there are ranks.
        broadcast_decode: Whether every calling rank gets decoded samples.
        executor: Runs tiles on the ranks.
        stoppable: Whether sharded calls look between network calls if any rank was told to stop; the same on all.
        alike: Set by an engine: the ranks that run the pipeline and so call with inputs of their own; None for one.
        rendezvous: Set by an engine whose VAE ranks do not all run the pipeline.
        budget: Bytes that a shard may take on each working rank, the same on all; None: not looked at.
        chunk: Latent frames at a time that every shard of this autoencoder takes; None: the decision's.
        retry_in_tiles: Whether a call that a rank has no memory for is run once more in tiles.
        on_decision: Told of every decision, also repeated ones.
        lock: One call at a time: diffusers keeps a call's cache on the module.
    """

    def __init__(
        self,
        groups: VaeGroups,
        mode: VaeParallelMode,
        broadcast_decode: bool,
        placement: object = None,
        budget: int | None = None,
        merge: VaeTileMerge = VaeTileMerge.BLEND,
        splits: VaeSplits = IN_TILES,
    ):
        self.groups = groups
        self.placement = placement
        self.mode = mode
        self.merge = merge
        self.splits = splits
        self.pieces = len(groups.workers)
        self.broadcast_decode = broadcast_decode
        self.executor = DistributedVaeExecutor(groups)
        self.stoppable = False
        self.rendezvous: Rendezvous | None = None
        self.alike: Communicator | None = None
        self.budget = budget
        self.chunk: int | None = None
        self.retry_in_tiles = True
        self.on_decision: Callable[[Decision], None] | None = None
        self.lock = threading.RLock()
        self._logged: set[Decision] = set()
        self._decided: dict[object, Decision] = {}

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def callers(self, operation: Operation) -> Communicator | None:
        """The ranks that call with an input of their own and must agree before anything is decided, if several."""
        if self.rendezvous is not None:
            return self.alike
        broadcast = operation is Operation.ENCODE or self.broadcast_decode
        return self.groups.domain if broadcast else self.groups.work

    @property
    def size(self) -> int:
        """Ranks that share the work."""
        return len(self.groups.workers)

    def request_facts(
        self, vae: Vae, operation: Operation, x: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> dict[str, object]:
        """What the choice of a strategy depends on; ranks that differ in it would wait for each other."""
        return {
            "operation": operation.value,
            "mode": self.mode.value,
            "tile merge": self.merge.value,
            "splits": self.splits,
            "shape": tuple(x.shape),
            "dtype": x.dtype,
            "weights": vae.dtype,
            "tiling": sorted(switches(vae).items()),
            "arguments": [*map(outline, args), *((name, outline(value)) for name, value in sorted(kwargs.items()))],
        }

    @property
    def is_output_rank(self) -> bool:
        """Whether this rank owns decoded samples."""
        return self.groups.domain.rank == self.groups.workers[self.groups.output]

    def remember(self, key: object, decide: Callable[[], Decision]) -> Decision:
        """What ``decide`` returns, from the second time on without calling it."""
        if key not in self._decided:
            self._decided[key] = decide()
        return self._decided[key]

    def note(self, decision: Decision) -> None:
        """Log a decision the first time it is taken, with a warning when it falls back or leaves ranks idle."""
        if self.on_decision:
            self.on_decision(decision)
        if decision in self._logged:
            return
        self._logged.add(decision)
        if not self.is_output_rank:
            return
        logger.log(logging.WARNING if decision.fallback else logging.INFO, "VAE %s", decision)
        if decision.idle_ranks:
            logger.warning(
                "VAE %s: %d tiles for %d ranks, so ranks %s are idle; smaller tiles would use them",
                decision.operation,
                sum(decision.tiles_per_rank),
                self.size,
                list(decision.idle_ranks),
            )

    def observe(self, done: int, total: int) -> None:
        """Tell this rank's observer of a network call to come; it may raise `Cancelled`, on this rank alone."""
        if self.executor.observer:
            self.executor.observer(done, total)

    def between(self, done: int, total: int) -> None:
        """Collective over the working ranks if `stoppable`. Report a network call to come, or stop on all ranks.

        Raises:
            Cancelled: on every rank, when one was told to stop.
        """
        error: Cancelled | None = None
        try:
            self.observe(done, total)
        except Cancelled as told:
            error = told
        halo = self.groups.halo or self.groups.work
        if self.stoppable and halo is not None:  # a rank that fails in between abandons this group, and nobody waits
            agree(halo, error)
        elif error:
            raise error
