# SPDX-License-Identifier: Apache-2.0
"""Tiles that ranks add up: the sequential result within re-association, one reduction, one tile at a time."""

import dataclasses
import weakref
from collections.abc import Mapping
from math import prod
from typing import Any

import pytest
import torch

from tests.helpers.vaes import noise
from tests.unit.tiling.test_executor import SIZES, Doubling, on_executors, sequential
from vllm_omni_vae.config import VaeTileMerge
from vllm_omni_vae.distributed import LocalCommunicator
from vllm_omni_vae.errors import Cancelled, DisagreementError, RankError
from vllm_omni_vae.geometry import deal
from vllm_omni_vae.tiling import DistributedOperator, DistributedVaeExecutor, GridSpec, TileTask

X = noise(2, 3, 8, 9, dtype=torch.float64)


@dataclasses.dataclass
class Adding(Doubling):
    """The same operator, whose tiles are summed; finishing doubles the whole."""

    finished: int = 0

    def merge(self, tiles: Mapping[tuple[int, ...], torch.Tensor], spec: GridSpec) -> torch.Tensor:
        raise AssertionError("tiles came together on one rank")

    def finish(self, whole: torch.Tensor, spec: GridSpec) -> torch.Tensor:
        self.finished += 1
        return whole * 2

    @property
    def operator(self) -> DistributedOperator:
        return DistributedOperator(self.split, self.exec, self.merge, VaeTileMerge.SUM, self.finish)


def is_right(result: torch.Tensor, x: torch.Tensor = X) -> bool:
    expected = 2 * sequential(x)
    return bool((result - expected).abs().max() <= 1e-12 * expected.abs().max())


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("broadcast", [False, True])
def test_the_sequential_result_and_what_it_costs(size: int, broadcast: bool) -> None:
    before = X.clone()
    tasks, spec = Doubling().split(X)
    owned = deal([task.workload for task in tasks], size)
    whole = prod(spec.output_shape or ()) * X.element_size()

    def call(executor: DistributedVaeExecutor, comm: LocalCommunicator) -> Any:
        mine = Adding()
        result = executor.execute(X, mine.operator, broadcast_result=broadcast)
        return result, mine.ran, mine.finished, comm.traffic

    ranks = on_executors(size, call)
    for rank, (result, ran, finished, traffic) in enumerate(ranks):
        has_it = rank == 0 or broadcast
        assert (result is not None, finished) == (has_it, int(has_it))
        assert result is None or is_right(result)
        assert result is None or torch.equal(result, ranks[0][0]), "the same bits wherever it is"
        assert tuple(ran) == owned.tasks_of(rank)
        assert (traffic.messages, traffic.bytes, traffic.broadcast_bytes) == (0, 0, 0)
        assert traffic.reduced_bytes == (whole if broadcast or rank else 0)
        assert traffic.collectives == {"all_gather": 3, "all_reduce" if broadcast else "reduce": 1}
    assert torch.equal(X, before)


@SIZES
@pytest.mark.parametrize(("height", "width"), [(3, 3), (3, 6), (1, 9)])
@pytest.mark.parametrize("broadcast", [False, True])
def test_fewer_tiles_than_ranks(size: int, height: int, width: int, broadcast: bool) -> None:
    x = noise(1, height, width, dtype=torch.float64)
    for rank, result in enumerate(
        on_executors(size, lambda executor, _: executor.execute(x, Adding().operator, broadcast_result=broadcast))
    ):
        assert (result is None) == (rank > 0 and not broadcast)
        assert result is None or is_right(result, x)


@pytest.mark.parametrize(("size", "workers", "output"), [(3, (1, 2), 1), (4, (2, 3), 0), (3, (), 2)])
def test_another_output_rank_and_ranks_outside(size: int, workers: tuple[int, ...], output: int) -> None:
    def call(executor: DistributedVaeExecutor, comm: LocalCommunicator) -> Any:
        mine = Adding()
        owned = executor.execute(X, mine.operator)
        return owned, executor.execute(X, mine.operator, broadcast_result=True), len(mine.ran)

    owner = workers[output] if workers else output
    for rank, (owned, everywhere, ran) in enumerate(on_executors(size, call, workers=workers, output=output)):
        assert (owned is not None) == (rank == owner)
        assert owned is None or is_right(owned)
        assert is_right(everywhere)
        assert (ran > 0) == (not workers or rank in workers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types_within_what_rounding_explains(dtype: torch.dtype) -> None:
    x = X.to(dtype)
    (result, *_) = on_executors(3, lambda executor, _: executor.execute(x, Adding().operator))
    expected = 2 * sequential(x)
    assert result.dtype == dtype
    assert (result - expected).double().abs().max() <= 8 * torch.finfo(dtype).eps * expected.double().abs().max()


@pytest.mark.parametrize("merging", list(VaeTileMerge))
def test_a_tile_is_gone_before_the_next_one_runs(merging: VaeTileMerge) -> None:
    class Watched(Doubling):
        last: Any = staticmethod(lambda: None)

        def exec(self, task: TileTask) -> torch.Tensor:
            assert self.last() is None
            tile = super().exec(task)
            self.last = weakref.ref(tile)
            return tile

    def call(executor: DistributedVaeExecutor, comm: LocalCommunicator) -> int:
        mine = Watched()
        executor.execute(X, dataclasses.replace(mine.operator, merging=merging))
        return len(mine.ran)

    assert sum(on_executors(2, call)) == 9


class Broken(Adding):
    """Raises in one function on rank ``where[1]``, as long as ``armed``."""

    def __init__(self, where: str, armed: bool):
        super().__init__()
        self.where, self.armed = where, armed

    def exec(self, task: TileTask) -> torch.Tensor:
        if self.armed and self.where == "exec" and len(self.ran) == 1:
            raise ValueError("odd")
        return super().exec(task)

    def finish(self, whole: torch.Tensor, spec: GridSpec) -> torch.Tensor:
        if self.armed and self.where == "finish":
            raise ValueError("odd")
        return super().finish(whole, spec)


@SIZES
@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize(("where", "bad"), [("exec", 1), ("exec", 0), ("finish", 0)])
def test_one_rank_raises_and_the_next_call_is_right(size: int, broadcast: bool, where: str, bad: int) -> None:
    def call(executor: DistributedVaeExecutor, comm: LocalCommunicator) -> Any:
        broken = Broken(where, comm.rank == bad)
        with pytest.raises(RankError) as caught:
            executor.execute(X, broken.operator, broadcast_result=broadcast)
        broken.armed = False
        return str(caught.value), executor.execute(X, broken.operator, broadcast_result=broadcast)

    for rank, (message, then) in enumerate(on_executors(size, call)):
        assert message == f"rank {bad} failed: ValueError: odd"
        assert (then is None) == (rank > 0 and not broadcast)
        assert then is None or is_right(then)


@SIZES
def test_cancelled_on_one_rank_is_cancelled_on_all(size: int) -> None:
    def call(executor: DistributedVaeExecutor, comm: LocalCommunicator) -> Any:
        def stop(done: int, _: int) -> None:
            if comm.rank == 1 and done == 1:
                raise Cancelled("the client left")

        executor.observer = stop
        with pytest.raises(Cancelled):
            executor.execute(X, Adding().operator)
        executor.observer = None
        return executor.execute(X, Adding().operator)

    assert is_right(on_executors(size, call)[0])


def test_shapes_that_are_not_predicted_are_refused_on_every_rank() -> None:
    def call(executor: DistributedVaeExecutor, comm: LocalCommunicator) -> str:
        mine = Adding(knows=lambda tile_id: tile_id != 2)
        with pytest.raises(RankError) as caught:
            executor.execute(X, mine.operator)
        assert not mine.ran
        return str(caught.value)

    (message,) = set(on_executors(3, call))
    assert "tiles whose output shapes are not known beforehand cannot be summed; blend them" in message


@pytest.mark.parametrize("what", ["tile", "whole"])
def test_a_wrong_prediction_is_named_on_every_rank(what: str) -> None:
    class Wrong(Adding):
        def split(self, x: torch.Tensor) -> tuple[list[TileTask], GridSpec]:
            tasks, spec = super().split(x)
            if what == "tile":
                tasks[4].output_shape = (2, 3, 7, 8)
            else:
                spec.output_shape = (1,)
            return tasks, spec

    def call(executor: DistributedVaeExecutor, comm: LocalCommunicator) -> str:
        with pytest.raises(RankError) as caught:
            executor.execute(X, Wrong().operator)
        return str(caught.value)

    (message,) = set(on_executors(3, call))
    named = {"tile": "tile (0, 1, 1) came out as", "whole": "the sum of the tiles came out as (2, 3, 16, 18)"}
    assert named[what] in message


def test_ranks_that_merge_in_different_ways_are_told_apart() -> None:
    def call(executor: DistributedVaeExecutor, comm: LocalCommunicator) -> str:
        merging = VaeTileMerge.SUM if comm.rank else VaeTileMerge.BLEND
        with pytest.raises(DisagreementError) as caught:
            executor.execute(X, dataclasses.replace(Adding().operator, merging=merging))
        return str(caught.value)

    (message,) = set(on_executors(2, call))
    assert "('tile merge', 'sum')" in message
