# SPDX-License-Identifier: Apache-2.0
"""LTX-2 on processes: no bit differs from diffusers' tiles, for every causal setting and number of frames."""

import itertools
from typing import Any

import pytest
import torch

from tests.distributed.ranks import Worlds
from tests.helpers.vaes import decisions, latents, pixels, run_public, tiny_vae
from vllm_omni_vae.autoencoders import Operation, distribute
from vllm_omni_vae.errors import GeometryError

pytestmark = pytest.mark.distributed

CAUSAL = (True, False, None)
FRAMES = (1, 9, 17, 33)
STEP, RATIO = 8, 8


def frames(rank: int, size: int, *, file: str) -> Any:
    """Case: encode and decode of everything in ``file``; what differs at most."""
    vae = distribute(tiny_vae("ltx-2.3"), size=size, broadcast_result=True)
    taken = decisions(vae)
    found = []
    for causal, operation, x, expected in torch.load(file):
        result = run_public(vae, Operation(operation), x, causal=causal)
        assert result.shape == expected.shape
        found.append(float((result - expected).abs().max()))
    assert {(one.strategy.value, one.grid) for one in taken} == {("tile", (1, 2, 2))}
    return found


@pytest.fixture(scope="module")
def sequential(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of inputs, for every setting, with what diffusers' own tiles make of them on one rank."""
    plain = tiny_vae("ltx-2.3")
    cases = []
    for causal, count in itertools.product(CAUSAL, FRAMES):
        z = latents(plain, 1 + (count - 1) // STEP, 5, 7)
        for operation, x in ((Operation.ENCODE, pixels(plain, count, 5 * RATIO, 7 * RATIO)), (Operation.DECODE, z)):
            with torch.no_grad():
                made = run_public(plain, operation, x, causal=causal)
            assert made.any()
            cases.append((causal, operation.value, x, made))
    file = tmp_path_factory.mktemp("sequential") / "tiles"
    torch.save(cases, file)
    return str(file)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_no_bit_differs_on_any_rank(size: int, worlds: Worlds, sequential: str) -> None:
    for found in worlds[size].run(frames, file=sequential):
        assert found == [0.0] * 2 * len(CAUSAL) * len(FRAMES)


def five(rank: int, size: int) -> str:
    """Case: frames that are no 1 + 8k are refused before anything runs, and the next call is right."""
    plain = tiny_vae("ltx-2.3")
    vae = distribute(tiny_vae("ltx-2.3"), size=size)
    with pytest.raises(GeometryError) as caught:
        vae.encode(pixels(plain, 5, 5 * RATIO, 7 * RATIO))
    x = pixels(plain, 9, 5 * RATIO, 7 * RATIO)
    assert torch.equal(vae.encode(x).latent_dist.parameters, plain.encode(x).latent_dist.parameters)
    return str(caught.value)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_5_frames_are_refused_with_the_nearest(size: int, worlds: Worlds) -> None:
    (message,) = set(worlds[size].run(five))
    assert message == "AutoencoderKLLTX2Video encodes 1 + 8k frames, not 5; give 1 or 9"
