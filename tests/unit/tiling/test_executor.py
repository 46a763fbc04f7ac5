# SPDX-License-Identifier: Apache-2.0
"""Tiles on ranks that are threads: the sequential result, or the same error on every rank."""

import dataclasses
import threading
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import pytest
import torch

from tests.helpers.vaes import local_groups, noise
from vllm_omni_vae.distributed import LocalCommunicator, LocalWorld
from vllm_omni_vae.errors import Cancelled, DisagreementError, RankError
from vllm_omni_vae.geometry import AxisScale, AxisTiling, TileGrid, deal
from vllm_omni_vae.tiling import DistributedOperator, DistributedVaeExecutor, GridSpec, TileTask, merge_tiles

RATIO = 2
TILING = (AxisTiling(None), AxisTiling(4, 3, AxisScale(up=RATIO)), AxisTiling(4, 3, AxisScale(up=RATIO)))
SIZES = pytest.mark.parametrize("size", [2, 3, 4])


@dataclasses.dataclass
class Doubling:
    """An operator that enlarges an image by two and mixes its values; counts what it ran.

    ``knows`` says of which tasks the output shape is predicted.
    """

    knows: Callable[[int], bool] = lambda tile_id: True
    knows_whole: bool = True
    ran: list[int] = dataclasses.field(default_factory=list)

    def split(self, x: torch.Tensor) -> tuple[list[TileTask], GridSpec]:
        grid = TileGrid(TILING, (1, *x.shape[-2:]))
        tasks = []
        for tile_id, coord in enumerate(grid.coords()):
            _, h, w = grid.cell(coord)
            shape = (*x.shape[:-2], h.length, w.length) if self.knows(tile_id) else None
            tile = x[..., h.start : h.stop, w.start : w.stop]
            tasks.append(TileTask(tile_id, coord, tile, grid.workload(coord), shape))
        whole = (*x.shape[:-2], *grid.out_extents[1:]) if self.knows_whole else None
        return tasks, GridSpec(grid, x.dtype, whole)

    def exec(self, task: TileTask) -> torch.Tensor:
        self.ran.append(task.tile_id)
        large = task.tensor.repeat_interleave(RATIO, -1).repeat_interleave(RATIO, -2)
        return large * 0.5 + task.tensor.mean()

    def merge(self, tiles: Mapping[tuple[int, ...], torch.Tensor], spec: GridSpec) -> torch.Tensor:
        return merge_tiles(tiles, spec.grid)

    @property
    def operator(self) -> DistributedOperator:
        return DistributedOperator(self.split, self.exec, self.merge)


def sequential(x: torch.Tensor) -> torch.Tensor:
    one = Doubling()
    tasks, spec = one.split(x)
    return one.merge({task.grid_coord: one.exec(task) for task in tasks}, spec)


def on_executors(
    size: int,
    call: Callable[[DistributedVaeExecutor, LocalCommunicator], Any],
    *,
    workers: tuple[int, ...] = (),
    output: int = 0,
) -> list[Any]:
    work_world = LocalWorld(len(workers)) if workers else None

    def body(comm: LocalCommunicator) -> Any:
        return call(DistributedVaeExecutor(local_groups(comm, workers, output, work_world)), comm)

    return LocalWorld(size).run(body)


X = noise(2, 3, 8, 9)
UNPREDICTED = {
    "all known": (lambda _: True, True),
    "none known": (lambda _: False, True),
    "some known": (lambda tile_id: tile_id % 2 == 0, True),
    "only the whole unknown": (lambda _: True, False),
    "nothing known": (lambda _: False, False),
}


@SIZES
@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("known", UNPREDICTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sequential_result(size: int, broadcast: bool, known: str, dtype: torch.dtype) -> None:
    x = X.to(dtype)
    before, expected = x.clone(), sequential(x)
    knows, knows_whole = UNPREDICTED[known]

    def call(executor: DistributedVaeExecutor, comm: LocalCommunicator) -> Any:
        mine = Doubling(knows, knows_whole)
        result = executor.execute(x, mine.operator, broadcast_result=broadcast)
        return result, mine.ran, comm.traffic

    ranks = on_executors(size, call)
    for rank, (result, _, _) in enumerate(ranks):
        if rank == 0 or broadcast:
            assert torch.equal(result, expected)
        else:
            assert result is None
    tasks, _ = Doubling().split(x)
    owned = deal([task.workload for task in tasks], size)
    assert [tuple(ran) for _, ran, _ in ranks] == [owned.tasks_of(rank) for rank in range(size)]
    assert torch.equal(x, before), "the input is not modified"
    told = knows(1) is False or knows(0) is False
    assert ranks[0][2].collectives.get("all_reduce", 0) == int(told), "shapes are told only where they are not known"


@SIZES
@pytest.mark.parametrize(("height", "width", "tiles"), [(3, 3, 1), (3, 1, 1), (3, 6, 2), (1, 9, 3), (9, 1, 3)])
@pytest.mark.parametrize("broadcast", [False, True])
def test_fewer_tiles_than_ranks(size: int, height: int, width: int, tiles: int, broadcast: bool) -> None:
    x = noise(1, height, width)

    def call(executor: DistributedVaeExecutor, comm: LocalCommunicator) -> Any:
        mine = Doubling()
        return executor.execute(x, mine.operator, broadcast_result=broadcast), len(mine.ran)

    ranks = on_executors(size, call)
    assert sum(ran for _, ran in ranks) == tiles
    for rank, (result, ran) in enumerate(ranks):
        assert ran == 0 or tiles > rank
        assert (result is None) == (rank > 0 and not broadcast)
        assert result is None or torch.equal(result, sequential(x))


@pytest.mark.parametrize("output", [1, 2])
@pytest.mark.parametrize("known", UNPREDICTED)
def test_another_output_rank(output: int, known: str) -> None:
    knows, knows_whole = UNPREDICTED[known]

    def call(executor: DistributedVaeExecutor, comm: LocalCommunicator) -> Any:
        mine = Doubling(knows, knows_whole).operator
        return executor.execute(X, mine), executor.execute(X, mine, broadcast_result=True), comm.traffic.broadcast_bytes

    for rank, (owned, everywhere, sent) in enumerate(on_executors(3, call, output=output)):
        assert (owned is not None) == (rank == output)
        assert owned is None or torch.equal(owned, sequential(X))
        assert torch.equal(everywhere, sequential(X))
        assert (sent > 0) == (rank == output)


@pytest.mark.parametrize(
    ("size", "workers", "output"), [(3, (0, 1), 0), (3, (1, 2), 1), (4, (2, 3), 0), (4, (1, 3), 1), (4, (0, 1, 3), 2)]
)
def test_ranks_outside(size: int, workers: tuple[int, ...], output: int) -> None:
    def call(executor: DistributedVaeExecutor, comm: LocalCommunicator) -> Any:
        mine = Doubling()
        owned = executor.execute(X, mine.operator)
        ran = len(mine.ran)
        everywhere = executor.execute(X, mine.operator, broadcast_result=True)
        return owned, everywhere, ran, len(mine.ran) - ran, comm.traffic.broadcast_bytes

    ranks = on_executors(size, call, workers=workers, output=output)
    for rank, (owned, everywhere, ran, ran_again, sent) in enumerate(ranks):
        assert (sent > 0) == (rank == workers[output]), "the output rank merges"
        assert (owned is not None) == (rank == workers[output])
        assert owned is None or torch.equal(owned, sequential(X))
        assert torch.equal(everywhere, sequential(X))
        assert (ran > 0) == (rank in workers)
        assert ran == ran_again
    assert sum(ran for _, _, ran, *_ in ranks) == 9


@SIZES
@pytest.mark.parametrize("broadcast", [False, True])
def test_tiles_travel_once_and_the_result_once_more_where_it_is_broadcast(size: int, broadcast: bool) -> None:
    tasks, spec = Doubling().split(X)
    owned = deal([task.workload for task in tasks], size)
    whole = prod(spec.output_shape or ()) * X.element_size()

    def call(executor: DistributedVaeExecutor, comm: LocalCommunicator) -> Any:
        executor.execute(X, Doubling().operator, broadcast_result=broadcast)
        return comm.traffic

    for rank, traffic in enumerate(on_executors(size, call)):
        mine = sum(prod(tasks[t].output_shape or ()) for t in owned.tasks_of(rank)) * X.element_size()
        assert (traffic.messages, traffic.bytes) == ((0, 0) if rank == 0 else (1, mine))
        assert traffic.broadcast_bytes == (whole if broadcast and rank == 0 else 0)
        assert traffic.collectives == {"all_gather": 3, "gather": 1} | ({"broadcast": 1} if broadcast else {})


class Broken(Doubling):
    """Raises ``error`` in one function, on some ranks, as long as ``armed``."""

    def __init__(self, where: str, error: BaseException, armed: bool):
        super().__init__()
        self.where, self.error, self.armed = where, error, armed

    def _may_raise(self, where: str) -> None:
        if self.armed and where == self.where:
            raise self.error

    def split(self, x: torch.Tensor) -> tuple[list[TileTask], GridSpec]:
        self._may_raise("split")
        return super().split(x)

    def exec(self, task: TileTask) -> torch.Tensor:
        if len(self.ran) == 1:
            self._may_raise("exec")
        return super().exec(task)

    def merge(self, tiles: Mapping[tuple[int, ...], torch.Tensor], spec: GridSpec) -> torch.Tensor:
        self._may_raise("merge")
        return super().merge(tiles, spec)


@SIZES
@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize(
    ("where", "ranks"), [("split", {1}), ("exec", {1}), ("exec", {0}), ("exec", {1, 0}), ("merge", {0}), ("facts", {1})]
)
def test_one_rank_raises_and_the_next_call_is_right(size: int, broadcast: bool, where: str, ranks: set[int]) -> None:
    def call(executor: DistributedVaeExecutor, comm: LocalCommunicator) -> Any:
        broken = Broken(where, ValueError(f"odd {comm.rank}"), comm.rank in ranks)

        def facts() -> dict[str, object]:
            broken._may_raise("facts")
            return {"mode": "tile"}

        with pytest.raises(RankError) as caught:
            executor.execute(X, broken.operator, broadcast_result=broadcast, facts=facts)
        broken.armed = False
        broken.ran.clear()
        then = executor.execute(X, broken.operator, broadcast_result=broadcast, facts=facts)
        return str(caught.value), caught.value.__cause__ is broken.error, then

    first = min(ranks)
    for rank, (message, mine, then) in enumerate(on_executors(size, call)):
        assert message == f"rank {first} failed: ValueError: odd {first}"
        assert mine == (rank in ranks)
        assert (then is None) == (rank > 0 and not broadcast)
        assert then is None or torch.equal(then, sequential(X))


@SIZES
def test_a_wrong_prediction_is_named_on_every_rank(size: int) -> None:
    class Wrong(Doubling):
        def split(self, x: torch.Tensor) -> tuple[list[TileTask], GridSpec]:
            tasks, spec = super().split(x)
            tasks[4].output_shape = (2, 3, 7, 8)
            return tasks, spec

    def call(executor: DistributedVaeExecutor, comm: LocalCommunicator) -> str:
        with pytest.raises(RankError) as caught:
            executor.execute(X, Wrong().operator)
        return str(caught.value)

    (message,) = set(on_executors(size, call))
    assert "GeometryError: tile (0, 1, 1) came out as (2, 3, 8, 8) but (2, 3, 7, 8) was predicted" in message


def test_a_wrong_prediction_of_the_whole_is_named_on_every_rank() -> None:
    class Wrong(Doubling):
        def split(self, x: torch.Tensor) -> tuple[list[TileTask], GridSpec]:
            tasks, spec = super().split(x)
            spec.output_shape = (1,)
            return tasks, spec

    def call(executor: DistributedVaeExecutor, comm: LocalCommunicator) -> str:
        with pytest.raises(RankError) as caught:
            executor.execute(X, Wrong().operator, broadcast_result=True)
        return str(caught.value)

    (message,) = set(on_executors(3, call))
    assert "rank 0 failed: GeometryError: the merged result came out as (2, 3, 16, 18) but (1,) was" in message


def test_a_tile_of_another_type_is_named_on_every_rank() -> None:
    class Wider(Doubling):
        def exec(self, task: TileTask) -> torch.Tensor:
            return super().exec(task).double()

    for known in (lambda _: True, lambda _: False):

        def call(executor: DistributedVaeExecutor, comm: LocalCommunicator, known: Any = known) -> str:
            with pytest.raises(RankError) as caught:
                executor.execute(X, Wider(known).operator)
            return str(caught.value)

        (message,) = set(on_executors(2, call))
        assert "came out as torch.float64, not torch.float32" in message


def test_an_operator_without_tasks_is_refused_on_every_rank() -> None:
    def nothing(x: torch.Tensor) -> tuple[list[TileTask], GridSpec]:
        return [], Doubling().split(x)[1]

    def call(executor: DistributedVaeExecutor, comm: LocalCommunicator) -> str:
        operator = DistributedOperator(nothing, Doubling().exec, Doubling().merge)
        with pytest.raises(RankError, match="cannot deal workloads") as caught:
            executor.execute(X, operator)
        return str(caught.value)

    assert len(set(on_executors(2, call))) == 1


@SIZES
@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("after", [0, 1])
def test_cancelled_on_one_rank_is_cancelled_on_all(size: int, broadcast: bool, after: int) -> None:
    def call(executor: DistributedVaeExecutor, comm: LocalCommunicator) -> Any:
        def stop(done: int, _: int) -> None:
            if comm.rank == 1 and done == after:
                raise Cancelled("the client left")

        executor.observer = stop
        with pytest.raises(Cancelled, match="the job was cancelled"):
            executor.execute(X, Doubling().operator, broadcast_result=broadcast)
        executor.observer = None
        return executor.execute(X, Doubling().operator, broadcast_result=broadcast)

    for result in on_executors(size, call):
        assert result is None or torch.equal(result, sequential(X))


@SIZES
def test_the_observer_sees_each_tile_of_its_rank(size: int) -> None:
    def call(executor: DistributedVaeExecutor, comm: LocalCommunicator) -> list[tuple[int, int]]:
        seen: list[tuple[int, int]] = []
        executor.observer = lambda done, total: seen.append((done, total))
        executor.execute(noise(1, 3, 6), Doubling().operator)
        return seen

    progress = on_executors(size, call)
    assert progress == [[(0, 1), (1, 1)]] * 2 + [[(0, 0)]] * (size - 2)


def other_values(x: torch.Tensor) -> torch.Tensor:
    return noise(*x.shape, seed=9)


def one_bit(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.view(torch.int32)[1, 2, 3, 4] ^= 1
    return y


DIFFERENT: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "values": (other_values, "content"),
    "one bit": (one_bit, "content"),
    "sign of zero": (lambda x: x * -0.0 if x.numel() else x, "content"),
    "order of the batch": (lambda x: x.flip(0), "content"),
    "order of the channels": (lambda x: x.flip(1), "content"),
    "upside down": (lambda x: x.flip(2), "content"),
    "mirrored": (lambda x: x.flip(3), "content"),
    "dtype": (lambda x: x.double(), "dtype"),
    "height": (lambda x: x[:, :, :-1], "shape"),
    "batch": (lambda x: x[:1], "shape"),
}


@SIZES
@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_with_different_inputs_are_told_apart_before_any_tile_runs(size: int, what: str) -> None:
    change, name = DIFFERENT[what]

    def call(executor: DistributedVaeExecutor, comm: LocalCommunicator) -> Any:
        mine = Doubling()
        x = change(X) if comm.rank == size - 1 else X
        with pytest.raises(DisagreementError) as caught:
            executor.execute(x, mine.operator)
        then = executor.execute(X, Doubling().operator)
        return str(caught.value), mine.ran, then

    for rank, (message, ran, then) in enumerate(on_executors(size, call)):
        assert message.startswith(f"ranks came with different {name}: rank 0 has ")
        assert f"rank {size - 1} has " in message
        assert ran == []
        assert (rank > 0) == (then is None)
        assert then is None or torch.equal(then, sequential(X))


@pytest.mark.parametrize("what", ["broadcast", "output", "facts", "grid"])
def test_ranks_with_different_settings_are_told_apart(what: str) -> None:
    def call(executor: DistributedVaeExecutor, comm: LocalCommunicator) -> str:
        mine, odd = Doubling().operator, comm.rank == 1
        if what == "output" and odd:
            executor.groups = dataclasses.replace(executor.groups, output=1)
        if what == "grid" and odd:
            whole = AxisTiling(9, 9, AxisScale(up=RATIO))
            spec = GridSpec(TileGrid((AxisTiling(None), whole, whole), (1, 8, 9)), X.dtype)
            task = TileTask(0, (0, 0, 0), X)
            mine = DistributedOperator(lambda _: ([task], spec), mine.exec, mine.merge)
        facts = {"mode": "auto" if what == "facts" and odd else "tile"}
        with pytest.raises(DisagreementError) as caught:
            executor.execute(X, mine, broadcast_result=what == "broadcast" and odd, facts=lambda: dict(facts))
        return str(caught.value)

    names = {"broadcast": "placement", "output": "placement", "facts": "further settings", "grid": "tile grid"}
    (message,) = set(on_executors(2, call))
    assert message.startswith(f"ranks came with different {names[what]}: rank 0 has ")


def test_large_inputs_are_compared_by_a_sample_of_every_part() -> None:
    x = torch.zeros(1, 1, 3000, 3000)
    y = x.clone()
    y[..., 2000:, 2000:] = 1

    def call(executor: DistributedVaeExecutor, comm: LocalCommunicator) -> None:
        with pytest.raises(DisagreementError, match="content"):
            executor.execute(y if comm.rank else x, whole_image())

    on_executors(2, call)


def whole_image() -> DistributedOperator:
    """One tile that yields what it reads."""

    def split(x: torch.Tensor) -> tuple[list[TileTask], GridSpec]:
        grid = TileGrid((AxisTiling(None),) * 3, (1, *x.shape[-2:]))
        return [TileTask(0, (0, 0, 0), x, 1, tuple(x.shape))], GridSpec(grid, x.dtype, tuple(x.shape))

    return DistributedOperator(split, lambda task: task.tensor, lambda tiles, _: tiles[0, 0, 0].mul_(2))


@pytest.mark.parametrize("known", [True, False])
def test_a_merge_that_overwrites_does_not_reach_the_input(known: bool) -> None:
    x, operator = noise(1, 2, 4, 4), whole_image()
    before = x.clone()
    if not known:
        split = operator.split

        def unknown(x: torch.Tensor) -> tuple[list[TileTask], GridSpec]:
            (task,), spec = split(x)
            return [dataclasses.replace(task, output_shape=None)], spec

        operator = dataclasses.replace(operator, split=unknown)
    results = on_executors(2, lambda executor, _: executor.execute(x, operator, broadcast_result=True))
    assert all(torch.equal(result, 2 * before) for result in results)
    assert torch.equal(x, before)
    assert len({result.data_ptr() for result in results}) == 2


@pytest.mark.parametrize("shape", [(4, 4), (1, 1, 1, 1, 4, 4)])
def test_other_numbers_of_dims(shape: tuple[int, ...]) -> None:
    x = noise(*shape)
    results = on_executors(2, lambda executor, _: executor.execute(x, Doubling(lambda _: False, False).operator))
    assert torch.equal(results[0], sequential(x))


def test_tiles_run_at_the_same_time() -> None:
    together = threading.Barrier(2, timeout=10)

    class Meeting(Doubling):
        def exec(self, task: TileTask) -> torch.Tensor:
            together.wait()
            return super().exec(task)

    x = noise(1, 3, 6)
    results = on_executors(2, lambda executor, _: executor.execute(x, Meeting().operator))
    assert torch.equal(results[0], sequential(x))


def test_a_grid_spec_says_what_is_cut() -> None:
    _, spec = Doubling().split(X)
    assert spec.grid_shape == (1, 3, 3)
    assert spec.split_dims == (-2, -1)
    assert GridSpec(TileGrid(TILING, (1, 3, 9)), torch.float32).split_dims == (-1,)
