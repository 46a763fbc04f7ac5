# SPDX-License-Identifier: Apache-2.0
"""Percentiles of repeats, and what ranks saw brought together."""

import pytest

from vllm_omni_vae.config import IN_TILES, VaeParallelMode, VaeSplits, VaeTileMerge
from vllm_omni_vae.measure.arms import Arm, Kind, arms_of
from vllm_omni_vae.measure.messages import ArmSeen, Comparison, Difference, RankSeen, Work
from vllm_omni_vae.measure.result import OperationResult, gather_arms
from vllm_omni_vae.measure.statistics import Spread, slowest

TILE, WIDTH = VaeParallelMode.TILE, VaeParallelMode.SPATIAL_SHARD_WIDTH
NONE = Difference(0.0, 0.0)


@pytest.mark.parametrize(
    ("values", "spread"),
    [
        ([3.0], Spread(3.0, 3.0, 3.0)),
        ([2.0, 1.0], Spread(1.5, 1.1, 1.9)),
        ([float(n) for n in range(10, -1, -1)], Spread(5.0, 1.0, 9.0)),
        ([7.0] * 4, Spread(7.0, 7.0, 7.0)),
    ],
)
def test_percentiles_lie_between_values(values: list[float], spread: Spread) -> None:
    found = Spread.of(values)
    assert (found.median, found.p10, found.p90) == pytest.approx((spread.median, spread.p10, spread.p90))


def test_of_each_repeat_the_slowest_rank_counts() -> None:
    assert slowest([[1.0, 5.0, 3.0], [2.0, 4.0, 3.0]]) == [2.0, 5.0, 3.0]


def test_every_arm_has_a_name_of_its_own_and_shards_have_bounds() -> None:
    arms = arms_of([TILE, WIDTH], bounds=True)
    assert [arm.name for arm in arms] == [
        "direct",
        "sequential_tiles",
        "tile",
        "spatial_shard_width",
        "spatial_shard_width/no_messages",
    ]
    assert [arm.alone for arm in arms] == [True, True, False, False, False]
    assert arms_of([TILE, WIDTH], bounds=False) == arms[:-1]
    assert len({arm.title for arm in arms}) == len(arms)


def test_each_merge_of_tiles_is_an_arm() -> None:
    arms = arms_of([TILE, WIDTH], bounds=False, merges=list(VaeTileMerge))
    assert [arm.name for arm in arms[2:]] == ["tile", "tile/sum", "spatial_shard_width"]
    assert [arm.title for arm in arms[2:]] == ["tile", "tile/sum", "spatial_shard_width"]


def test_each_margin_of_pieces_is_an_arm_that_takes_the_place_of_tiles() -> None:
    arms = arms_of([TILE, WIDTH], bounds=True, margins=[0, 2])
    assert [arm.name for arm in arms[-2:]] == [arm.title for arm in arms[-2:]] == ["rank_split/0", "rank_split/2"]
    assert [arm.strategy for arm in arms[2:]] == ["tile", *["spatial_shard_width"] * 2, *["rank_split"] * 2]
    assert [arm.splits for arm in arms[-3:]] == [IN_TILES, VaeSplits(0, 0), VaeSplits(2, 2)]


def test_two_ranks_are_one_result() -> None:
    arms = (Arm(Kind.UNTILED), Arm(Kind.SHARED, WIDTH))
    fine = Comparison(NONE, NONE, "untiled", 1e-7, 1e-6)
    first = {
        "direct": ArmSeen([4.0, 6.0], [3.0, 5.0], 70, 10, comparison=Comparison(NONE, NONE)),
        "spatial_shard_width": ArmSeen([2.0, 1.0], [1.0, 1.0], 40, 10, 3, 30, 8, 5, {"gather": 1}, {"a": 1}, fine),
    }
    second = {
        "direct": ArmSeen([0.0, 0.0], [0.0, 0.0]),
        "spatial_shard_width": ArmSeen([1.0, 3.0], [1.5, 0.5], 50, 10, 4, 31, 0, 6, {"gather": 1}, {"a": 1}),
    }
    ranks = [RankSeen("cpu", "gloo", 1, 99, {"decode": seen}) for seen in (first, second)]
    alone, shared = gather_arms(Work("decode", (1,), arms), ranks)
    assert (alone.wall_s.median, alone.cpu_s.median, alone.peak_bytes) == (5.0, 4.0, (70, 0))
    assert (shared.wall_s.median, shared.cpu_s.median, shared.peak_bytes) == (2.5, 1.25, (40, 50))
    assert (shared.messages, shared.bytes, shared.broadcast_bytes) == ((3, 4), (30, 31), (8, 0))
    assert (shared.reduced_bytes, shared.incremental_peak_bytes) == ((5, 6), (30, 40))
    assert alone.incremental_peak_bytes == (60, 0)
    told = OperationResult("decode", (1,), (2,), (alone, shared), {}, "").to_json()["arms"]
    assert told["spatial_shard_width"]["speed"] == 2.0
    assert told["spatial_shard_width"]["incremental_peak_bytes"] == (30, 40)
    assert told["spatial_shard_width"]["comparison"]["promise"] == "holds"
    assert told["direct"]["comparison"]["promise"] is None


@pytest.mark.parametrize(
    ("error", "limit", "broken"),
    [(0.0, 0.0, False), (1e-9, 0.0, True), (float("nan"), 1.0, True), (float("inf"), 1.0, True)],
)
def test_a_promise_is_kept_up_to_its_limit_and_by_numbers_alone(error: float, limit: float, broken: bool) -> None:
    assert Comparison(NONE, NONE, "tiles", error, limit).broken is broken
