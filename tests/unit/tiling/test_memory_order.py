# SPDX-License-Identifier: Apache-2.0
"""What comes of tiles lies in memory as diffusers leaves it, on which the rounding of what follows depends."""

import pytest
import torch

from tests.helpers.vaes import VAES, decisions, latents, on_ranks, pixels, run_public, tiny_vae
from vllm_omni_vae.autoencoders import Operation


@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize("name", ["wan2.1", "qwen-image", "flux.1", "flux.2"])
@torch.no_grad()
def test_channels_that_are_last_stay_so_where_diffusers_keeps_them(name: str, operation: Operation) -> None:
    plain = tiny_vae(name)
    x = latents(plain, 1, 7, 6) if operation is Operation.DECODE else pixels(plain, 1, 56, 48)
    x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    expected = run_public(plain, operation, x)
    if operation is Operation.DECODE:
        expected = VAES[name].finish(expected)

    def body(vae: object, rank: int) -> tuple[torch.Tensor | None, list[str]]:
        taken = decisions(vae)
        return run_public(vae, operation, x), [decision.strategy.value for decision in taken]

    for found, taken in on_ranks(2, plain, body, broadcast=True):
        assert taken == ["tile"]
        assert found is not None and torch.equal(found, expected)
        assert found.stride() == expected.stride()
