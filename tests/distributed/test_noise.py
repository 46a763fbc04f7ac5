# SPDX-License-Identifier: Apache-2.0
"""A decoder that injects noise, on shards: every rank draws from a generator of its own, which a thread has not."""

from typing import Any

import pytest
import torch

from tests.distributed.ranks import Worlds
from tests.helpers.vaes import decisions, latents, tiny_vae
from vllm_omni_vae.autoencoders import distribute
from vllm_omni_vae.errors import DisagreementError

pytestmark = pytest.mark.distributed

EXTENTS = (2, 5, 6)
SEED = 11


def clip(vae: Any) -> torch.Tensor:
    return latents(vae, *EXTENTS, batch=2)


def noisy(rank: int, size: int, *, mode: str) -> Any:
    """Case: two samples in a row and a draw after them, then ranks whose generators differ."""
    vae = distribute(tiny_vae("ltx-2 noise", torch.float64), size=size, mode=mode, broadcast_result=True)
    taken = decisions(vae)
    z = clip(vae)
    torch.manual_seed(SEED)
    samples = [vae.decode(z).sample.tolist() for _ in range(2)]
    after = torch.randn(3).tolist()
    torch.manual_seed(rank)
    try:
        vae.decode(z)
        refusal = ""
    except DisagreementError as error:
        refusal = str(error)
    return samples, after, [decision.strategy.value for decision in taken], refusal


@pytest.mark.parametrize(
    ("mode", "size"),
    [
        ("spatial_shard_height", 2),
        ("spatial_shard_width", 3),
        ("spatial_shard_grid", 4),
        ("spatial_shard_width", 4),
    ],
)
def test_is_the_noise_of_one_rank(mode: str, size: int, worlds: Worlds) -> None:
    plain = tiny_vae("ltx-2 noise", torch.float64, tiled=False)
    torch.manual_seed(SEED)
    with torch.no_grad():
        wanted = [plain.decode(clip(plain)).sample for _ in range(2)]
    after = torch.randn(3).tolist()
    assert float((wanted[0] - wanted[1]).abs().max()) > 0.01, "the noise is seen"
    for samples, following, taken, refusal in worlds[size].run(noisy, mode=mode):
        assert taken == [mode] * 3
        for got, whole in zip(samples, wanted, strict=True):
            error = (torch.tensor(got, dtype=torch.float64) - whole).abs().max() / whole.abs().max()
            assert float(error) <= 1e-12
        assert following == after, "the generators went as far as on one rank"
        assert "random state" in refusal
