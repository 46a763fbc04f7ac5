# SPDX-License-Identifier: Apache-2.0
"""Random numbers on a shard: the whole map's noise on every grid of ranks, and refusals by name of all other draws."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.sharding.spread import Spread, noise, results
from vllm_omni_vae.distributed import LocalCommunicator, NullCommunicator
from vllm_omni_vae.errors import UnsupportedError
from vllm_omni_vae.geometry import Partition, RankGrid
from vllm_omni_vae.sharding import ShardLayout, SpatialShard

LATENTS = (5, 7)
SPREADS = [Spread(*grid, LATENTS) for grid in ((1, 1), (2, 1), (1, 2), (3, 1), (1, 4), (2, 2))]
SEED = 7


def drawn(generator: torch.Generator, height: int, width: int, calls: int, **kwargs: Any) -> list[torch.Tensor]:
    """What ``calls`` draws in a row give, in the three ways to say a size."""
    size = torch.Size((height, width))
    ways: list[Callable[[], torch.Tensor]] = [
        lambda: torch.randn(size, generator=generator, **kwargs),
        lambda: torch.randn(height, width, generator=generator, **kwargs),
        lambda: torch.randn(size=(height, width), generator=generator, **kwargs),
    ]
    return [ways[call % len(ways)]() for call in range(calls)]


@pytest.mark.parametrize("spread", SPREADS, ids=str)
@pytest.mark.parametrize("scale", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_rank_has_its_part_of_the_same_noise(spread: Spread, scale: int, dtype: torch.dtype) -> None:
    alone = torch.Generator().manual_seed(SEED)
    height, width = (extent * scale for extent in LATENTS)
    wholes = drawn(alone, height, width, 3, dtype=dtype)
    after = torch.randn(3, generator=alone)

    def body(comm: LocalCommunicator, shard: SpatialShard) -> Any:
        mine = torch.Generator().manual_seed(SEED)
        rows, cols = shard.layout.latents
        with shard:
            parts = drawn(mine, rows * scale, cols * scale, 3, dtype=dtype)
        return parts, torch.randn(3, generator=mine)

    ran = spread.each(body)
    for parts, following in results(ran):
        assert torch.equal(following, after), "the generator went as far as on one rank"
        assert [part.dtype for part in parts] == [dtype] * 3
    for i, whole in enumerate(wholes):
        for (parts, _), expected in zip(results(ran), spread.pieces(whole, scale), strict=True):
            assert torch.equal(parts[i], expected)
    assert not any(one.traffic.messages or one.traffic.collectives for one in ran), "no message was needed"


def refused(spread: Spread, call: Callable[[torch.Tensor], Any], name: str) -> None:
    """Every rank refuses ``call`` by ``name`` and sends nothing."""
    for one in spread.run(call, noise(1, 2, *LATENTS)):
        assert isinstance(one.error, UnsupportedError), one.error
        assert name in str(one.error)
        assert not one.traffic.messages


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("randn of (4, 4)", lambda x: torch.randn(4, 4)),
        ("randn of (2, 5, 7)", lambda x: torch.randn(2, 5, 7)),
        ("randn of", lambda x: torch.randn(x.shape)),
        ("randn of", lambda x: torch.randn(x.shape[-2:], out=torch.empty(x.shape[-2:]))),
        ("randn of", lambda x: torch.randn(2 * x.shape[-2], x.shape[-1])),
        ("randn of (4,)", lambda x: torch.randn(4)),
        ("randn_like", torch.randn_like),
        ("rand_like", torch.rand_like),
        ("randint_like", lambda x: torch.randint_like(x, 3)),
        ("rand ", lambda x: torch.rand(x.shape[-2:])),
        ("randint ", lambda x: torch.randint(3, x.shape[-2:])),
        ("randperm", lambda x: torch.randperm(4)),
        ("normal ", lambda x: torch.normal(x, 1.0)),
        ("bernoulli ", lambda x: torch.bernoulli(x.sigmoid())),
        ("poisson", lambda x: torch.poisson(x.abs())),
        ("multinomial", lambda x: torch.multinomial(x[0, 0].abs(), 1)),
        ("normal_", lambda x: torch.empty_like(x).normal_()),
        ("uniform_", lambda x: torch.empty_like(x).uniform_()),
        ("bernoulli_", lambda x: torch.empty_like(x).bernoulli_()),
        ("exponential_", lambda x: torch.empty_like(x).exponential_()),
        ("random_", lambda x: torch.empty_like(x).random_()),
        ("gumbel_softmax", F.gumbel_softmax),
        ("dropout in training", F.dropout),
        ("dropout in training", lambda x: torch.dropout(x, 0.1, True)),
        ("dropout in training", torch.nn.Dropout(0.1)),
        ("dropout2d in training", torch.nn.Dropout2d(0.1)),
        ("alpha_dropout in training", lambda x: F.alpha_dropout(x, 0.1, training=True)),
        ("attention with dropout", lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)),
        ("attention with dropout", lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.1)),
    ],
)
def test_other_draws_are_refused_by_name(name: str, call: Callable[[torch.Tensor], Any]) -> None:
    refused(Spread(2, 2, LATENTS), call, name)


@pytest.mark.parametrize(
    "call",
    [
        torch.nn.Dropout(0.0),
        torch.nn.Dropout(0.5).eval(),
        torch.nn.Dropout3d(0.5).eval(),
        lambda x: F.dropout(x, 0.0, True),
        lambda x: F.dropout(x, p=0.5, training=False),
        lambda x: torch.dropout(x, 0.5, False),
        lambda x: F.alpha_dropout(x, 0.5),
    ],
)
def test_dropout_that_drops_nothing_is_local(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    spread, whole = Spread(1, 2, LATENTS), noise(1, 2, 1, *LATENTS)
    for got, piece in zip(results(spread.run(call, whole)), spread.pieces(whole), strict=True):
        assert torch.equal(got, piece)


def test_an_input_with_a_remainder_is_refused_on_every_rank() -> None:
    # Ranks before the last cannot tell how large the whole is.
    def body(comm: LocalCommunicator, shard: SpatialShard) -> None:
        with shard:
            torch.randn(shard.layout.latents)

    spread = Spread(1, 2, LATENTS)
    assert results(spread.each(body)) == [None, None]
    for rank in range(2):
        layout = ShardLayout(RankGrid(1, 2), Partition(5, 1), Partition(7, 2), rank, remainder=True)
        with pytest.raises(UnsupportedError, match="randn"), SpatialShard(NullCommunicator(rank, 2), layout):
            torch.randn(layout.latents)
