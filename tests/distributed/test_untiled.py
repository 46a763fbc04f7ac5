# SPDX-License-Identifier: Apache-2.0
"""VAEs without tiles on processes, through `distribute`: also noise, which threads would draw from one generator."""

from typing import Any

import pytest
import torch

from tests.distributed.ranks import Worlds
from tests.helpers.other_vaes import OTHERS
from tests.helpers.vaes import decisions
from vllm_omni_vae.autoencoders import Operation, distribute

pytestmark = pytest.mark.distributed

SEED = 11


def tiny(name: str) -> Any:
    return OTHERS[name].made()


def shared(rank: int, size: int, *, name: str, mode: str) -> Any:
    """Case: encode and decode."""
    other = OTHERS[name]
    vae = distribute(tiny(name), size=size, mode=mode, broadcast_result=True)
    taken = decisions(vae)
    torch.manual_seed(SEED)
    moments = vae.encode(other.given(Operation.ENCODE)).latent_dist.parameters
    sample = vae.decode(other.given(Operation.DECODE), **other.arguments(Operation.DECODE)).sample
    return moments.tolist(), sample.tolist(), [decision.strategy.value for decision in taken]


@pytest.mark.parametrize(
    ("name", "mode", "size"),
    [
        ("ltx noise", "spatial_shard_width", 2),
        ("ltx noise", "spatial_shard_grid", 4),
        ("hunyuan video", "spatial_shard_height", 3),
    ],
)
def test_is_the_result_of_one_rank(name: str, mode: str, size: int, worlds: Worlds) -> None:
    other, plain = OTHERS[name], tiny(name)
    torch.manual_seed(SEED)
    with torch.no_grad():
        moments = plain.encode(other.given(Operation.ENCODE)).latent_dist.parameters
        sample = plain.decode(other.given(Operation.DECODE), **other.arguments(Operation.DECODE)).sample
    for *got, taken in worlds[size].run(shared, name=name, mode=mode):
        assert taken == [mode] * 2
        for found, wanted in zip(got, (moments, sample), strict=True):
            error = (torch.tensor(found, dtype=torch.float64) - wanted).abs().max() / wanted.abs().max()
            assert float(error) <= 1e-12
