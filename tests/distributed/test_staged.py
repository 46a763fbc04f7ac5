# SPDX-License-Identifier: Apache-2.0
"""Messages that go through the memory of the CPU arrive as they do otherwise."""

from typing import Any

import pytest
import torch

from tests.distributed.ranks import Worlds
from tests.helpers.vaes import decisions, latents, pixels, run_public, tiny_vae
from vllm_omni_vae.autoencoders import Operation, ParallelState, distribute
from vllm_omni_vae.config import VaeParallelMode
from vllm_omni_vae.measure.transport import StagedCommunicator, staged_groups

pytestmark = pytest.mark.distributed


def both_ways(rank: int, size: int, *, mode: str, operation: str) -> Any:
    """Case: one call as it is, and one that is staged."""
    vae = distribute(tiny_vae(), size=size, mode=mode)
    way = Operation(operation)
    x = latents(vae, 2, 6, 7) if way is Operation.DECODE else pixels(vae, 5, 48, 56)
    plain = run_public(vae, way, x)
    groups = staged_groups(vae.parallel_state.groups)
    vae._vae_parallel = ParallelState(groups, VaeParallelMode(mode), False)
    taken = decisions(vae)
    staged = run_public(vae, way, x)
    kinds = {type(comm) for comm in (groups.work, groups.domain, groups.halo)}
    return [
        torch.equal(plain, staged),
        [one.strategy.value for one in taken],
        [kind.__name__ for kind in kinds] == [StagedCommunicator.__name__],
    ]


@pytest.mark.parametrize("operation", ["encode", "decode"])
@pytest.mark.parametrize("mode", ["tile", "spatial_shard_width"])
def test_staged_messages_arrive(worlds: Worlds, mode: str, operation: str) -> None:
    assert worlds[2].run(both_ways, mode=mode, operation=operation) == [[True, [mode], True]] * 2
