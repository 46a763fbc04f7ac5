# SPDX-License-Identifier: Apache-2.0
"""Tiles that processes sum: diffusers' own up to the order of additions, by one reduction of the real backend."""

from typing import Any

import pytest
import torch

from tests.distributed.ranks import Worlds
from tests.helpers.vaes import VAES, decisions, latents, pixels, run_public, tiny_vae
from tests.unit.autoencoders.test_ltx2_time import framewise
from vllm_omni_vae.autoencoders import DistributedAutoencoderKLWan, Operation, distribute
from vllm_omni_vae.config import VaeTileMerge
from vllm_omni_vae.distributed import VaeGroups

pytestmark = pytest.mark.distributed

CONFIGS = ("wan2.1", "flux.1", "ltx-2.3")


def inputs(config: str, operation: Operation, dtype: torch.dtype) -> list[torch.Tensor]:
    """Two items with leftovers on both axes, and a single row of tiles."""
    vae, tiny = tiny_vae(config, dtype), VAES[config]
    extents = ((8, 9, 2), (4, 8, 1))
    if operation is Operation.DECODE:
        return [latents(vae, 2, height, width, batch=batch) for height, width, batch in extents]
    frames = (tiny.frames(2) or (1,))[0]
    return [pixels(vae, frames, h * tiny.ratio, w * tiny.ratio, batch=batch) for h, w, batch in extents]


def sent(groups: VaeGroups) -> tuple[int, int]:
    """Bytes brought to sums, and messages, by this rank so far; a result for all takes another group."""
    comms = [comm for comm in (groups.work, groups.domain) if comm is not None]
    return sum(comm.traffic.reduced_bytes for comm in comms), sum(comm.traffic.messages for comm in comms)


def summed(rank: int, size: int, *, config: str, operation: str, dtype: str, broadcast: bool) -> Any:
    """Case: how far each result is from diffusers' tiles, and what was sent for it."""
    way = Operation(operation)
    plain = tiny_vae(config, getattr(torch, dtype))
    vae = distribute(tiny_vae(config, getattr(torch, dtype)), size=size, merge="sum", broadcast_result=broadcast)
    groups = vae.parallel_state.groups
    taken = decisions(vae)
    found = []
    for x in inputs(config, way, vae.dtype):
        expected = run_public(plain, way, x)
        expected = VAES[config].finish(expected) if way is Operation.DECODE else expected
        before = sent(groups)
        result = run_public(vae, way, x)
        has_it = result.shape == expected.shape
        found.append(
            {
                "error": float((result - expected).abs().max() / expected.abs().max()) if has_it else None,
                "reduced": sent(groups)[0] - before[0],
                "messages": sent(groups)[1] - before[1],
                "whole": expected.nbytes,
                "decision": taken[-1].to_json(),
            }
        )
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("operation", ["encode", "decode"])
@pytest.mark.parametrize("config", CONFIGS)
def test_as_diffusers(config: str, operation: str, broadcast: bool, size: int, worlds: Worlds) -> None:
    ranks = worlds[size].run(summed, config=config, operation=operation, dtype="float64", broadcast=broadcast)
    everywhere = operation == "encode" or broadcast
    for rank, found in enumerate(ranks):
        for one in found:
            assert (one["decision"]["strategy"], one["decision"]["merge"]) == ("tile", "sum")
            assert one["decision"]["sent_bytes"] == one["whole"]
            assert one["reduced"] == (one["whole"] if everywhere or rank else 0)
            assert one["messages"] == 0
            if everywhere or rank == 0:
                assert one["error"] <= 1e-12
            else:
                assert one["error"] is None


@pytest.mark.parametrize("operation", ["encode", "decode"])
def test_half_types(operation: str, worlds: Worlds) -> None:
    for found in worlds[3].run(summed, config="wan2.1", operation=operation, dtype="bfloat16", broadcast=True):
        assert all(one["error"] <= 8 * torch.finfo(torch.bfloat16).eps for one in found)


def long_clip(rank: int, size: int, *, operation: str) -> Any:
    """Case: height, width and time in one pool, blended and summed."""
    way = Operation(operation)
    results = []
    for merge in VaeTileMerge:
        vae = framewise("ltx-2.3", 24, 16, torch.float64)
        x = latents(vae, 7, 6, 5) if way is Operation.DECODE else pixels(vae, 49, 48, 40)
        distribute(vae, size=size, merge=merge, broadcast_result=True)
        taken = decisions(vae)
        results.append(run_public(vae, way, x))
        assert (taken[0].merge, min(taken[0].grid)) == (merge, 2)
    blended, added = results
    return float((blended - added).abs().max() / blended.abs().max())


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("operation", ["encode", "decode"])
def test_a_pool_over_height_width_and_time(operation: str, size: int, worlds: Worlds) -> None:
    assert max(worlds[size].run(long_clip, operation=operation)) <= 1e-12


def failing(rank: int, size: int) -> Any:
    """Case: one rank fails in a tile; the next call is right, on a working group that is smaller than the world."""
    vae = distribute(tiny_vae("wan2.1", torch.float64), size=size - 1, merge="sum", broadcast_result=True)
    plain = tiny_vae("wan2.1", torch.float64)
    z = latents(plain, 2, 8, 9)
    run = DistributedAutoencoderKLWan.tile_exec

    def odd(self: Any, task: Any, **arguments: Any) -> torch.Tensor:
        if rank == 1 and task.tile_id > 1:
            raise ValueError("odd")
        return run(self, task, **arguments)

    said = ""
    try:
        DistributedAutoencoderKLWan.tile_exec = odd  # type: ignore[method-assign]
        vae.decode(z)
    except Exception as error:
        said = str(error)
    finally:
        DistributedAutoencoderKLWan.tile_exec = run  # type: ignore[method-assign]
    expected, result = plain.decode(z).sample, vae.decode(z).sample
    return said, float((result - expected).abs().max() / expected.abs().max())


def test_one_rank_fails_and_the_next_call_is_right_also_on_a_rank_outside(worlds: Worlds) -> None:
    for said, error in worlds[3].run(failing):
        assert "rank 1 failed: ValueError: odd" in said
        assert error <= 1e-12
