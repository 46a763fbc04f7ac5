# SPDX-License-Identifier: Apache-2.0
"""The self-test passes what is right, refuses a broken halo, and leaves the autoencoder as it was."""

import copy
import logging
from typing import Any

import pytest
import torch
from diffusers import AutoencoderTiny

from tests.helpers.broken_halo import BrokenFill
from tests.helpers.vaes import VAES, count_calls, decisions, latents, on_ranks, run_public, tiny_vae
from vllm_omni_vae.autoencoders import Comparison, Operation, Strategy, compare, selftest
from vllm_omni_vae.autoencoders.selftest import summary
from vllm_omni_vae.autoencoders.untiled import untiled_class
from vllm_omni_vae.config import VaeParallelMode
from vllm_omni_vae.errors import ConfigurationError, RankError, SelfTestError
from vllm_omni_vae.sharding import halo

TILE, AUTO = VaeParallelMode.TILE, VaeParallelMode.AUTO
HEIGHT, WIDTH, GRID = (VaeParallelMode(f"spatial_shard_{axis}") for axis in ("height", "width", "grid"))
QUIET = [name for name in VAES if "noise" not in name]
"""Ranks that are threads have one random generator, so a network that draws is tested on processes."""


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halo, "_fill", BrokenFill(halo._fill))


def found_by(vae: Any, mode: VaeParallelMode, ranks: int = 2) -> tuple[Comparison, ...]:
    """What the self-test finds, the same on every rank."""
    first, *others = on_ranks(ranks, vae, lambda mine, _: selftest(mine), mode=mode)
    assert all(other == first for other in others)
    return first


def refusal(vae: Any, mode: VaeParallelMode, ranks: int = 2) -> str:
    """What the self-test says when it fails, the same on every rank."""

    def body(mine: Any, rank: int) -> str:
        with pytest.raises(SelfTestError) as caught:
            selftest(mine, "refiner.vae")
        assert isinstance(caught.value, ConfigurationError)
        return str(caught.value)

    first, *others = on_ranks(ranks, vae, body, mode=mode)
    assert all(other == first for other in others)
    return first


def ran(found: tuple[Comparison, ...]) -> list[tuple[Operation, str, tuple[int, int]]]:
    return [(one.decision.operation, one.decision.strategy.value, one.decision.rank_grid) for one in found]


@pytest.mark.parametrize("name", QUIET)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_family_passes(name: str, dtype: torch.dtype) -> None:
    found = found_by(tiny_vae(name, dtype), WIDTH)
    assert [one[:2] for one in ran(found)] == [(way, mode.value) for way in Operation for mode in (WIDTH, TILE)]
    for one in found:
        assert one.holds
        assert one.dtype is dtype
        if one.decision.strategy is Strategy.TILE:
            assert (one.error, one.limit, one.max_difference, one.mean_difference) == (0.0, 0.0, 0.0, 0.0)
        else:
            assert 0 < one.error <= one.limit
            assert 0 <= one.mean_difference <= one.max_difference


@pytest.mark.parametrize(
    ("mode", "ranks", "grids"),
    [
        (TILE, 3, []),
        (HEIGHT, 3, [(3, 1)]),
        (WIDTH, 2, [(1, 2)]),
        (GRID, 4, [(2, 2)]),
        (GRID, 2, [(1, 2)]),
        (AUTO, 2, [(2, 1), (1, 2)]),
        (AUTO, 4, [(4, 1), (1, 4), (2, 2)]),
        (AUTO, 5, [(5, 1), (1, 5)]),
    ],
)
def test_every_strategy_that_a_mode_can_take_runs(
    mode: VaeParallelMode, ranks: int, grids: list[tuple[int, int]]
) -> None:
    found = found_by(tiny_vae(dtype=torch.float64), mode, ranks)
    assert [grid for _, _, grid in ran(found)] == 2 * [*grids, (1, 1)]
    for one in found:
        rows, cols = one.decision.rank_grid
        ratio = 8 if one.decision.operation is Operation.ENCODE else 1
        height, width = (extent // ratio for extent in one.shape[-2:])
        if one.decision.sharded:
            assert (height % rows, width % cols) == (rows > 1, cols > 1), "uneven"
            assert one.limit == 1e-12
            assert one.decision.chunk > 1
            assert one.shape[2] == 3 if one.decision.operation is Operation.DECODE else 9
        else:
            assert min(one.decision.tiles_per_rank) >= 1, "nobody idles"
            assert one.shape[2] == 2 if one.decision.operation is Operation.DECODE else 5


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["wan2.1", "flux.1", "ltx-2"])
def test_a_broken_halo_is_refused_in_every_type(name: str, dtype: torch.dtype) -> None:
    message = refusal(tiny_vae(name, dtype), AUTO)
    for operation in Operation:
        for mode in (HEIGHT, WIDTH):
            assert f"self-test of refiner.vae: {operation} with {mode} is off by " in message
    assert f"is what {dtype} explains" in message
    assert "tile " not in message
    assert "--no-vae-selftest" in message


@pytest.mark.usefixtures("broken")
def test_tiles_need_no_halo() -> None:
    assert summary(found_by(tiny_vae(), TILE)) == "2 checks, bit-equal"


def test_tiles_that_differ_in_one_bit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    vae = tiny_vae()
    plain = copy.deepcopy(vae)
    kind = on_ranks(2, vae, lambda mine, _: type(mine))[0]
    merge = kind.tile_merge

    def off(self: Any, tiles: Any, spec: Any) -> torch.Tensor:
        merged = merge(self, tiles, spec)
        merged[..., 0, 0] = merged[..., 0, 0].nextafter(torch.tensor(2.0))
        return merged

    monkeypatch.setattr(kind, "tile_merge", off)
    message = refusal(plain, TILE)
    assert "decode with tile differs from the same on one rank by " in message
    assert "encode" not in message


def test_ranks_with_other_weights_are_refused() -> None:
    def body(mine: Any, rank: int) -> str:
        if rank == 1:
            mine.decoder.conv_out.bias.data += 1
        with pytest.raises(SelfTestError) as caught:
            selftest(mine)
        return str(caught.value)

    one, other = on_ranks(2, tiny_vae(), body)
    assert one == other
    assert "decode with tile differs" in one


def test_a_rank_that_fails_is_named_on_all() -> None:
    def body(mine: Any, rank: int) -> str:
        if rank == 1:
            mine.decoder.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(SelfTestError) as caught:
            selftest(mine)
        assert isinstance(caught.value.__cause__, RankError)
        return str(caught.value)

    one, other = on_ranks(2, tiny_vae(), body)
    assert one == other
    assert one.startswith(
        "self-test of vae: decode with tile fails: rank 1 failed: ZeroDivisionError: division by zero. "
    )


def test_what_one_rank_cannot_make_either_is_not_blamed_on_the_ranks() -> None:
    vae = tiny_vae(dtype=torch.float16)
    vae.decoder.conv_in.weight.data *= 60000
    vae.decoder.conv_in.bias.data += 60000
    assert "one rank alone makes values that are not finite in torch.float16" in refusal(vae, WIDTH)


def test_nothing_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    def body(mine: Any, rank: int) -> None:
        state = mine.parallel_state
        taken = decisions(mine)
        observed: list[tuple[int, int]] = []
        state.executor.observer = lambda done, total: observed.append((done, total))
        attributes = dict(vars(mine))
        inside = {id(part): (dict(vars(part)), part.training) for part in mine.modules() if part is not mine}
        modules = list(map(id, mine.modules()))
        weights = copy.deepcopy(mine.state_dict())
        sent = copy.deepcopy(state.groups.domain.traffic)
        selftest(mine)
        assert vars(mine) == attributes
        assert list(map(id, mine.modules())) == modules
        assert {id(p): (dict(vars(p)), p.training) for p in mine.modules() if p is not mine} == inside
        assert all(torch.equal(value, weights[key]) for key, value in mine.state_dict().items())
        assert state.groups.domain.traffic == sent
        assert (taken, observed, state._logged) == ([], [], set())
        assert mine.parallel_state is state

    on_ranks(2, tiny_vae(), body, mode=AUTO)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert lines[0].startswith("self-test of vae: 6 checks, worst ")


def test_a_call_afterwards_is_as_one_without() -> None:
    vae = tiny_vae()
    z = latents(vae, 3, 5, 7)
    before = on_ranks(2, vae, lambda mine, _: run_public(mine, Operation.DECODE, z), mode=WIDTH)[0]
    after = on_ranks(2, vae, lambda mine, _: [selftest(mine), run_public(mine, Operation.DECODE, z)][1], mode=WIDTH)[0]
    assert torch.equal(before, after)


def test_ranks_outside_and_an_output_rank_elsewhere() -> None:
    """Three ranks call, the last two work, the third one has the samples."""
    found = on_ranks(3, tiny_vae(), lambda mine, _: selftest(mine), mode=WIDTH, workers=(1, 2), output=1)
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 4


def test_a_result_that_goes_to_all_is_the_same_on_all() -> None:
    found = on_ranks(2, tiny_vae(), lambda mine, _: selftest(mine), mode=WIDTH, broadcast=True)
    assert found[0] == found[1]


def test_one_rank_has_nothing_to_check() -> None:
    vae = tiny_vae()
    calls = count_calls(vae.decoder)
    assert selftest(vae) == ()
    assert selftest(torch.nn.Linear(2, 2)) == ()
    assert calls == []
    assert summary(()) == "nothing to check"


def test_an_autoencoder_whose_inputs_nobody_knows_is_compared_only_when_told() -> None:
    vae = AutoencoderTiny(
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    )
    kind = untiled_class(vae)
    assert kind is not None
    found = on_ranks(
        2,
        vae.double(),
        lambda mine, _: (selftest(mine), compare(mine, Operation.DECODE, (1, 4, 5, 7), WIDTH)),
        mode=AUTO,
        kind=kind,
    )
    for nothing, one in found:
        assert nothing == ()
        assert (one.decision.strategy, one.holds) == (Strategy.SPATIAL_SHARD_WIDTH, True)


def test_a_comparison_takes_any_size_and_the_tiles_that_are_set() -> None:
    vae = tiny_vae(dtype=torch.float64)
    shape = (2, 4, 1, 7, 9)
    tiled, sharded = on_ranks(
        2, vae, lambda mine, _: [compare(mine, Operation.DECODE, shape, mode) for mode in (TILE, WIDTH)]
    )[0]
    assert (tiled.decision.strategy, tiled.decision.grid, tiled.holds) == (Strategy.TILE, (1, 3, 3), True)
    assert (sharded.decision.strategy, sharded.shape, sharded.holds) == (Strategy.SPATIAL_SHARD_WIDTH, shape, True)
