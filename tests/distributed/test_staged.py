# SPDX-License-Identifier: Apache-2.0
"""Messages that go through the memory of the CPU arrive as they do otherwise; who needs that."""

import dataclasses
from typing import Any

import pytest
import torch

from tests.distributed.ranks import Worlds
from tests.helpers.vaes import decisions, latents, pixels, run_public, tiny_vae
from vllm_omni_vae.autoencoders import Operation, ParallelState, distribute
from vllm_omni_vae.config import VaeParallelMode
from vllm_omni_vae.distributed import StagedCommunicator, VaeGroups
from vllm_omni_vae.worker.meeting import shared_backend

pytestmark = pytest.mark.distributed


def _staged(groups: VaeGroups) -> VaeGroups:
    comms: dict[str, Any] = {name: getattr(groups, name) for name in ("work", "domain", "halo")}
    return dataclasses.replace(groups, **{name: StagedCommunicator(comm.group) for name, comm in comms.items()})


def both_ways(rank: int, size: int, *, mode: str, operation: str) -> Any:
    """Case: one call as it is, and one that is staged."""
    vae = distribute(tiny_vae(), size=size, mode=mode)
    way = Operation(operation)
    x = latents(vae, 2, 6, 7) if way is Operation.DECODE else pixels(vae, 5, 48, 56)
    plain = run_public(vae, way, x)
    vae._vae_parallel = ParallelState(_staged(vae.parallel_state.groups), VaeParallelMode(mode), False)
    taken = decisions(vae)
    staged = run_public(vae, way, x)
    return [torch.equal(plain, staged), [one.strategy.value for one in taken]]


@pytest.mark.parametrize("operation", ["encode", "decode"])
@pytest.mark.parametrize("mode", ["tile", "spatial_shard_width"])
def test_staged_messages_arrive(worlds: Worlds, mode: str, operation: str) -> None:
    assert worlds[2].run(both_ways, mode=mode, operation=operation) == [[True, [mode]]] * 2


@pytest.mark.parametrize(
    ("devices", "backend"),
    [
        (["here/a", "here/b"], None),
        (["here/a", "here/a"], "gloo"),
        (["here/a", "here/b", "here/a"], "gloo"),
        (["here/0", "there/0"], None),
    ],
)
def test_only_ranks_that_share_a_device_talk_through_the_cpu(devices: list[str], backend: str | None) -> None:
    assert shared_backend(devices) == backend
