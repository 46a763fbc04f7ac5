# SPDX-License-Identifier: Apache-2.0
"""A forecast without values against the same call with values: integers, all of them equal."""

import copy
import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch

from tests.helpers.vaes import decisions, latents, on_ranks, pixels, tiny_vae
from vllm_omni_vae.autoencoders import Decision, DistributedAutoencoderKLWan, Operation
from vllm_omni_vae.autoencoders.cost import Forecast, Forecaster, run_rank
from vllm_omni_vae.autoencoders.dry_run import CountingCommunicator, LiveBytes
from vllm_omni_vae.config import VaeParallelMode, VaeTileMerge
from vllm_omni_vae.distributed import LocalCommunicator
from vllm_omni_vae.errors import GeometryError

TILE = VaeParallelMode.TILE
HEIGHT = VaeParallelMode.SPATIAL_SHARD_HEIGHT
WIDTH = VaeParallelMode.SPATIAL_SHARD_WIDTH
GRID = VaeParallelMode.SPATIAL_SHARD_GRID
BOTH = (Operation.DECODE, Operation.ENCODE)


def _without_values(vae: Any) -> Any:
    made = copy.deepcopy(vae).to("meta")
    made.__class__ = DistributedAutoencoderKLWan
    return made


def _input(vae: Any, operation: Operation, time: int, height: int, width: int, batch: int) -> torch.Tensor:
    """A public input of so many latents."""
    if operation is Operation.DECODE:
        return latents(vae, time, height, width, batch=batch)
    up = 2 ** sum(vae.config.temperal_downsample)
    ratio = vae.spatial_compression_ratio
    return pixels(vae, 1 + (time - 1) * up, height * ratio, width * ratio, batch=batch)


@dataclasses.dataclass(frozen=True)
class Sent:
    """What one rank of a real run decided and sent."""

    decision: Decision
    messages: int
    bytes: int
    attention_messages: int
    attention_bytes: int
    broadcast_bytes: int
    reduced_bytes: int
    collectives: dict[str, int]


def _really(
    vae: Any,
    operation: Operation,
    x: torch.Tensor,
    mode: VaeParallelMode,
    ranks: int,
    merge: VaeTileMerge = VaeTileMerge.BLEND,
) -> list[Sent]:
    def body(mine: Any, rank: int) -> Sent:
        comm = mine.parallel_state.groups.work
        attention = _watch_attention(comm)
        taken = decisions(mine)
        mine.encode(x) if operation is Operation.ENCODE else mine.decode(x)
        sent = comm.traffic
        return Sent(
            taken[0],
            sent.messages,
            sent.bytes,
            attention["messages"],
            attention["bytes"],
            sent.broadcast_bytes,
            sent.reduced_bytes,
            sent.collectives,
        )

    return on_ranks(ranks, vae, body, mode=mode, merge=merge)


def _watch_attention(comm: LocalCommunicator) -> Counter[str]:
    seen: Counter[str] = Counter()
    original = comm.all_gather_uneven

    def watched(*args: Any) -> Any:
        before = comm.traffic.messages, comm.traffic.bytes
        pieces = original(*args)
        seen["messages"] += comm.traffic.messages - before[0]
        seen["bytes"] += comm.traffic.bytes - before[1]
        return pieces

    comm.all_gather_uneven = watched  # type: ignore[method-assign]
    return seen


def _told(forecast: Forecast) -> list[Sent]:
    return [
        Sent(
            forecast.decision,
            use.messages,
            use.bytes,
            use.attention_messages,
            use.attention_bytes,
            use.broadcast_bytes,
            use.reduced_bytes,
            dict(use.collectives),
        )
        for use in forecast.uses
    ]


@pytest.mark.parametrize("operation", BOTH)
@pytest.mark.parametrize(
    ("mode", "ranks", "name", "size", "batch"),
    [
        (TILE, 2, "wan2.1", (2, 5, 4), 2),
        (TILE, 5, "wan2.2-ti2v-5b", (1, 5, 5), 1),
        (HEIGHT, 3, "wan2.1", (2, 7, 5), 2),
        (HEIGHT, 2, "wan2.2-ti2v-5b", (5, 5, 4), 1),
        (WIDTH, 5, "wan2.2-a14b", (2, 4, 12), 1),
        (WIDTH, 3, "half time", (5, 4, 7), 1),
        (GRID, 6, "wan2.1", (4, 5, 7), 1),
    ],
)
def test_what_is_sent_is_what_was_forecast(
    operation: Operation, mode: VaeParallelMode, ranks: int, name: str, size: tuple[int, int, int], batch: int
) -> None:
    vae = tiny_vae(name)
    x = _input(vae, operation, *size, batch)
    forecast = Forecaster(_without_values(vae), operation, tuple(x.shape)).forecast(mode, ranks)
    assert _told(forecast) == _really(vae, operation, x, mode, ranks)
    assert forecast.decision.strategy.value == mode.value
    for use, cost in zip(forecast.uses, forecast.cost.ranks, strict=True):
        assert (use.messages, use.bytes, use.broadcast_bytes) == (cost.messages, cost.bytes, cost.broadcast_bytes)
    assert forecast.cost.coverage == pytest.approx(forecast.decision.coverage, abs=1e-4)
    assert forecast.cost.imbalance == pytest.approx(forecast.decision.imbalance, abs=1e-4)


@pytest.mark.parametrize("operation", BOTH)
@pytest.mark.parametrize(("ranks", "name", "size", "batch"), [(2, "wan2.1", (2, 5, 4), 2), (4, "wan2.1", (1, 7, 8), 1)])
def test_what_is_summed_is_what_was_forecast(
    operation: Operation, ranks: int, name: str, size: tuple[int, int, int], batch: int
) -> None:
    vae, merge = tiny_vae(name), VaeTileMerge.SUM
    x = _input(vae, operation, *size, batch)
    forecaster = Forecaster(_without_values(vae), operation, tuple(x.shape))
    forecast = forecaster.forecast(TILE, ranks, merge)
    assert _told(forecast) == _really(vae, operation, x, TILE, ranks, merge)
    assert (forecast.decision.merge, forecast.cost.messages) == (merge, 0)
    assert [use.reduced_bytes for use in forecast.uses] == [cost.reduced_bytes for cost in forecast.cost.ranks]
    assert max(use.reduced_bytes for use in forecast.uses) == forecast.decision.sent_bytes
    blended = forecaster.forecast(TILE, ranks)
    assert blended.decision.merge is VaeTileMerge.BLEND
    assert blended.cost.reduced_bytes == 0


@pytest.mark.parametrize("operation", BOTH)
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_peak_of_a_sum_is_that_of_tensors_with_values(operation: Operation, ranks: int) -> None:
    vae, merge = tiny_vae("wan2.1"), VaeTileMerge.SUM
    vae.__class__ = DistributedAutoencoderKLWan
    shape = tuple(_input(vae, operation, 2, 5, 7, batch=2).shape)
    forecast = Forecaster(_without_values(vae), operation, shape).forecast(TILE, ranks, merge)
    for rank, use in enumerate(forecast.uses):
        real = run_rank(vae, operation, shape, TILE, CountingCommunicator(rank, ranks), None, merge=merge)
        assert use == real


@pytest.mark.parametrize("operation", BOTH)
@pytest.mark.parametrize("mode", [None, TILE, WIDTH])
@pytest.mark.parametrize("time", [1, 5])
def test_a_replayed_call_counts_like_one_that_ran(
    operation: Operation, mode: VaeParallelMode | None, time: int
) -> None:
    vae = _without_values(tiny_vae())
    shape = tuple(_input(vae, operation, time, 3, 5, batch=1).shape)
    forecaster = Forecaster(vae, operation, shape)
    uses = forecaster.forecast(mode, 2).uses if mode else forecaster.direct().uses
    for rank, use in enumerate(uses):
        assert use == run_rank(vae, operation, shape, mode, CountingCommunicator(rank, len(uses)), None)


@pytest.mark.parametrize("operation", BOTH)
@pytest.mark.parametrize(
    ("mode", "ranks", "name"),
    [
        (None, 1, "wan2.1"),
        (None, 1, "wan2.2-ti2v-5b"),
        (TILE, 3, "wan2.1"),
        (HEIGHT, 2, "wan2.2-ti2v-5b"),
        (GRID, 4, "wan2.1"),
    ],
)
def test_tensors_with_values_take_as_many_bytes(
    operation: Operation, mode: VaeParallelMode | None, ranks: int, name: str
) -> None:
    vae = tiny_vae(name)
    vae.__class__ = DistributedAutoencoderKLWan
    shape = tuple(_input(vae, operation, 2, 5, 7, batch=1).shape)
    forecaster = Forecaster(_without_values(vae), operation, shape)
    uses = forecaster.forecast(mode, ranks).uses if mode else forecaster.direct().uses
    for rank, use in enumerate(uses):
        assert use == run_rank(vae, operation, shape, mode, CountingCommunicator(rank, ranks), None)


def test_a_request_of_one_tile_runs_whole_on_every_rank() -> None:
    forecaster = Forecaster(_without_values(tiny_vae()), Operation.DECODE, (1, 4, 3, 4, 4))
    forecast, direct = forecaster.forecast(TILE, 3), forecaster.direct()
    assert forecast.decision.strategy == direct.decision.strategy == "direct"
    assert (forecast.cost.coverage, forecast.cost.speed_up_limit, forecast.cost.messages) == (3.0, 1.0, 0)
    assert {use.peak_bytes for use in forecast.uses} == {direct.peak_bytes}
    assert {use.network_calls for use in forecast.uses} == {3}


def test_a_forecast_leaves_the_autoencoder_as_it_was() -> None:
    vae = _without_values(tiny_vae())
    before = dict(vars(vae.decoder))
    Forecaster(vae, Operation.DECODE, (1, 4, 2, 5, 5)).forecast(WIDTH, 2)
    assert (vars(vae.decoder), vae.use_tiling, vae.is_distributed_enabled()) == (before, True, False)


@pytest.mark.parametrize("change", ["values", "tiling"])
def test_an_autoencoder_that_would_not_do_is_refused(change: str) -> None:
    vae = _without_values(tiny_vae())
    if change == "values":
        vae.to_empty(device="cpu")
    else:
        vae.use_tiling = False
    with pytest.raises(GeometryError):
        Forecaster(vae, Operation.DECODE, (1, 4, 2, 5, 5))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_live_bytes_rise_and_fall(device: str) -> None:
    with LiveBytes({}) as held:
        a = torch.empty(4, 8, device=device)
        view = a[1:]
        assert (held.live, held.peak) == (128, 128)
        del a
        assert held.live == 128
        for _ in range(2):
            both = torch.cat([view, view * 2])
            assert (held.live, held.peak) == (128 + 192, 128 + 96 + 192)
            del both
        del view
        assert held.live == 0
