# SPDX-License-Identifier: Apache-2.0
"""Autoencoders of pictures on shards: sizes between latents, attention where it can and cannot be, batches."""

import copy
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL
from diffusers.models.attention_processor import AttnProcessor

from tests.helpers.vaes import VAES, decisions, latents, noise, on_ranks, pixels, run_public, tiny_vae
from vllm_omni_vae.autoencoders import Operation
from vllm_omni_vae.config import VaeParallelMode
from vllm_omni_vae.errors import RankError
from vllm_omni_vae.tiny.common import randomize

HEIGHT, WIDTH, GRID = (VaeParallelMode(f"spatial_shard_{axis}") for axis in ("height", "width", "grid"))
ENCODE, DECODE = Operation.ENCODE, Operation.DECODE
NAMES = ["flux.1", "sdxl", "flux.2"]


def untiled(vae: Any, operation: Operation, x: torch.Tensor) -> torch.Tensor:
    alone = copy.deepcopy(vae)
    alone.disable_tiling()
    return run_public(alone, operation, x)


def sharded(vae: Any, operation: Operation, x: torch.Tensor, mode: VaeParallelMode, ranks: int) -> torch.Tensor:
    """The owner's result, after every rank is seen to have taken ``mode``."""

    def body(mine: Any, rank: int) -> torch.Tensor:
        taken = decisions(mine)
        result = run_public(mine, operation, x)
        assert [(decision.strategy.value, decision.chunk) for decision in taken] == [(mode.value, 1)]
        return result

    return on_ranks(ranks, vae, body, mode=mode)[0]


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max() / wanted.abs().max()) <= 1e-12


def kl(**layers: Any) -> AutoencoderKL:
    """A float64 VAE with what `VAES` has for SDXL, but for ``layers``."""
    made = randomize(AutoencoderKL(**{**VAES["sdxl"].layers, **layers}), torch.Generator().manual_seed(0))
    torch.nn.Module.to(made, torch.float64)
    made.enable_tiling()
    return made


@pytest.mark.parametrize(
    ("mode", "ranks", "height", "width", "batch"),
    [
        (HEIGHT, 2, 61, 107, 1),
        (HEIGHT, 3, 31, 47, 2),
        (HEIGHT, 4, 39, 8, 1),
        (WIDTH, 3, 61, 107, 1),
        (WIDTH, 5, 15, 47, 1),
        (GRID, 4, 61, 107, 2),
        (GRID, 6, 31, 44, 1),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_pixels_between_latents(
    name: str, mode: VaeParallelMode, ranks: int, height: int, width: int, batch: int
) -> None:
    vae = tiny_vae(name, torch.float64)
    x = pixels(vae, 1, height, width, batch=batch)
    assert near(sharded(vae, ENCODE, x, mode, ranks), untiled(vae, ENCODE, x))


def test_61x107_latents() -> None:
    vae = tiny_vae("flux.2", torch.float64)
    z = latents(vae, 1, 61, 107)
    assert near(sharded(vae, DECODE, z, GRID, 4), untiled(vae, DECODE, z))


@pytest.mark.parametrize("name", NAMES)
def test_items_of_a_batch_one_by_one(name: str) -> None:
    vae = tiny_vae(name, torch.float64)
    vae.enable_slicing()
    x, z = pixels(vae, 1, 45, 56, batch=2), latents(vae, 1, 5, 7, batch=2)
    assert near(sharded(vae, ENCODE, x, GRID, 4), untiled(vae, ENCODE, x))
    assert near(sharded(vae, DECODE, z, WIDTH, 3), untiled(vae, DECODE, z))


@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize("attends", [True, False])
def test_keys_are_gathered_if_there_is_attention(attends: bool, operation: Operation) -> None:
    vae = kl(mid_block_add_attention=attends)
    x = pixels(tiny_vae("sdxl"), 1, 61, 40).double() if operation is ENCODE else noise(1, 4, 7, 5).double()

    def body(mine: Any, rank: int) -> tuple[torch.Tensor, bool]:
        result = run_public(mine, operation, x)
        groups = mine.parallel_state.groups
        return result, "all_gather_uneven" in groups.work.traffic.collectives

    ranks = on_ranks(2, vae, body, mode=HEIGHT)
    assert near(ranks[0][0], untiled(vae, operation, x))
    assert [gathered for _, gathered in ranks] == [attends, attends]


def attentive() -> AutoencoderKL:
    """A VAE that attends at every scale."""
    return kl(down_block_types=("AttnDownEncoderBlock2D",) * 4, up_block_types=("AttnUpDecoderBlock2D",) * 4)


@pytest.mark.parametrize(("mode", "ranks"), [(HEIGHT, 3), (GRID, 4)])
def test_attention_above_latent_scale(mode: VaeParallelMode, ranks: int) -> None:
    vae = attentive()
    x, z = noise(1, 3, 40, 24).double(), noise(2, 4, 5, 3).double()
    assert near(sharded(vae, ENCODE, x, mode, ranks), untiled(vae, ENCODE, x))
    assert near(sharded(vae, DECODE, z, mode, ranks), untiled(vae, DECODE, z))


@pytest.mark.parametrize(("height", "width"), [(41, 24), (40, 28), (47, 31)])
@pytest.mark.parametrize(("mode", "ranks"), [(HEIGHT, 2), (WIDTH, 3), (GRID, 4)])
def test_attention_above_latent_scale_is_refused_where_pixels_are_no_whole_latents(
    mode: VaeParallelMode, ranks: int, height: int, width: int
) -> None:
    vae = attentive()
    x, whole = noise(1, 3, height, width).double(), noise(1, 3, 40, 24).double()
    expected = untiled(vae, ENCODE, whole)

    def body(mine: Any, rank: int) -> tuple[str, torch.Tensor]:
        with pytest.raises(RankError) as caught:
            run_public(mine, ENCODE, x)
        return str(caught.value), run_public(mine, ENCODE, whole)

    for reason, after in on_ranks(ranks, vae, body, mode=mode):
        assert "UnsupportedError: attention over" in reason
        assert "is no whole number of latents; crop or pad it to one" in reason
        assert near(after, expected)


@pytest.mark.parametrize("operation", list(Operation))
def test_attention_that_a_shard_does_not_see_is_refused(operation: Operation) -> None:
    vae = kl()
    vae.set_attn_processor(AttnProcessor())
    x = noise(1, 3, 64, 40).double() if operation is ENCODE else noise(1, 4, 8, 5).double()

    def body(mine: Any, rank: int) -> None:
        with pytest.raises(RankError, match="AutoencoderKL attends over space in a way that a shard does not see"):
            run_public(mine, operation, x)

    on_ranks(2, vae, body, mode=HEIGHT)


def test_what_moves_is_rows_statistics_and_keys() -> None:
    vae = kl()
    z = noise(1, 4, 8, 6).double()

    def body(mine: Any, rank: int) -> Any:
        run_public(mine, DECODE, z)
        return mine.parallel_state.groups.work.traffic

    upper, lower = on_ranks(2, vae, body, mode=HEIGHT)
    # 8 rows of latents in two pieces; 8 channels; each 3x3 convolution sends one row of what it sees to the neighbour:
    # conv_in (4 channels), 4 in the middle, 4 in each of 4 levels, one after each of 3 enlargements, conv_out.
    widths = [6] * 4 + [6] * 4 + [12] + [12] * 4 + [24] + [24] * 4 + [48] + [48] * 4 + [48]
    rows = 4 * 6 + 8 * sum(widths)
    keys = 2 * 8 * 4 * 6
    result = 3 * 32 * 48
    assert upper.bytes == 8 * (rows + keys)
    assert lower.bytes == upper.bytes + 8 * result
