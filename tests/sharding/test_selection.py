# SPDX-License-Identifier: Apache-2.0
"""Which strategy a request gets, for every mode: from shapes and configuration alone."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_vae.autoencoders import Decision, Operation, Strategy, select_strategy
from vllm_omni_vae.config import VaeParallelMode
from vllm_omni_vae.geometry import AxisTiling, TileGrid

HEIGHT, WIDTH, GRID, AUTO, TILE = (
    VaeParallelMode.SPATIAL_SHARD_HEIGHT,
    VaeParallelMode.SPATIAL_SHARD_WIDTH,
    VaeParallelMode.SPATIAL_SHARD_GRID,
    VaeParallelMode.AUTO,
    VaeParallelMode.TILE,
)
FORCED = (HEIGHT, WIDTH, GRID)


def tiles_of(latents: tuple[int, int]) -> TileGrid:
    """Tiles of 4 latents every 3."""
    axis = AxisTiling(4, 3)
    return TileGrid((AxisTiling(None), axis, axis), (2, *latents))


def chosen(
    mode: VaeParallelMode, ranks: int, latents: tuple[int, int], *, can_shard: bool = True, tiled: bool = True
) -> Decision:
    return select_strategy(
        Operation.DECODE, mode, tiles_of(latents) if tiled else None, ranks, latents=latents, can_shard=can_shard
    )


@pytest.mark.parametrize(
    ("mode", "ranks", "latents", "rank_grid"),
    [
        (HEIGHT, 2, (5, 9), (2, 1)),
        (HEIGHT, 4, (4, 90), (4, 1)),
        (HEIGHT, 3, (3, 1), (3, 1)),
        (WIDTH, 2, (9, 5), (1, 2)),
        (WIDTH, 4, (90, 4), (1, 4)),
        (WIDTH, 8, (1, 8), (1, 8)),
        (GRID, 4, (5, 9), (2, 2)),
        (GRID, 6, (9, 9), (2, 3)),
        (GRID, 6, (9, 2), (3, 2)),
        (GRID, 8, (90, 160), (2, 4)),
        (GRID, 8, (90, 3), (4, 2)),
        (GRID, 8, (9, 1), (8, 1)),
        (GRID, 2, (9, 9), (1, 2)),
        (GRID, 2, (9, 1), (2, 1)),
        (GRID, 3, (9, 9), (1, 3)),
        (GRID, 3, (9, 2), (3, 1)),
        (GRID, 12, (9, 9), (3, 4)),
        (GRID, 9, (9, 9), (3, 3)),
    ],
)
def test_a_forced_mode_is_that_mode(
    mode: VaeParallelMode, ranks: int, latents: tuple[int, int], rank_grid: tuple[int, int]
) -> None:
    """Of several grids the squarest that fits wins, and of two such the one with fewer rows."""
    decision = chosen(mode, ranks, latents)
    assert (decision.strategy.value, decision.rank_grid) == (mode.value, rank_grid)
    assert (decision.fallback, decision.reason, decision.sharded) == (False, "as configured", True)
    assert (decision.grid, decision.tiles_per_rank, decision.idle_ranks) == ((1, 1, 1), (), ())


@pytest.mark.parametrize(
    ("mode", "ranks", "latents"),
    [
        (HEIGHT, 2, (1, 9)),
        (HEIGHT, 4, (3, 90)),
        (WIDTH, 2, (9, 1)),
        (WIDTH, 3, (90, 2)),
        (GRID, 4, (1, 3)),
        (GRID, 4, (3, 1)),
        (GRID, 6, (1, 5)),
        (GRID, 5, (4, 4)),
        (GRID, 7, (6, 6)),
    ],
)
def test_a_request_too_small_for_a_forced_mode_falls_back_to_tiles_and_to_nothing_else(
    mode: VaeParallelMode, ranks: int, latents: tuple[int, int]
) -> None:
    decision = chosen(mode, ranks, latents)
    assert (decision.strategy, decision.fallback, decision.sharded) == (Strategy.TILE, True, False)
    assert mode.value in decision.reason
    assert f"{latents[0]}x{latents[1]} latents" in decision.reason
    assert f"{ranks} ranks" in decision.reason
    assert decision.grid == tiles_of(latents).shape
    assert sum(decision.tiles_per_rank) == len(tiles_of(latents))
    assert len(decision.tiles_per_rank) == ranks


@pytest.mark.parametrize(
    ("ranks", "latents", "strategy", "rank_grid"),
    [
        (2, (9, 10), Strategy.SPATIAL_SHARD_WIDTH, (1, 2)),
        (2, (10, 9), Strategy.SPATIAL_SHARD_HEIGHT, (2, 1)),
        (2, (9, 9), Strategy.SPATIAL_SHARD_WIDTH, (1, 2)),
        (3, (40, 8), Strategy.SPATIAL_SHARD_HEIGHT, (3, 1)),
        (2, (1, 9), Strategy.SPATIAL_SHARD_WIDTH, (1, 2)),
        (3, (90, 160), Strategy.SPATIAL_SHARD_WIDTH, (1, 3)),
        # From 4 ranks on a grid wins where its seams are shorter: 12 + 12 against 3 * 12.
        (4, (12, 12), Strategy.SPATIAL_SHARD_GRID, (2, 2)),
        (4, (90, 160), Strategy.SPATIAL_SHARD_GRID, (2, 2)),
        (8, (90, 160), Strategy.SPATIAL_SHARD_GRID, (2, 4)),
        (6, (30, 30), Strategy.SPATIAL_SHARD_GRID, (2, 3)),
        # 3 * 10 along the width against 10 + 20 for the grid: as long, so the line stays; 3 * 10 against 10 + 21 too.
        (4, (10, 20), Strategy.SPATIAL_SHARD_WIDTH, (1, 4)),
        (4, (10, 21), Strategy.SPATIAL_SHARD_WIDTH, (1, 4)),
        (4, (10, 19), Strategy.SPATIAL_SHARD_GRID, (2, 2)),
        (4, (21, 10), Strategy.SPATIAL_SHARD_HEIGHT, (4, 1)),
        (4, (20, 10), Strategy.SPATIAL_SHARD_HEIGHT, (4, 1)),
        (5, (30, 30), Strategy.SPATIAL_SHARD_WIDTH, (1, 5)),
        # No line fits but a grid does.
        (4, (3, 3), Strategy.SPATIAL_SHARD_GRID, (2, 2)),
        (9, (5, 7), Strategy.SPATIAL_SHARD_GRID, (3, 3)),
        # The longer axis is too short for all ranks only if both are.
        (3, (1, 3), Strategy.SPATIAL_SHARD_WIDTH, (1, 3)),
    ],
)
def test_auto_takes_the_shortest_seams(
    ranks: int, latents: tuple[int, int], strategy: Strategy, rank_grid: tuple[int, int]
) -> None:
    decision = chosen(AUTO, ranks, latents)
    assert (decision.strategy, decision.rank_grid) == (strategy, rank_grid)
    assert not decision.fallback
    assert decision.reason.startswith("auto: ")


@pytest.mark.parametrize(("ranks", "latents"), [(2, (1, 1)), (4, (1, 3)), (3, (2, 2)), (5, (4, 4)), (8, (3, 3))])
def test_auto_takes_tiles_where_no_shard_fits(ranks: int, latents: tuple[int, int]) -> None:
    decision = chosen(AUTO, ranks, latents)
    assert (decision.strategy, decision.fallback, decision.sharded) == (Strategy.TILE, False, False)
    assert decision.reason == (
        f"auto: {latents[0]}x{latents[1]} latents cannot give each of {ranks} ranks a row or column"
    )


def test_auto_of_a_family_without_shards_takes_tiles() -> None:
    decision = chosen(AUTO, 2, (9, 9), can_shard=False)
    assert (decision.strategy, decision.fallback) == (Strategy.TILE, False)
    assert "what this family can run" in decision.reason


@pytest.mark.parametrize("mode", list(VaeParallelMode))
def test_what_diffusers_would_not_tile_runs_directly(mode: VaeParallelMode) -> None:
    decision = chosen(mode, 4, (3, 3), tiled=False)
    assert (decision.strategy, decision.fallback, decision.sharded) == (Strategy.DIRECT, False, False)
    assert decision.rank_grid == (1, 1)


def test_tiles_stay_tiles() -> None:
    decision = chosen(TILE, 2, (90, 160))
    assert (decision.strategy, decision.fallback, decision.reason) == (Strategy.TILE, False, "as configured")


@pytest.mark.parametrize(
    ("ranks", "latents", "chunk"),
    [
        (2, (16, 16), 1),  # 16 x 8 positions a rank
        (2, (16, 15), 1),
        (2, (9, 16), 2),  # 9 x 8
        (2, (8, 16), 2),
        (2, (7, 18), 2),  # 7 x 9, but two ranks hold four frames of half as much as one rank of the whole
        (2, (8, 8), 2),
        (4, (8, 8), 4),
        (2, (1, 2), 2),
        (8, (9, 9), 4),
        (4, (90, 160), 1),
    ],
)
def test_small_shards_take_several_latent_frames_at_a_time(ranks: int, latents: tuple[int, int], chunk: int) -> None:
    assert chosen(WIDTH, ranks, latents).chunk == chunk


@pytest.mark.parametrize(
    ("mode", "ranks", "rank_grid"),
    [(WIDTH, 2, (1, 2)), (WIDTH, 3, None), (HEIGHT, 3, (3, 1)), (GRID, 4, (2, 2)), (GRID, 8, None), (AUTO, 3, (3, 1))],
)
def test_every_rank_has_as_much_as_the_family_needs(
    mode: VaeParallelMode, ranks: int, rank_grid: tuple[int, int] | None
) -> None:
    latents = (9, 14)
    decision = select_strategy(
        Operation.DECODE, mode, tiles_of(latents), ranks, latents=latents, can_shard=True, thinnest=(3, 7)
    )
    if rank_grid:
        assert decision.rank_grid == rank_grid
    else:
        assert (decision.strategy, decision.fallback) == (Strategy.TILE, True)
        assert decision.reason == f"{mode}: 9x14 latents cannot give each of {ranks} ranks 3 rows or 7 columns"


def test_a_single_frame_is_taken_alone() -> None:
    axis = AxisTiling(4, 3)
    tiles = TileGrid((AxisTiling(None), axis, axis), (1, 8, 8))
    decision = select_strategy(Operation.DECODE, WIDTH, tiles, 2, latents=(8, 8), can_shard=True)
    assert (decision.strategy, decision.chunk) == (Strategy.SPATIAL_SHARD_WIDTH, 1)
    assert "latent frame" not in str(decision)


@pytest.mark.parametrize(
    ("mode", "ranks", "latents", "imbalance"),
    [(WIDTH, 2, (4, 8), 1.0), (WIDTH, 2, (4, 9), 1.1111), (HEIGHT, 8, (90, 160), 1.0667), (GRID, 4, (3, 3), 1.7778)],
)
def test_imbalance_is_the_largest_shard_over_the_mean(
    mode: VaeParallelMode, ranks: int, latents: tuple[int, int], imbalance: float
) -> None:
    assert chosen(mode, ranks, latents).imbalance == imbalance


@settings(max_examples=60)
@given(
    mode=st.sampled_from(list(VaeParallelMode)),
    ranks=st.integers(2, 12),
    latents=st.tuples(st.integers(1, 24), st.integers(1, 24)),
    operation=st.sampled_from(list(Operation)),
)
def test_every_shard_has_a_latent_and_every_decision_its_words(
    mode: VaeParallelMode, ranks: int, latents: tuple[int, int], operation: Operation
) -> None:
    decision, again = (
        select_strategy(operation, mode, tiles_of(latents), ranks, latents=latents, can_shard=True) for _ in range(2)
    )
    assert decision == again
    assert hash(decision) == hash(again)
    rows, cols = decision.rank_grid
    if decision.sharded:
        assert rows * cols == ranks
        assert rows <= latents[0]
        assert cols <= latents[1]
        assert decision.coverage == 1.0
        assert decision.imbalance >= 1.0
        assert f"{rows}x{cols} ranks" in str(decision)
        assert (f"{decision.chunk} latent frames at a time" in str(decision)) == (decision.chunk > 1)
    else:
        assert decision.strategy is Strategy.TILE
        assert sum(decision.tiles_per_rank) == len(tiles_of(latents))
    if mode in FORCED:
        assert decision.fallback != (decision.strategy.value == mode.value)
        if mode is not GRID:
            long = latents[0] if mode is HEIGHT else latents[1]
            assert decision.fallback == (long < ranks)
    else:
        assert not decision.fallback
    assert decision.reason in str(decision)
    assert str(decision).startswith(f"{operation}: {decision.strategy}")
    told = json.loads(json.dumps(decision.to_json()))
    assert (told["strategy"], told["rank_grid"], told["chunk"]) == (decision.strategy, [rows, cols], decision.chunk)


@settings(max_examples=60)
@given(ranks=st.integers(4, 12), latents=st.tuples(st.integers(1, 40), st.integers(1, 40)))
def test_auto_is_never_longer_in_its_seams_than_a_line(ranks: int, latents: tuple[int, int]) -> None:
    decision = chosen(AUTO, ranks, latents)
    if not decision.sharded:
        return
    rows, cols = decision.rank_grid
    seams = (rows - 1) * latents[1] + (cols - 1) * latents[0]
    lines = [(ranks - 1) * other for own, other in (latents, latents[::-1]) if own >= ranks]
    longer = max(latents)
    if longer >= ranks:
        assert seams <= min(lines)
