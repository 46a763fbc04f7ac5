# SPDX-License-Identifier: Apache-2.0
"""Run the tiles of one operation on several ranks. Knows no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch

from ..config import VaeTileMerge
from ..distributed import Communicator, VaeGroups, agree, agree_on, fingerprint, span
from ..errors import GeometryError
from ..geometry import Assignment, deal
from .operator import DistributedOperator, GridSpec, TileTask
from .weights import add_tile, sum_shape

TileObserver = Callable[[int, int], None]
"""Called on a rank with (tiles done, its tiles) before the first tile and after each one; may raise `Cancelled`."""

_MAX_DIMS = 8


class DistributedVaeExecutor:
    """Deals tiles to the working ranks, longest first, and brings their outputs together.

    Args:
        groups: The ranks that work and the ranks that call.
        observer: Told after each tile of this rank.
    """

    def __init__(self, groups: VaeGroups, observer: TileObserver | None = None):
        self.groups = groups
        self.observer = observer

    def execute(
        self,
        x: torch.Tensor,
        operator: DistributedOperator,
        *,
        broadcast_result: bool = False,
        facts: Callable[[], dict[str, object]] = dict,
    ) -> torch.Tensor | None:
        """Collective over the working ranks, and over all calling ranks when the result is broadcast.

        Split on every rank, run on the owners, gather in exact sizes to the output rank, merge there, and broadcast if
        asked; or, as the operator says, add up on the owners and reduce. The ranks first make sure that they came with
        the same input; a rank that fails makes every rank raise the same error before any data moves, and leaves
        nothing behind.

        Args:
            x: The whole input, the same on every rank.
            operator: How to split, run and merge.
            broadcast_result: Whether every calling rank gets the result.
            facts: Further values that must be equal on all ranks, by name.

        Returns:
            The merged result on the output rank, and everywhere with ``broadcast_result``; else None.

        Raises:
            RankError, Cancelled: a rank failed or was told to stop.
            DisagreementError: ranks came with different inputs.
        """
        step = self._step(broadcast_result)
        if step is None:
            return None
        return step.run(x, operator, broadcast_result, facts)

    def _step(self, broadcast_result: bool) -> _Step | None:
        groups = self.groups
        if broadcast_result:
            return _Step(groups.domain, groups.workers, groups.workers[groups.output], self.observer)
        if groups.work is None:
            return None
        return _Step(groups.work, tuple(range(groups.work.size)), groups.output, self.observer)


class _Step:
    """One execution: the ranks that take part, in the numbering of ``comm``."""

    def __init__(self, comm: Communicator, workers: Sequence[int], output: int, observer: TileObserver | None):
        self.comm = comm
        self.workers = workers
        self.output = output
        self.observer = observer
        self._order = torch.contiguous_format  # in memory, of this rank's tiles

    def run(
        self,
        x: torch.Tensor,
        operator: DistributedOperator,
        broadcast_result: bool,
        facts: Callable[[], dict[str, object]],
    ) -> torch.Tensor | None:
        tasks, spec, owners = self._plan(x, operator, broadcast_result, facts)
        mine = [task for task, owner in zip(tasks, owners, strict=True) if owner == self.comm.rank]
        if operator.merging is VaeTileMerge.SUM:
            return self._sum(tasks, mine, operator, spec, x, broadcast_result)
        predicted = all(task.output_shape is not None for task in tasks)
        packed = x.new_empty(0, dtype=spec.output_dtype)
        room: list[torch.Tensor] | None = None
        error: Exception | None = None
        try:
            packed = self._run_predicted(mine, operator, spec, x) if predicted else self._run(mine, operator, spec, x)
            if predicted:
                room = self.comm.room(packed, self._sizes(tasks, owners), self.output)
        except Exception as e:
            error = e
        agree(self.comm, error)
        if not predicted:
            self._tell_shapes(tasks, mine)
        pieces = self.comm.gather(packed, self._sizes(tasks, owners), self.output, room)
        result: torch.Tensor | None = None
        try:
            if pieces is not None:
                result = operator.merge(_by_coord(tasks, owners, pieces), spec)
                _check_shape("the merged result", spec.output_shape, result)
            elif broadcast_result and spec.output_shape is not None:
                result = x.new_empty(spec.output_shape, dtype=spec.output_dtype)
        except Exception as e:
            error = e
        agree(self.comm, error)
        if broadcast_result:
            result = self._broadcast(result, spec, x)
        return None if result is None else result.contiguous(memory_format=self._order)

    def _sum(
        self,
        tasks: Sequence[TileTask],
        mine: Sequence[TileTask],
        operator: DistributedOperator,
        spec: GridSpec,
        x: torch.Tensor,
        broadcast_result: bool,
    ) -> torch.Tensor | None:
        """Collective. Add this rank's tiles up, each as soon as it is there, and reduce the sums of all ranks."""
        shape = sum_shape(tasks[0].output_shape or (), spec.grid)
        totals: list[torch.Tensor] = []  # one, once the first tile is done: the network then needs no room any more
        result: torch.Tensor | None = None
        error: Exception | None = None

        def add(task: TileTask, tile: torch.Tensor) -> None:
            _check_shape(f"tile {task.grid_coord}", task.output_shape, tile)
            if not totals:
                totals.append(x.new_zeros(shape, dtype=spec.output_dtype))
            add_tile(totals[0], tile, spec.grid, task.grid_coord)

        try:
            self._each(mine, operator, spec, add)
            total = totals[0] if totals else x.new_zeros(shape, dtype=spec.output_dtype)
        except Exception as e:
            error = e
        agree(self.comm, error)
        if broadcast_result:
            self.comm.all_reduce(total)
        else:
            self.comm.reduce(total, self.output)
        try:
            if broadcast_result or self.comm.rank == self.output:
                result = operator.finish(total, spec)
                _check_shape("the sum of the tiles", spec.output_shape, result)
        except Exception as e:
            error = e
        agree(self.comm, error)
        return result

    def _plan(
        self,
        x: torch.Tensor,
        operator: DistributedOperator,
        broadcast_result: bool,
        facts: Callable[[], dict[str, object]],
    ) -> tuple[list[TileTask], GridSpec, list[int]]:
        error: Exception | None = None
        known: dict[str, object] = {}
        try:
            tasks, spec = operator.split(x)
            assignment: Assignment = deal([task.workload for task in tasks], len(self.workers))
            owners = [self.workers[owner] for owner in assignment.owners]
            if operator.merging is VaeTileMerge.SUM and any(task.output_shape is None for task in tasks):
                raise GeometryError("tiles whose output shapes are not known beforehand cannot be summed; blend them")
            known = {"tile merge": operator.merging.value} | facts()
            content = fingerprint(x)
        except Exception as e:
            error = e
        base: dict[str, object] = {
            "shape": tuple(x.shape),
            "dtype": x.dtype,
            "tile grid": None if error else spec.grid,
            "placement": (broadcast_result, self.output, tuple(self.workers)),
            "further settings": sorted(known.items()),
            "content": None if error else content,
        }
        agree_on(self.comm, base, error)
        return tasks, spec, owners

    def _each(
        self,
        mine: Sequence[TileTask],
        operator: DistributedOperator,
        spec: GridSpec,
        take: Callable[[TileTask, torch.Tensor], None],
    ) -> None:
        """Run this rank's tasks, one tile at a time: ``take`` has let go of it when the next one runs."""
        if self.observer:
            self.observer(0, len(mine))
        for done, task in enumerate(mine, start=1):
            with span(f"tile {', '.join(map(str, task.grid_coord))}"):
                take(task, self._noted(_run(task, operator, spec)))
            if self.observer:
                self.observer(done, len(mine))

    def _noted(self, tile: torch.Tensor) -> torch.Tensor:
        """``tile``; the merged result is put in its order in memory, as it is where no tile travels."""
        self._order = memory_order(tile)
        return tile

    def _run_predicted(
        self, mine: Sequence[TileTask], operator: DistributedOperator, spec: GridSpec, x: torch.Tensor
    ) -> torch.Tensor:
        """Run this rank's tasks, each straight into its place in one flat buffer."""
        packed = x.new_empty(sum(prod(task.output_shape or ()) for task in mine), dtype=spec.output_dtype)
        start = 0

        def pack(task: TileTask, tile: torch.Tensor) -> None:
            nonlocal start
            _check_shape(f"tile {task.grid_coord}", task.output_shape, tile)
            packed[start : start + tile.numel()].view(tile.shape).copy_(tile)
            start += tile.numel()

        self._each(mine, operator, spec, pack)
        return packed

    def _run(
        self, mine: Sequence[TileTask], operator: DistributedOperator, spec: GridSpec, x: torch.Tensor
    ) -> torch.Tensor:
        """Run this rank's tasks, whose shapes are only known afterwards."""
        flat = [x.new_empty(0, dtype=spec.output_dtype)]

        def keep(task: TileTask, tile: torch.Tensor) -> None:
            task.output_shape = tuple(tile.shape)
            flat.append(tile.flatten())

        self._each(mine, operator, spec, keep)
        return torch.cat(flat)

    def _tell_shapes(self, tasks: Sequence[TileTask], mine: Sequence[TileTask]) -> None:
        """Collective. Let every rank know the shapes of all tiles: the fallback when they cannot be predicted."""
        table = torch.zeros(len(tasks), _MAX_DIMS + 1, dtype=torch.int64)
        for task in mine:
            shape = task.output_shape or ()
            table[task.tile_id, : 1 + len(shape)] = torch.tensor([len(shape), *shape])
        table = table.to(self.comm.control_device)
        self.comm.all_reduce(table)
        for task, (dims, *sizes) in zip(tasks, table.tolist(), strict=True):
            task.output_shape = tuple(sizes[:dims])

    def _sizes(self, tasks: Sequence[TileTask], owners: Sequence[int]) -> list[int]:
        sizes = [0] * self.comm.size
        for task, owner in zip(tasks, owners, strict=True):
            sizes[owner] += prod(task.output_shape or ())
        return sizes

    def _broadcast(self, result: torch.Tensor | None, spec: GridSpec, x: torch.Tensor) -> torch.Tensor:
        shape = spec.output_shape
        if shape is None:
            told = torch.zeros(_MAX_DIMS + 1, dtype=torch.int64)
            if result is not None:
                told[: 1 + result.dim()] = torch.tensor([result.dim(), *result.shape])
            told = told.to(self.comm.control_device)
            self.comm.broadcast(told, self.output)
            dims, *sizes = told.tolist()
            shape = tuple(sizes[:dims])
        whole = x.new_empty(shape, dtype=spec.output_dtype) if result is None else result.contiguous()
        self.comm.broadcast(whole, self.output)
        return whole


def memory_order(x: torch.Tensor) -> torch.memory_format:
    """Channels last where ``x`` is so and not otherwise; else contiguous."""
    for dims, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == dims and x.is_contiguous(memory_format=memory_format) and not x.is_contiguous():
            return memory_format
    return torch.contiguous_format


def _run(task: TileTask, operator: DistributedOperator, spec: GridSpec) -> torch.Tensor:
    tile = operator.exec(task)
    if tile.dtype != spec.output_dtype:
        raise GeometryError(f"tile {task.grid_coord} came out as {tile.dtype}, not {spec.output_dtype}")
    return tile


def _by_coord(
    tasks: Sequence[TileTask], owners: Sequence[int], pieces: Sequence[torch.Tensor]
) -> dict[tuple[int, ...], torch.Tensor]:
    """Cut each rank's flat piece into its tiles again."""
    offsets = [0] * len(pieces)
    tiles: dict[tuple[int, ...], torch.Tensor] = {}
    for task, owner in zip(tasks, owners, strict=True):
        shape = task.output_shape or ()
        start = offsets[owner]
        offsets[owner] = start + prod(shape)
        tiles[task.grid_coord] = pieces[owner][start : offsets[owner]].view(shape)
    return tiles


def _check_shape(what: str, expected: tuple[int, ...] | None, found: torch.Tensor) -> None:
    if expected is not None and tuple(found.shape) != tuple(expected):
        raise GeometryError(f"{what} came out as {tuple(found.shape)} but {tuple(expected)} was predicted")
