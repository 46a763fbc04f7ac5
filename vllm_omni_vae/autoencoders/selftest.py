# SPDX-License-Identifier: Apache-2.0
"""Run every strategy that a distributed autoencoder may take on small inputs, before it is relied on."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch

from ..config import IN_TILES, TileExtent, VaeParallelMode, VaeSplits
from ..errors import DisagreementError, GeometryError, RankError, SelfTestError, UnsupportedError
from ..geometry import RankGrid
from .compare import Comparison, Trial, compare, left_alone
from .policy import Strategy
from .spec import FamilySpec, Operation
from .state import ParallelState

logger = logging.getLogger(__name__)

_SIZE, _STRIDE = 4, 3
"""Latents of a tile and to the next one: small, with an overlap, and with leftovers that every family takes."""

_CLIPS = {False: (3, 2, 1), True: (2, 1)}
"""Latent frames of a shard, and of tiles: more than one use the cache; the next where a family cannot do so many."""

_SHARDS = (
    VaeParallelMode.SPATIAL_SHARD_HEIGHT,
    VaeParallelMode.SPATIAL_SHARD_WIDTH,
    VaeParallelMode.SPATIAL_SHARD_GRID,
)
_REMEDY = (
    ". It is not served so; take another vae_parallel_mode or one VAE rank, or switch the self-test off "
    "(--no-vae-selftest) to have it all the same"
)


def selftest(vae: Any, name: str = "vae") -> tuple[Comparison, ...]:
    """Collective over all ranks that call ``vae``. Check here, with its weights and ranks, what its mode promises.

    For encode and decode, each strategy that the mode may take runs on noise of a few latents, in uneven pieces or
    ragged tiles, and is compared with what one rank makes alone (see `Comparison`). The ranks must be between calls;
    ``vae`` comes out as it went in. On the output rank a copy of it in float64 exists for a moment.

    Args:
        vae: As `distribute` returned it; one that is not shared has nothing to be checked.
        name: What to call it in messages.

    Returns:
        What was found, the same on every rank.

    Raises:
        SelfTestError: a strategy does not give what it promises, or cannot be run; on every rank alike.
    """
    state: ParallelState | None = getattr(vae, "parallel_state", None)
    if state is None:
        return ()
    found = []
    with left_alone(vae):
        if VaeParallelMode.TILE in vae.spec.modes:
            _set_small_tiles(vae)
        for operation in vae.spec.operations:
            for mode, splits in _ways(vae.spec, state, operation):
                one = _check(vae, state, operation, mode, splits, name)
                if one is not None:
                    found.append(one)
    if vae.device.type != "cpu":
        torch.accelerator.memory.empty_cache()
    broken = [one for one in found if not one.holds]
    if broken:
        raise SelfTestError("; ".join(_verdict(name, one) for one in broken) + _REMEDY)
    if state.is_output_rank:
        logger.info("self-test of %s: %s", name, summary(found))
    return tuple(found)


def summary(found: Sequence[Comparison]) -> str:
    """Checks that were passed, in a few words: how many, and the one that came nearest to its limit."""
    if not found:
        return "nothing to check"
    checks = f"{len(found)} check" + "s" * (len(found) != 1)
    judged = [one for one in found if one.limit]
    if not judged:
        return f"{checks}, bit-equal"
    worst = max(judged, key=lambda one: one.error / one.limit)
    return f"{checks}, worst {worst.error:.1e} of {worst.limit:.1e}"


def _check(
    vae: Any, state: ParallelState, operation: Operation, mode: VaeParallelMode, splits: VaeSplits, name: str
) -> Comparison | None:
    """Collective. One comparison; None where this autoencoder never does ``operation`` so."""
    shape = _request(vae, state, operation, mode, splits)
    if shape is None:
        return None
    meant = Strategy.RANK_SPLIT if splits.margin(operation) is not None else Strategy(mode.value)
    try:
        one = compare(vae, operation, shape, mode, splits=splits)
    except (RankError, DisagreementError) as error:
        known = error.reason if isinstance(error, RankError) and error.reason.startswith("RankError: ") else str(error)
        why = known.removeprefix("RankError: ")  # the ranks that work had agreed on it before all did
        raise SelfTestError(f"self-test of {name}: {operation} with {meant} fails: {why}{_REMEDY}") from error
    if one.decision.strategy is meant:
        return one
    if state.is_output_rank:
        logger.warning("self-test of %s: %s is not checked, because this ran: %s", name, meant, one.decision)
    return None


def _ways(spec: FamilySpec, state: ParallelState, operation: Operation) -> list[tuple[VaeParallelMode, VaeSplits]]:
    """Strategies that ``operation`` may take, as modes and splits that force them.

    A shard falls back to tiles, or to what is split by rank in their place, and that to tiles where it is too small.
    """
    shards = [state.mode] if state.mode in _SHARDS else []
    if state.mode is VaeParallelMode.AUTO:
        flat = state.size < 4 or RankGrid.squarest(state.size).rows == 1
        shards = list(_SHARDS[:2] if flat else _SHARDS)
    ways = [(mode, IN_TILES) for mode in (*shards, VaeParallelMode.TILE) if mode in spec.modes]
    return ways if state.splits.margin(operation) is None else [*ways, (VaeParallelMode.TILE, state.splits)]


def _set_small_tiles(vae: Any) -> None:
    probe = 8
    pixels = vae.spec.example(vae, Operation.ENCODE, (1, probe, probe))[-1] // probe
    size, stride = (TileExtent(n * pixels, n * pixels) for n in (_SIZE, _STRIDE))
    vae.spec.set_tiling(vae, size, stride)


def _request(
    vae: Any, state: ParallelState, operation: Operation, mode: VaeParallelMode, splits: VaeSplits
) -> tuple[int, ...] | None:
    """Shape of a small public input that is shared so; None where the family refuses all or can tell none."""
    tiles = mode is VaeParallelMode.TILE
    least: tuple[int, int, int] = vae.spec.least_latents(vae, operation)
    extents = _tiled_extents(vae, state, operation) if tiles else _sharded_extents(state, mode, least[1:])
    for frames in _CLIPS[tiles] if vae.spec.has_time else (1,):
        try:
            latents = tuple(map(max, (frames, *extents), least))
            shape: tuple[int, ...] = vae.spec.example(vae, operation, latents)
            vae.spec.check(vae, operation, shape)
            tiled = vae.spec.is_tiled(vae, operation, shape)
            seen = vae.spec.seen_extents(vae, operation, shape) if tiled else None
            vae.decide(Trial(state, mode, splits), operation, seen)
        except (GeometryError, UnsupportedError):
            continue
        return shape
    return None


def _sharded_extents(state: ParallelState, mode: VaeParallelMode, least: tuple[int, int]) -> tuple[int, int]:
    """Latent rows and columns of which each rank has two or three, or ``least`` if more; none as many as all others."""
    grid = {
        VaeParallelMode.SPATIAL_SHARD_HEIGHT: RankGrid(state.size, 1),
        VaeParallelMode.SPATIAL_SHARD_WIDTH: RankGrid(1, state.size),
    }.get(mode, RankGrid.squarest(state.size))
    return max(2, least[0]) * grid.rows + 1, max(2, least[1]) * grid.cols + 1


def _tiled_extents(vae: Any, state: ParallelState, operation: Operation) -> tuple[int, int]:
    """Latent rows and columns in two rows of ragged tiles, enough for every rank."""
    _, height, width = vae.spec.tiling(vae, operation)
    unit = vae.spec.tile_unit(vae, operation)
    size, stride = (n // unit for n in (width.size, width.stride))
    columns = max(2, -(-state.size // 2))
    return height.size // unit + 1, size + 1 + (columns - 2) * stride


def _verdict(name: str, one: Comparison) -> str:
    what = f"self-test of {name}: {one.decision.operation} with {one.decision.strategy}"
    if math.isnan(one.limit):
        return f"{what} cannot be judged, because one rank alone makes values that are not finite in {one.dtype}"
    if not one.limit:
        return f"{what} differs from the same on one rank by {one.error:.1e} of its largest value, and must not at all"
    return f"{what} is off by {one.error:.1e}, and at most {one.limit:.1e} is what {one.dtype} explains"
