# SPDX-License-Identifier: Apache-2.0
"""What a shard may take in memory: the budget that ranks agree on, and what they choose with it."""

import dataclasses
import functools
from typing import Any

import pytest
import torch

from tests.helpers.vaes import VAES, local_groups
from vllm_omni_vae.autoencoders import (
    Decision,
    DistributedAutoencoderKLWan,
    Operation,
    ParallelState,
    Strategy,
    distributed_class,
    memory,
)
from vllm_omni_vae.autoencoders.cost import Forecaster
from vllm_omni_vae.autoencoders.memory import agreed_budget, free_bytes
from vllm_omni_vae.cli.full_size import FULL_SIZE
from vllm_omni_vae.config import VaeParallelMode
from vllm_omni_vae.distributed import LocalCommunicator, LocalWorld, NullCommunicator, VaeGroups

WIDTH, AUTO = VaeParallelMode.SPATIAL_SHARD_WIDTH, VaeParallelMode.AUTO
RANKS = 4
SEEN = (5, 8, 9)
"""Latent frames, rows and columns of which four ranks take four frames at a time."""


def blank(name: str = "wan2.1") -> Any:
    """The distributed VAE ``name`` without values."""
    tiny = VAES[name]
    with torch.device("meta"):
        vae = tiny.base(**tiny.layers)
    vae.__class__ = distributed_class(vae)
    vae.requires_grad_(False).eval().enable_tiling(*tiny.tile)
    return vae


def decided(budget: int | None, mode: VaeParallelMode = WIDTH) -> Decision:
    comm = NullCommunicator(0, RANKS)
    state = ParallelState(VaeGroups.over(comm), mode, False)
    state.budget = budget
    return blank().decide(state, Operation.DECODE, SEEN)


@functools.cache
def peak(chunk: int, mode: VaeParallelMode = WIDTH) -> int:
    shape = (1, 4, *SEEN)
    return Forecaster(blank(), Operation.DECODE, shape, chunk).forecast(mode, RANKS).peak_bytes


@pytest.fixture(autouse=True)
def nothing_is_too_small_to_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_PER_BYTE", 1 << 40)


def test_more_frames_at_a_time_take_more() -> None:
    assert peak(1) < peak(2) < peak(4)


@pytest.mark.parametrize("wanted", [4, 2, 1])
def test_as_many_frames_at_a_time_as_fit(wanted: int) -> None:
    exact = peak(wanted)
    decision = decided(exact)
    assert (decision.chunk, decision.peak_bytes) == (wanted, exact)
    assert decision.sent_bytes is not None and decision.sent_bytes > 0
    assert (decision.strategy, decision.reason) == (Strategy.SPATIAL_SHARD_WIDTH, "as configured")
    assert "peak 0.0 GiB a rank" in str(decision)


def test_auto_takes_tiles_where_no_shard_fits() -> None:
    least = peak(1, AUTO)
    assert decided(least, AUTO).sharded
    decision = decided(least - 1, AUTO)
    assert (decision.strategy, decision.fallback) == (Strategy.TILE, False)
    assert decision.reason.startswith("auto: a shard would take 0.0 GiB of the 0.0 GiB that are free on a rank")
    assert decision.peak_bytes is None


def test_a_forced_shard_is_taken_all_the_same_and_says_so() -> None:
    decision = decided(peak(1) - 1)
    assert (decision.strategy, decision.chunk, decision.peak_bytes) == (Strategy.SPATIAL_SHARD_WIDTH, 1, peak(1))
    assert decision.reason == (
        "as configured, though a shard would take 0.0 GiB of the 0.0 GiB that are free on a rank"
    )


def test_what_fits_in_any_case_is_not_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    decision = decided(8 << 30)
    assert (decision.chunk, decision.peak_bytes) == (4, None)
    assert decided(None) == decision


def test_a_forecast_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Counting(Forecaster):
        def __init__(self, *args: Any) -> None:
            made.append(args)
            super().__init__(*args)

    monkeypatch.setattr(memory, "Forecaster", Counting)
    comm = NullCommunicator(0, RANKS)
    state = ParallelState(VaeGroups.over(comm), WIDTH, False)
    state.budget = 1 << 40
    vae = blank()
    first = vae.decide(state, Operation.DECODE, SEEN)
    assert vae.decide(state, Operation.DECODE, SEEN) == first
    assert len(made) == 1
    vae.decide(state, Operation.DECODE, (5, 8, 10))
    assert len(made) == 2


def test_a_fixed_chunk_is_taken_as_it_is() -> None:
    comm = NullCommunicator(0, RANKS)
    state = ParallelState(VaeGroups.over(comm), WIDTH, False)
    state.budget, state.chunk = 1, 3
    decision = blank().decide(state, Operation.DECODE, SEEN)
    assert (decision.chunk, decision.reason) == (3, "as configured")


@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize(("ranks", "chunk"), [(2, 2), (4, 4)])
@pytest.mark.parametrize("name", ["wan2.1", "wan2.2-ti2v-5b"])
def test_no_rank_holds_as_much_as_one_rank_of_the_whole(
    name: str, ranks: int, chunk: int, operation: Operation
) -> None:
    with torch.device("meta"):
        vae = DistributedAutoencoderKLWan.from_config(dict(FULL_SIZE[name]))
    vae.requires_grad_(False).eval().enable_tiling()
    ratio, height, width = vae.spatial_compression_ratio, 32, 40
    shape: tuple[int, ...] = (1, vae.config.z_dim, 5, height, width)
    if operation is Operation.ENCODE:
        shape = (1, 3, 17, height * ratio, width * ratio)
    forecaster = Forecaster(vae, operation, shape, chunk)
    shard = forecaster.forecast(WIDTH, ranks)
    assert (shard.decision.sharded, shard.decision.chunk) == (True, chunk)
    assert shard.peak_bytes < forecaster.direct().peak_bytes


def test_chunks_beyond_that_are_not_chosen() -> None:
    for ranks, chunk in ((2, 2), (3, 4), (4, 4)):
        comm = NullCommunicator(0, ranks)
        state = ParallelState(VaeGroups.over(comm), WIDTH, False)
        assert blank().decide(state, Operation.DECODE, (9, 5, ranks)).chunk == chunk


def budgets(free: list[int | None], monkeypatch: pytest.MonkeyPatch, **placed: Any) -> list[int | None]:
    world = LocalWorld(len(free))

    def body(comm: LocalCommunicator) -> int | None:
        return agreed_budget(local_groups(comm, **placed), torch.device("meta", comm.rank))

    monkeypatch.setattr(memory, "free_bytes", lambda device: free[device.index])
    return world.run(body)


def test_ranks_agree_on_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    assert budgets([30, 10, 20], monkeypatch) == [10] * 3
    assert budgets([30, 10, 20], monkeypatch, workers=(0, 2)) == [20] * 3
    assert budgets([30, None, 20], monkeypatch) == [None] * 3


def test_this_machine_knows_what_it_has() -> None:
    free = free_bytes(torch.device("cpu"))
    assert free is not None and free > 1 << 20
    assert free_bytes(torch.device("meta")) is None


def test_a_decision_tells_what_was_forecast() -> None:
    decision = decided(1 << 40)
    told = decision.to_json()
    assert (told["peak_bytes"], told["sent_bytes"]) == (decision.peak_bytes, decision.sent_bytes)
    assert dataclasses.replace(decision, peak_bytes=None, sent_bytes=None) == decided(None)
