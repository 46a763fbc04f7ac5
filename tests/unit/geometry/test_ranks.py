# SPDX-License-Identifier: Apache-2.0
"""Rows, grids and tasks among ranks."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_vae.errors import GeometryError
from vllm_omni_vae.geometry import Partition, RankGrid, deal

PARTITIONS = st.builds(Partition, st.integers(0, 300), st.integers(1, 17), st.integers(1, 16))


@given(PARTITIONS)
def test_pieces_cover_the_axis_and_are_disjoint(partition: Partition) -> None:
    bounds = [partition.bounds(part) for part in range(partition.parts)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == partition.extent * partition.ratio
    assert all(before[1] == after[0] for before, after in pairwise(bounds))
    assert [stop - start for start, stop in bounds] == list(partition.sizes)
    assert sum(partition.row_sizes) == partition.extent


@given(PARTITIONS)
def test_pieces_differ_by_at_most_one_row_and_the_first_are_longer(partition: Partition) -> None:
    rows = partition.row_sizes
    assert max(rows) - min(rows) <= 1
    assert list(rows) == sorted(rows, reverse=True)
    assert list(partition.sizes) == [n * partition.ratio for n in rows]


@given(PARTITIONS, st.integers(1, 16))
def test_scaling_cuts_at_the_same_rows(partition: Partition, ratio: int) -> None:
    scaled = partition.scaled(ratio)
    assert scaled.sizes == tuple(size * ratio for size in partition.sizes)
    assert scaled.starts == tuple(start * ratio for start in partition.starts)
    assert partition.scaled(2).scaled(4) == partition.scaled(8)
    assert partition.scaled(1) == partition


@given(st.builds(Partition, st.integers(0, 40), st.integers(1, 17), st.integers(1, 4)))
def test_each_unit_has_one_owner(partition: Partition) -> None:
    owners = [partition.owner(unit) for unit in range(partition.extent * partition.ratio)]
    assert [owners.count(part) for part in range(partition.parts)] == list(partition.sizes)
    for beyond in (-1, partition.extent * partition.ratio):
        with pytest.raises(GeometryError, match=f"unit {beyond} is outside"):
            partition.owner(beyond)


@pytest.mark.parametrize("values", [(-1, 2), (4, 0), (4, 2, 0)])
def test_partitions_that_cannot_be(values: tuple[int, ...]) -> None:
    with pytest.raises(GeometryError, match="cannot cut"):
        Partition(*values)


@given(st.integers(1, 500))
def test_the_squarest_grid(size: int) -> None:
    grid = RankGrid.squarest(size)
    assert grid.size == size
    assert grid.rows <= grid.cols
    better = [rows for rows in range(grid.rows + 1, size + 1) if size % rows == 0 and rows <= size // rows]
    assert not better


@given(st.integers(1, 7), st.integers(1, 7))
def test_neighbours_are_mutual_and_numbered_row_by_row(rows: int, cols: int) -> None:
    grid = RankGrid(rows, cols)
    assert [grid.coords(rank) for rank in range(grid.size)] == [(r, c) for r in range(rows) for c in range(cols)]
    for rank in range(grid.size):
        row, col = grid.coords(rank)
        assert grid.rank(row, col) == grid.neighbour(rank) == rank
        assert (grid.neighbour(rank, down=1) is None) == (row == rows - 1)
        assert (grid.neighbour(rank, down=-1) is None) == (row == 0)
        assert (grid.neighbour(rank, right=1) is None) == (col == cols - 1)
        assert (grid.neighbour(rank, right=-1) is None) == (col == 0)
        for down, right in ((1, 0), (0, 1), (1, 1), (1, -1)):
            other = grid.neighbour(rank, down=down, right=right)
            assert other is None or grid.neighbour(other, down=-down, right=-right) == rank


def test_grids_that_cannot_be() -> None:
    for rows, cols in ((0, 1), (1, 0), (-1, 2)):
        with pytest.raises(GeometryError, match="has no ranks"):
            RankGrid(rows, cols)
    with pytest.raises(GeometryError, match="0 ranks make no grid"):
        RankGrid.squarest(0)
    for rank in (-1, 4):
        with pytest.raises(GeometryError, match=f"rank {rank} is not in a grid of 2 x 2"):
            RankGrid(2, 2).coords(rank)


WORKLOADS = st.lists(st.integers(1, 1000), min_size=1, max_size=40)


@given(WORKLOADS, st.integers(1, 9))
def test_every_task_is_dealt_once(workloads: list[int], ranks: int) -> None:
    assignment = deal(workloads, ranks)
    assert sorted(t for rank in range(ranks) for t in assignment.tasks_of(rank)) == list(range(len(workloads)))
    for rank in range(ranks):
        assert assignment.loads[rank] == sum(workloads[t] for t in assignment.tasks_of(rank))
        assert list(assignment.tasks_of(rank)) == sorted(assignment.tasks_of(rank))
    assert deal(tuple(workloads), ranks) == assignment


@given(WORKLOADS, st.integers(1, 9))
def test_the_busiest_rank_has_at_most_one_task_more_than_its_share(workloads: list[int], ranks: int) -> None:
    assignment = deal(workloads, ranks)
    longest = max(assignment.loads)
    assert longest <= sum(workloads) / ranks + max(workloads) * (1 - 1 / ranks) + 1e-9
    assert assignment.imbalance == pytest.approx(longest * ranks / sum(workloads))


@given(st.integers(2, 3), st.lists(st.integers(1, 9), min_size=2, max_size=7))
def test_the_busiest_rank_is_within_graham_s_bound_of_the_best_schedule(ranks: int, workloads: list[int]) -> None:
    loads = {(0,) * ranks}
    for work in workloads:
        loads = {
            tuple(sorted((*load[:rank], load[rank] + work, *load[rank + 1 :])))
            for load in loads
            for rank in range(ranks)
        }
    best = min(max(load) for load in loads)
    assert max(deal(workloads, ranks).loads) <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9


def test_ties_go_to_the_lower_number() -> None:
    assert deal([1, 1, 1, 1], 2).owners == (0, 1, 0, 1)
    assert deal([2, 5, 5, 1], 2).owners == (0, 0, 1, 1)
    assert deal([3], 3).owners == (0,)


def test_ranks_without_a_task_are_idle() -> None:
    assignment = deal([4, 2], 4)
    assert assignment.idle_ranks == (2, 3)
    assert assignment.imbalance == pytest.approx(4 * 4 / 6)
    assert deal([4, 2], 2).idle_ranks == ()


@pytest.mark.parametrize(("workloads", "ranks"), [([], 2), ([1], 0), ([1, 0], 2), ([1, -1], 2)])
def test_what_cannot_be_dealt(workloads: list[int], ranks: int) -> None:
    with pytest.raises(GeometryError, match="cannot deal"):
        deal(workloads, ranks)
