# SPDX-License-Identifier: Apache-2.0
"""Which rank makes which part of a result, as a decision tells it."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_vae.autoencoders import Decision, Operation, select_strategy
from vllm_omni_vae.config import VaeParallelMode
from vllm_omni_vae.geometry import AxisScale, AxisTiling, Partition, TileGrid

EXTENTS = st.tuples(st.integers(1, 40), st.integers(1, 40))


def tiles_of(latents: tuple[int, int]) -> TileGrid:
    """Tiles of 4 latents every 3, 8 pixels a latent; time in 2 latents, the first of which stands alone."""
    axis = AxisTiling(4, 3, AxisScale(up=8))
    return TileGrid((AxisTiling(2, 1, AxisScale(up=4, causal=True), lead=1), axis, axis), (3, *latents))


@given(EXTENTS, st.integers(1, 9))
def test_every_tile_has_its_rank_and_the_part_that_is_kept_of_it(latents: tuple[int, int], ranks: int) -> None:
    tiles = tiles_of(latents)
    decision = select_strategy(Operation.DECODE, VaeParallelMode.TILE, tiles, ranks)
    assert tuple(decision.owners.count(rank) for rank in range(ranks)) == decision.tiles_per_rank
    assert tuple(len(edges) - 1 for edges in decision.edges) == decision.grid
    for edges, extent in zip(decision.edges, tiles.out_extents, strict=True):
        assert (edges[0], edges[-1]) == (0, extent)
        assert list(edges) == sorted(set(edges))


@given(EXTENTS, st.integers(2, 9))
def test_every_rank_of_a_shard_has_its_piece(latents: tuple[int, int], ranks: int) -> None:
    mode = VaeParallelMode.SPATIAL_SHARD_GRID
    decision = select_strategy(
        Operation.ENCODE, mode, tiles_of(latents), ranks, latents=latents, can_shard=True, chunked=False
    )
    if decision.fallback:
        return
    assert decision.owners == tuple(range(ranks))
    time, *space = decision.edges
    assert time == (0, 1)
    for edges, extent, parts in zip(space, latents, decision.rank_grid, strict=True):
        assert edges == (*Partition(extent, parts).starts, extent)


def test_what_is_not_divided_has_no_parts() -> None:
    decision = select_strategy(Operation.DECODE, VaeParallelMode.AUTO, None, 4)
    assert (decision.owners, decision.edges) == ((), ())


def test_parts_tell_no_two_decisions_apart() -> None:
    decision: Decision = select_strategy(Operation.DECODE, VaeParallelMode.TILE, tiles_of((9, 9)), 2)
    moved = dataclasses.replace(decision, edges=((0, 9), (0, 40, 72), (0, 40, 72)))
    assert moved == decision and hash(moved) == hash(decision)
