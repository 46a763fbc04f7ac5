# SPDX-License-Identifier: Apache-2.0
"""One piece for each process: the bits of one rank that runs the same pieces, through the real executor."""

from typing import Any

import pytest
import torch

from tests.distributed.ranks import Worlds
from tests.helpers.vaes import VAES, decisions, latents, pixels, run_public, tiny_vae
from vllm_omni_vae.autoencoders import Operation, distribute, distributed_class, selftest
from vllm_omni_vae.autoencoders.compare import run_pieces_alone
from vllm_omni_vae.config import VaeSplits

pytestmark = pytest.mark.distributed

CONFIGS = ("wan2.2-ti2v-5b", "sdxl", "ltx-2")


def inputs(config: str, operation: Operation) -> list[torch.Tensor]:
    """Two items that are cut both ways, and a strip; encoded pixels go beyond the last latent where they can."""
    vae, tiny = tiny_vae(config), VAES[config]
    if operation is Operation.DECODE:
        return [latents(vae, 1, 5, 7, batch=2), latents(vae, 2, 2, 9)]
    more = 3 if tiny.unit == 1 else 0
    frames = (tiny.frames(1) or (1,))[0]
    return [
        pixels(vae, frames, 5 * tiny.ratio + more, 7 * tiny.ratio + more, batch=2),
        pixels(vae, frames, 2 * tiny.ratio, 9 * tiny.ratio),
    ]


def split(rank: int, size: int, *, config: str, margin: int) -> Any:
    """Case: both operations on one VAE, against the same pieces on one rank."""
    vae = distribute(tiny_vae(config), size=size, splits=VaeSplits(margin, margin))
    alone = tiny_vae(config)
    alone.__class__ = distributed_class(alone)
    taken = decisions(vae)
    found = []
    for operation in Operation:
        for x in inputs(config, operation):
            arguments = VAES[config].given(operation)
            before = vae.parallel_state.groups.work.traffic.messages
            result = run_public(vae, operation, x, **arguments)
            same = run_pieces_alone(alone, operation, x, arguments, taken[-1])
            found.append(
                {
                    "equal": torch.equal(result, same),
                    "is here": result.shape == same.shape,
                    "messages": vae.parallel_state.groups.work.traffic.messages - before,
                    "decision": taken[-1].to_json(),
                }
            )
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("config", CONFIGS)
def test_bits_of_one_rank(config: str, size: int, worlds: Worlds) -> None:
    grids = {2: [[1, 1, 2], [1, 1, 2]], 3: [[1, 1, 3], [1, 1, 3]], 4: [[1, 2, 2], [1, 2, 2]]}[size]
    for rank, found in enumerate(worlds[size].run(split, config=config, margin=1)):
        assert [one["decision"]["strategy"] for one in found] == ["rank_split"] * 4
        assert [one["decision"]["grid"] for one in found] == grids * 2
        assert [one["decision"]["tiles_per_rank"] for one in found] == [[1] * size] * 4
        assert [one["equal"] for one in found] == [True, True, rank == 0, rank == 0]
        assert [one["is here"] for one in found] == [True, True, rank == 0, rank == 0]


def in_turns(rank: int, size: int) -> Any:
    """Case: ranks [1, 2] of three share; split, tiles and a shard in turns, and a rank that fails in its piece."""
    vae = distribute(tiny_vae(), size=2, group=[1, 2], broadcast_result=True, splits=VaeSplits(decode=2))
    z = latents(vae, 1, 4, 9)
    first = vae.decode(z).sample
    state = vae.parallel_state
    kind, taken = type(vae), decisions(vae)
    run = kind.tile_exec

    def odd(self: Any, task: Any, **arguments: Any) -> torch.Tensor:
        if rank == 2:
            raise ValueError("a piece fell over")
        return run(self, task, **arguments)

    kind.tile_exec = odd
    try:
        vae.decode(z)
        raise AssertionError("nothing was raised")
    except RuntimeError as error:
        reason = str(error)
    finally:
        kind.tile_exec = run
    state.splits = VaeSplits()
    tiles = vae.decode(z).sample
    state.splits = VaeSplits(decode=2)
    again = vae.decode(z).sample
    (told,) = {one.strategy.value for one in taken[-1:]}
    checked = [one.decision.strategy.value for one in selftest(vae) if one.holds]
    return {
        "same again": torch.equal(first, again),
        "tiles differ": not torch.equal(first, tiles),
        "reason": reason,
        "last": told,
        "checked": checked,
    }


def test_a_failure_in_a_piece_and_the_calls_after_it(worlds: Worlds) -> None:
    found = worlds[3].run(in_turns)
    assert found[0] == found[1] == found[2]
    assert "ValueError: a piece fell over" in found[0].pop("reason")
    assert found[0] == {
        "same again": True,
        "tiles differ": True,
        "last": "rank_split",
        "checked": ["tile", "tile", "rank_split"],
    }
