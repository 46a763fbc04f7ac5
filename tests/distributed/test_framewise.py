# SPDX-License-Identifier: Apache-2.0
"""Clips cut in height, width and time: processes give what one rank makes of the same tiles, and no bit differs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.ranks import Worlds
from tests.helpers.vaes import decisions, latents, on_ranks, pixels, run_public, tiny_vae
from vllm_omni_vae.autoencoders import Operation, distribute
from vllm_omni_vae.config import TileExtent

pytestmark = pytest.mark.distributed


def framewise(rank: int, size: int, *, operation: str, file: str) -> Any:
    """Case: the clips of ``file`` on one VAE, one after the other."""
    vae = distribute(tiny_vae("ltx-2.3"), size=size, broadcast_result=True)
    vae.spec.set_tiling(vae, TileExtent(32, 32, 16), TileExtent(24, 24, 8))
    taken = decisions(vae)
    equal = [torch.equal(run_public(vae, Operation(operation), x), expected) for x, expected in torch.load(file)]
    return equal, [(decision.strategy.value, list(decision.grid)) for decision in taken]


@pytest.mark.parametrize("operation", list(Operation))
def test_is_the_same_on_any_number_of_ranks(operation: Operation, worlds: Worlds, tmp_path: Path) -> None:
    plain = tiny_vae("ltx-2.3")
    clips = [
        pixels(plain, frames, height * 8, width * 8, seed=frames)
        if operation is Operation.ENCODE
        else latents(plain, 1 + (frames - 1) // 8, height, width, seed=frames)
        for frames, height, width in ((33, 5, 6), (17, 3, 4), (49, 4, 7))
    ]

    def alone(vae: Any, rank: int) -> list[torch.Tensor]:
        vae.spec.set_tiling(vae, TileExtent(32, 32, 16), TileExtent(24, 24, 8))
        return [run_public(vae, operation, x) for x in clips]

    torch.save(list(zip(clips, on_ranks(1, plain, alone)[0], strict=True)), tmp_path / "clips")
    for size in (2, 3, 4):
        for equal, taken in worlds[size].run(framewise, operation=operation.value, file=str(tmp_path / "clips")):
            assert equal == [True] * 3
            assert taken == [["tile", [4, 2, 2]], ["tile", [2, 1, 1]], ["tile", [6, 2, 3]]]
