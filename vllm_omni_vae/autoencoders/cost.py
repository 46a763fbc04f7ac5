# SPDX-License-Identifier: Apache-2.0
"""What one encode or decode would cost under each strategy, found out by running it without values.

Nothing is modelled that can be counted: each rank's own code runs on tensors of `torch.device("meta")`, and what it
sends is what a real run sends, to the byte. Ranks in the same position of a grid do the same and are run once.
"""

from __future__ import annotations

import dataclasses
from math import prod
from typing import Any

import torch

from ..config import IN_TILES, VaeParallelMode, VaeSplits, VaeTileMerge
from ..distributed import VaeGroups
from ..errors import GeometryError
from ..geometry import Partition, RankGrid, TileGrid, deal
from ..geometry.cost import Cost, RankCost, tile_cost, whole_cost
from ..sharding import ShardLayout
from .dry_run import CountingCommunicator, DryRun, Memo
from .policy import Decision, Strategy
from .spec import FamilySpec, Operation
from .state import ParallelState
from .twin import switches

_COLLECTIVES = ("all_gather", "all_gather_uneven", "all_reduce", "gather", "reduce", "broadcast")


@dataclasses.dataclass(frozen=True, slots=True)
class RankUse:
    """What one rank does besides computing; bytes and messages are those that it sends.

    Attributes:
        halo_calls: Exchanges with neighbours in which it takes part; each waits for them.
        halo_messages, halo_bytes: Rows for its neighbours.
        attention_messages, attention_bytes: Keys and values for every other rank.
        result_messages, result_bytes: Its part of the result for the output rank.
        broadcast_bytes: The result for every rank, where it sends that.
        reduced_bytes: Its sum of tiles, as large as the whole, where the ranks add those up.
        collectives: Collectives by name, those of a few integers with which ranks agree included.
        network_calls: Calls of the encoder or decoder.
        peak_bytes: Most bytes of tensors that exist at one time, from the input on: without weights, workspaces, and
            what an allocator rounds up or keeps.
    """

    halo_calls: int = 0
    halo_messages: int = 0
    halo_bytes: int = 0
    attention_messages: int = 0
    attention_bytes: int = 0
    result_messages: int = 0
    result_bytes: int = 0
    broadcast_bytes: int = 0
    reduced_bytes: int = 0
    collectives: tuple[tuple[str, int], ...] = ()
    network_calls: int = 0
    peak_bytes: int = 0

    @property
    def messages(self) -> int:
        """Point-to-point messages."""
        return self.halo_messages + self.attention_messages + self.result_messages

    @property
    def bytes(self) -> int:
        """Their bytes."""
        return self.halo_bytes + self.attention_bytes + self.result_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Forecast:
    """One encode or decode under one strategy.

    Attributes:
        decision: What runs, as the autoencoder itself decides.
        cost: Work, messages and bytes of each rank.
        uses: The rest, in rank order.
    """

    decision: Decision
    cost: Cost
    uses: tuple[RankUse, ...]

    @property
    def peak_bytes(self) -> int:
        """Peak of the rank that holds most."""
        return max(use.peak_bytes for use in self.uses)


class Forecaster:
    """Forecasts for one autoencoder, dtype and request size.

    Args:
        vae: A distributed autoencoder on `torch.device("meta")` with tiling switched on, of the dtype it will have. It
            is left as it was.
        operation: Encode or decode.
        shape: Shape of the public input, ``(B, C, T, H, W)``, or ``(B, C, H, W)`` of pictures.
        chunk: Latent frames at a time of a shard; None: as the autoencoder decides.

    Raises:
        GeometryError: the family cannot do this shape exactly.
    """

    def __init__(self, vae: Any, operation: Operation, shape: tuple[int, ...], chunk: int | None = None):
        spec: FamilySpec = vae.spec
        if vae.device.type != "meta" or not vae.use_tiling:
            raise GeometryError(f"a forecast takes an autoencoder without values that tiles, not one on {vae.device}")
        spec.check(vae, operation, shape)
        self.vae = vae
        self.spec = spec
        self.operation = operation
        self.shape = shape
        self.chunk = chunk
        self.seen = spec.seen_extents(vae, operation, shape)
        self._memo = Memo()
        self._known: dict[Any, tuple[Cost, tuple[RankUse, ...]]] = {}

    def direct(self) -> Forecast:
        """The whole on one rank, as diffusers does it without tiles."""
        decision = Decision(self.operation, Strategy.DIRECT, "one rank, no tiles")
        use = self._run(None, 0, 1, self._memo)
        return Forecast(decision, whole_cost(self.seen, 1, self.shape[0]), (use,))

    def decide(
        self,
        mode: VaeParallelMode,
        ranks: int,
        merge: VaeTileMerge = VaeTileMerge.BLEND,
        splits: VaeSplits = IN_TILES,
    ) -> Decision:
        """What the autoencoder would do with ``mode``, ``merge`` and ``splits`` on ``ranks`` ranks."""
        state = _state(CountingCommunicator(0, ranks), mode, self.chunk, merge, splits)
        tiled = self.spec.is_tiled(self.vae, self.operation, self.shape)
        decision: Decision = self.vae.decide(state, self.operation, self.seen if tiled else None, self.shape[0])
        return decision

    def forecast(
        self,
        mode: VaeParallelMode,
        ranks: int,
        merge: VaeTileMerge = VaeTileMerge.BLEND,
        splits: VaeSplits = IN_TILES,
    ) -> Forecast:
        """``mode`` on ``ranks`` ranks, of which the first owns the result. Modes that do the same are counted once."""
        decision = self.decide(mode, ranks, merge, splits)
        what = (ranks, decision.strategy, decision.rank_grid, decision.chunk, decision.merge, decision.margin)
        if what not in self._known:
            if decision.sharded:
                self._known[what] = self._sharded(decision, mode, ranks)
            elif decision.tiles_per_rank:
                self._known[what] = self._tiled(decision, mode, splits)
            else:
                self._known[what] = self._whole(mode, ranks)
        return Forecast(decision, *self._known[what])

    def grid(self, decision: Decision) -> TileGrid:
        """The tiles, or pieces, of a decision that has them."""
        if decision.margin is None:
            return self.spec.grid(self.vae, self.operation, self.seen)
        count = sum(decision.tiles_per_rank)
        return self.spec.pieces(self.vae, self.operation, self.seen, count, decision.margin)

    def layout(self, decision: Decision, rank: int) -> ShardLayout:
        """Which latents ``rank`` holds of a sharded decision."""
        rows, cols = self.spec.latents(self.vae, self.operation, self.seen[1:])
        grid = RankGrid(*decision.rank_grid)
        return ShardLayout(grid, Partition(rows, grid.rows), Partition(cols, grid.cols), rank)

    def _whole(self, mode: VaeParallelMode, ranks: int) -> tuple[Cost, tuple[RankUse, ...]]:
        return whole_cost(self.seen, ranks, self.shape[0]), self._uses([None] * ranks, mode)

    def _tiled(self, decision: Decision, mode: VaeParallelMode, splits: VaeSplits) -> tuple[Cost, tuple[RankUse, ...]]:
        grid, ranks, merge = self.grid(decision), len(decision.tiles_per_rank), decision.merge
        assignment = deal([grid.workload(coord) for coord in grid.coords()], ranks)
        cost = tile_cost(
            grid,
            assignment,
            channels=self.spec.channels(self.vae, self.operation),
            element_size=self.vae.dtype.itemsize,
            batch=self.shape[0],
            broadcast=self.operation is Operation.ENCODE,
            summed=merge is VaeTileMerge.SUM,
        )
        cells = [tuple(w.stop - w.start for w in grid.cell(coord)) for coord in grid.coords()]
        kinds = [(rank == 0, tuple(cells[task] for task in assignment.tasks_of(rank))) for rank in range(ranks)]
        return cost, self._uses(kinds, mode, merge=merge, splits=splits)

    def _sharded(self, decision: Decision, mode: VaeParallelMode, ranks: int) -> tuple[Cost, tuple[RankUse, ...]]:
        layouts = [self.layout(decision, rank) for rank in range(ranks)]
        kinds = [
            (layout.rank == 0, layout.latents, *(n is None for dim in (-2, -1) for n in layout.neighbours(dim)))
            for layout in layouts
        ]
        uses = self._uses(kinds, mode, sends=True)
        time, *extents = self.seen
        ratio = self.spec.ratio(self.vae, self.operation)
        depth = self.shape[0] * time
        costs = []
        for layout, use in zip(layouts, uses, strict=True):
            area = prod(cut.stop - cut.start for cut in layout.bounds(layout.rank, (extents[0], extents[1]), ratio))
            costs.append(RankCost(depth * area, use.messages, use.bytes, use.broadcast_bytes))
        return Cost(self.shape[0] * prod(self.seen), tuple(costs)), uses

    def _uses(
        self,
        kinds: list[Any],
        mode: VaeParallelMode,
        sends: bool = False,
        merge: VaeTileMerge = VaeTileMerge.BLEND,
        splits: VaeSplits = IN_TILES,
    ) -> tuple[RankUse, ...]:
        """Run one rank of each kind; network calls that send nothing are the same on all of them."""
        found: dict[Any, RankUse] = {}
        for rank, kind in enumerate(kinds):
            if kind not in found:
                memo = self._memo.elsewhere() if sends else self._memo
                found[kind] = self._run(mode, rank, len(kinds), memo, merge, splits)
        return tuple(found[kind] for kind in kinds)

    def _run(
        self,
        mode: VaeParallelMode | None,
        rank: int,
        ranks: int,
        memo: Memo,
        merge: VaeTileMerge = VaeTileMerge.BLEND,
        splits: VaeSplits = IN_TILES,
    ) -> RankUse:
        comm = CountingCommunicator(rank, ranks)
        return run_rank(self.vae, self.operation, self.shape, mode, comm, memo, self.chunk, merge, splits)


def run_rank(
    vae: Any,
    operation: Operation,
    shape: tuple[int, ...],
    mode: VaeParallelMode | None,
    comm: CountingCommunicator,
    memo: Memo | None,
    chunk: int | None = None,
    merge: VaeTileMerge = VaeTileMerge.BLEND,
    splits: VaeSplits = IN_TILES,
) -> RankUse:
    """Encode or decode as one rank, and count.

    Args:
        vae: A distributed autoencoder, on any device; only without values is the run cheap.
        operation, shape: What to run, on an input of the autoencoder's dtype and device.
        mode: How the ranks of ``comm`` share it; None: not at all, and without tiles.
        comm: Which rank this is.
        memo: What was seen on an equal rank, and where more is noted; None: run everything.
        chunk: Latent frames at a time of a shard; None: as the autoencoder decides.
        merge: How tiles become one.
        splits: Which operations are split by rank.
    """
    before = switches(vae) | {"_vae_parallel": vae._vae_parallel}
    vae._vae_parallel = None if mode is None else _state(comm, mode, chunk, merge, splits)
    if mode is None:
        vae.spec.leave_whole(vae)
    else:
        vae.use_tiling = True
    run = DryRun(vae, comm, memo)
    try:
        with run:
            x = torch.empty(shape, dtype=vae.dtype, device=vae.device)
            call = vae.encode if operation is Operation.ENCODE else vae.decode
            call(x, **vae.spec.stand_ins(vae, operation, x))
    finally:
        vars(vae).update(before)
    tally = comm.tally
    return RankUse(
        halo_calls=tally["halo calls"],
        halo_messages=tally["halo messages"],
        halo_bytes=tally["halo bytes"],
        attention_messages=tally["attention messages"],
        attention_bytes=tally["attention bytes"],
        result_messages=tally["result messages"],
        result_bytes=tally["result bytes"],
        broadcast_bytes=comm.traffic.broadcast_bytes,
        reduced_bytes=comm.traffic.reduced_bytes,
        collectives=tuple((name, tally[name]) for name in _COLLECTIVES if tally[name]),
        network_calls=run.network_calls,
        peak_bytes=run.bytes.peak,
    )


class _Unheard(ParallelState):
    """Takes decisions without logging them: nothing is about to run."""

    def note(self, decision: Decision) -> None:
        return


def _state(
    comm: CountingCommunicator, mode: VaeParallelMode, chunk: int | None, merge: VaeTileMerge, splits: VaeSplits
) -> ParallelState:
    state = _Unheard(VaeGroups.over(comm), mode, False, merge=merge, splits=splits)
    state.chunk = chunk
    return state
