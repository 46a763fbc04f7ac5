# SPDX-License-Identifier: Apache-2.0
"""Work, messages and bytes of tiles, from integers alone."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_vae.distributed import LocalCommunicator, LocalWorld, VaeGroups
from vllm_omni_vae.geometry import AxisScale, AxisTiling, TileGrid, deal
from vllm_omni_vae.geometry.cost import Cost, RankCost, tile_cost, whole_cost
from vllm_omni_vae.tiling import DistributedOperator, DistributedVaeExecutor, GridSpec, TileTask, merge_tiles

UP = AxisScale(up=2)
TILINGS = st.tuples(st.integers(1, 6), st.integers(0, 4)).map(
    lambda pair: AxisTiling(pair[0] + pair[1], pair[0], scale=UP)
)
GRIDS = st.builds(
    lambda height, width, extents: TileGrid((AxisTiling(None), height, width), extents),
    TILINGS,
    TILINGS,
    st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 20)),
)


def _cost(grid: TileGrid, ranks: int, **options: int) -> Cost:
    assignment = deal([grid.workload(coord) for coord in grid.coords()], ranks)
    return tile_cost(grid, assignment, **{"channels": 3, "element_size": 2} | options)


@given(GRIDS, st.integers(1, 6))
def test_no_work_is_lost_and_only_the_output_rank_sends_nothing(grid: TileGrid, ranks: int) -> None:
    cost = _cost(grid, ranks, output=ranks - 1)
    assert cost.whole == prod(grid.extents)
    assert cost.coverage == pytest.approx(grid.coverage)
    assert cost.redundant_share == pytest.approx(1 - 1 / grid.coverage)
    assert cost.speed_up_limit * cost.imbalance == pytest.approx(ranks / cost.coverage)
    assert cost.largest_share * cost.speed_up_limit == pytest.approx(1)
    for rank, one in enumerate(cost.ranks):
        assert (one.messages, one.bytes > 0) == ((1, True) if one.work and rank < ranks - 1 else (0, False))
    assert cost.messages == sum(one.messages for one in cost.ranks)
    assert cost.broadcast_bytes == 0


@given(GRIDS, st.integers(1, 4))
def test_everything_but_the_messages_grows_with_the_batch(grid: TileGrid, ranks: int) -> None:
    one, three = (_cost(grid, ranks, batch=batch, broadcast=True) for batch in (1, 3))
    assert three == Cost(
        3 * one.whole,
        tuple(RankCost(3 * r.work, r.messages, 3 * r.bytes, 3 * r.broadcast_bytes) for r in one.ranks),
    )


def test_every_rank_can_do_the_whole() -> None:
    cost = whole_cost((2, 3, 4), ranks=3, batch=2)
    assert (cost.whole, cost.work, cost.coverage, cost.speed_up_limit, cost.imbalance) == (48, 144, 3.0, 1.0, 1.0)
    assert cost.messages == cost.bytes == 0


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize(("ranks", "output"), [(1, 0), (2, 1), (3, 0), (5, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_executor_sends_just_that(ranks: int, output: int, dtype: torch.dtype, broadcast: bool) -> None:
    grid = TileGrid((AxisTiling(None), AxisTiling(3, 2, UP), AxisTiling(4, 3, UP)), (2, 6, 8))
    x = torch.zeros(2, 1, *grid.extents, dtype=dtype)

    def split(x: torch.Tensor) -> tuple[list[TileTask], GridSpec]:
        tasks = []
        for number, coord in enumerate(grid.coords()):
            cell = grid.cell(coord)
            part = x[(..., *(slice(w.start, w.stop) for w in cell))]
            tasks.append(TileTask(number, coord, part, grid.workload(coord), (2, 3, *(w.length for w in cell))))
        return tasks, GridSpec(grid, x.dtype, (2, 3, *grid.out_extents))

    def run(task: TileTask) -> torch.Tensor:
        return task.tensor.repeat_interleave(2, -1).repeat_interleave(2, -2).expand(2, 3, -1, -1, -1)

    operator = DistributedOperator(split, run, lambda tiles, spec: merge_tiles(tiles, spec.grid))

    def body(comm: LocalCommunicator) -> tuple[int, int, int]:
        groups = VaeGroups.over(comm, output)
        DistributedVaeExecutor(groups).execute(x, operator, broadcast_result=broadcast)
        return comm.traffic.messages, comm.traffic.bytes, comm.traffic.broadcast_bytes

    cost = _cost(grid, ranks, element_size=dtype.itemsize, batch=2, output=output, broadcast=broadcast)
    sent = [(one.messages, one.bytes, one.broadcast_bytes) for one in cost.ranks]
    assert LocalWorld(ranks).run(body) == sent
