# SPDX-License-Identifier: Apache-2.0
"""Ranks that exchange nothing."""

import pytest
import torch

from tests.helpers.vaes import decisions, latents, local_groups, tiny_vae
from vllm_omni_vae.autoencoders import DistributedAutoencoderKLWan, ParallelState
from vllm_omni_vae.config import VaeParallelMode
from vllm_omni_vae.distributed import LocalCommunicator, LocalWorld
from vllm_omni_vae.measure.transport import SilentCommunicator, silent_groups


def test_what_would_be_received_is_zeros() -> None:
    comm = SilentCommunicator(0, 2)
    buffer = torch.full((3,), float("nan"))
    comm.exchange([(1, torch.ones(2))], [(1, buffer)])
    assert buffer.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_one_rank_alone_runs_its_piece(rank: int) -> None:
    groups = local_groups(LocalCommunicator(LocalWorld(3), rank), output=1)
    silent = silent_groups(groups)
    assert (silent.workers, silent.output, silent.domain.rank) == (groups.workers, 1, rank)
    vae = tiny_vae()
    vae.__class__ = DistributedAutoencoderKLWan
    vae._vae_parallel = ParallelState(silent, VaeParallelMode.SPATIAL_SHARD_HEIGHT, False)
    taken = decisions(vae)
    with torch.no_grad():
        sample = vae.decode(latents(vae, 2, 7, 5)).sample
    assert [one.rank_grid for one in taken] == [(3, 1)]
    assert tuple(sample.shape) == ((1, 3, 5, 56, 40) if rank == 1 else (1, 3, 1, 1, 1))
    assert sample.isfinite().all()
