# SPDX-License-Identifier: Apache-2.0
"""Every family's whole networks on shards, through the public calls, against un-tiled diffusers on one rank."""

import copy
from typing import Any

import pytest
import torch

from tests.helpers.vaes import RELEASED, VAES, decisions, latents, on_ranks, pixels, run_public, tiny_vae
from vllm_omni_vae.autoencoders import Operation
from vllm_omni_vae.config import VaeParallelMode

HEIGHT, WIDTH, GRID = (VaeParallelMode(f"spatial_shard_{axis}") for axis in ("height", "width", "grid"))
SPREADS = [*((mode, ranks) for mode in (HEIGHT, WIDTH) for ranks in (2, 3, 4)), (GRID, 4)]
SHAPES = [(2, 5, 7, 1), (1, 9, 5, 2), (1, 4, 11, 1), (1, 13, 4, 1)]
"""Latent frames, rows and columns, and batch; uneven on every spread but for the thin ones, a row or column a rank."""
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5}


def given(name: str, vae: Any, operation: Operation, time: int, height: int, width: int, batch: int) -> torch.Tensor:
    """Input of so many latents, as the public method takes it."""
    tiny = VAES[name]
    if operation is Operation.DECODE:
        return latents(vae, time, height, width, batch=batch)
    frames = (tiny.frames(time) or (1,))[0]
    return pixels(vae, frames, height * tiny.ratio, width * tiny.ratio, batch=batch)


def untiled(vae: Any, operation: Operation, x: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """What diffusers gives on one rank without tiles."""
    alone = copy.deepcopy(vae)
    alone.disable_tiling()
    return run_public(alone, operation, x, **arguments)


def sharded(vae: Any, operation: Operation, x: torch.Tensor, mode: VaeParallelMode, ranks: int, **more: Any) -> Any:
    """The owner's result, after every rank is seen to have taken ``mode``."""

    def body(mine: Any, rank: int) -> torch.Tensor:
        taken = decisions(mine)
        result = run_public(mine, operation, x, **more)
        assert [decision.strategy.value for decision in taken] == [mode.value]
        return result

    return on_ranks(ranks, vae, body, mode=mode)[0]


def scaled_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    assert got.shape == wanted.shape
    assert wanted.isfinite().all()
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())


def rms_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).square().mean().sqrt())


@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize(("mode", "ranks"), SPREADS)
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", RELEASED)
def test_is_the_untiled_result(
    name: str, dtype: torch.dtype, mode: VaeParallelMode, ranks: int, operation: Operation
) -> None:
    vae = tiny_vae(name, dtype)
    more = VAES[name].given(operation)
    for shape in SHAPES:
        x = given(name, vae, operation, *shape)
        wanted = untiled(vae, operation, x, **more)
        assert scaled_error(sharded(vae, operation, x, mode, ranks, **more), wanted) <= LIMITS[dtype], shape


@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize(("mode", "ranks"), [(HEIGHT, 3), (GRID, 4)])
@pytest.mark.parametrize("name", RELEASED)
def test_bfloat16_is_as_near_to_float32_as_untiled_bfloat16(
    name: str, mode: VaeParallelMode, ranks: int, operation: Operation
) -> None:
    exact, vae = tiny_vae(name), tiny_vae(name, torch.bfloat16)
    more = VAES[name].given(operation)
    x = given(name, vae, operation, *SHAPES[0])
    reference = untiled(exact, operation, x.float(), **more)
    got = sharded(vae, operation, x, mode, ranks, **more)
    assert got.dtype == torch.bfloat16
    assert rms_error(got, reference) <= 1.1 * rms_error(untiled(vae, operation, x, **more), reference)


BIT_EQUAL = {
    **{(name, operation): SPREADS for name in ("ltx-2", "ltx-2.3") for operation in Operation},
    **{
        (name, operation): [(HEIGHT, 2), (HEIGHT, 3), (HEIGHT, 4)]
        for name in ("wan2.1", "wan2.2-a14b", "wan2.2-ti2v-5b", "qwen-image")
        for operation in Operation
    },
    **{(name, Operation.ENCODE): [(HEIGHT, 2), (HEIGHT, 3), (HEIGHT, 4)] for name in ("flux.1", "sdxl", "flux.2")},
}
"""Where bfloat16 on the CPU adds in the same order as un-tiled: always without norms and attention over positions."""


@pytest.mark.parametrize(("name", "operation"), BIT_EQUAL)
def test_bfloat16_is_the_untiled_result_bit_for_bit(name: str, operation: Operation) -> None:
    vae = tiny_vae(name, torch.bfloat16)
    more = VAES[name].given(operation)
    for shape in SHAPES[:2]:
        x = given(name, vae, operation, *shape)
        wanted = untiled(vae, operation, x, **more)
        for mode, ranks in BIT_EQUAL[name, operation]:
            assert torch.equal(sharded(vae, operation, x, mode, ranks, **more), wanted), (shape, mode, ranks)
