# SPDX-License-Identifier: Apache-2.0
"""Autoencoders whose tiles are summed over the ranks: the blended result, at the price that the decision names."""

import functools
from math import prod
from typing import Any

import pytest
import torch

from tests.helpers.vaes import RELEASED, VAES, count_calls, decisions, latents, on_ranks, pixels, run_public, tiny_vae
from tests.unit.autoencoders.test_ltx2_time import framewise, given, untiled
from vllm_omni_vae.autoencoders import (
    Decision,
    DistributedAutoencoderKL,
    DistributedAutoencoderKLWan,
    Operation,
    Strategy,
    distribute,
    selftest,
)
from vllm_omni_vae.autoencoders.compare import compare
from vllm_omni_vae.config import VaeParallelMode, VaeTileMerge
from vllm_omni_vae.errors import ConfigurationError, DisagreementError, SelfTestError, UnsupportedError

ENCODE, DECODE = Operation
SUM, BLEND = VaeTileMerge.SUM, VaeTileMerge.BLEND


def shared(
    vae: Any, operation: Operation, x: torch.Tensor, ranks: int, merge: VaeTileMerge = SUM, **how: Any
) -> tuple[torch.Tensor, Decision, list[int]]:
    """The owner's result, the decision, and the bytes that each rank brought to sums."""

    def body(mine: Any, rank: int) -> Any:
        comm = mine.parallel_state.groups.work
        taken, ran = decisions(mine), count_calls(mine.encoder if operation is ENCODE else mine.decoder)
        result = run_public(mine, operation, x)
        assert [one.strategy for one in taken] == [Strategy.TILE]
        assert len(ran) >= taken[0].tiles_per_rank[rank] > 0
        assert (comm.traffic.messages > 0) == (merge is BLEND and rank > 0)
        return result, taken[0], comm.traffic.reduced_bytes

    found = on_ranks(ranks, vae, body, merge=merge, **how)
    assert {decision.merge for _, decision, _ in found} == {merge}
    return found[0][0], found[0][1], [sent for _, _, sent in found]


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    assert one.shape == other.shape
    return float((one.double() - other.double()).abs().max() / other.double().abs().max())


@functools.cache
def tiles_of_one_rank(config: str, operation: Operation) -> tuple[torch.Tensor, torch.Tensor]:
    """An input of two items, with leftovers on both axes, and what diffusers' own tiles make of it in float64."""
    vae, tiny = tiny_vae(config, torch.float64), VAES[config]
    if operation is DECODE:
        x = latents(vae, 2, 8, 9, batch=2)
    else:
        x = pixels(vae, (tiny.frames(2) or (1,))[0], 8 * tiny.ratio, 9 * tiny.ratio, batch=2)
    with torch.no_grad():
        made = run_public(vae, operation, x)
    return x, tiny.finish(made) if operation is DECODE else made


@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize(
    ("config", "ranks"), [*((config, 3) for config in RELEASED), *(("wan2.1", ranks) for ranks in (1, 2, 4))]
)
def test_diffusers_tiles_up_to_the_order_of_additions(config: str, operation: Operation, ranks: int) -> None:
    x, expected = tiles_of_one_rank(config, operation)
    result, decision, sent = shared(tiny_vae(config, torch.float64), operation, x, ranks)
    assert apart(result, expected) <= 1e-12
    assert prod(decision.grid) > 1
    everywhere = operation is ENCODE
    assert decision.sent_bytes == expected.numel() * 8
    assert sent == [decision.sent_bytes if rank or everywhere else 0 for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("operation", list(Operation))
def test_a_pool_over_height_width_and_time(operation: Operation, ranks: int) -> None:
    for (size, stride), batch in (((24, 16), 2), ((32, 8), 1)):
        vae = framewise("ltx-2.3", size, stride, torch.float64)
        x = given(vae, operation, 49, 6, 5, batch=batch)
        blended = shared(vae, operation, x, ranks, BLEND)[0]
        result, decision, _ = shared(vae, operation, x, ranks)
        assert min(decision.grid) > 1
        assert apart(result, blended) <= 1e-12
        assert not torch.equal(result, torch.zeros_like(result))


@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types(operation: Operation, dtype: torch.dtype) -> None:
    vae = framewise("ltx-2.3", 24, 16, dtype)
    x = given(vae, operation, 49, 6, 5)
    result, blended = shared(vae, operation, x, 3)[0], shared(vae, operation, x, 3, BLEND)[0]
    assert result.dtype == dtype
    assert apart(result, blended) <= 8 * torch.finfo(dtype).eps


def test_a_result_for_all_is_the_same_on_all() -> None:
    vae = tiny_vae("wan2.1", torch.float64)
    x, expected = tiles_of_one_rank("wan2.1", DECODE)
    ranks = on_ranks(3, vae, lambda mine, _: mine.decode(x).sample, merge=SUM, broadcast=True)
    assert apart(ranks[0], expected) <= 1e-12
    assert all(torch.equal(result, ranks[0]) for result in ranks)


@pytest.mark.parametrize(("size", "stride"), [(16, 8), (24, 16), (16, 16)])
def test_49_frames_are_each_nearest_to_their_own_of_an_untiled_clip(size: int, stride: int) -> None:
    vae = framewise("ltx-2", size, stride)
    z = given(vae, DECODE, 49, 5, 5)
    whole = untiled(vae, DECODE, z)
    result, decision, _ = shared(vae, DECODE, z, 2)
    assert decision.grid == (48 // stride, 2, 2)
    for number in range(48):
        here, next_one = (
            float((result[:, :, number] - whole[:, :, number + shift]).square().mean()) for shift in (0, 1)
        )
        assert here < next_one, number


def test_what_is_not_in_tiles_is_not_touched() -> None:
    vae = tiny_vae("wan2.1")
    for mode, shape, strategy in (
        (VaeParallelMode.TILE, (1, 4, 1, 4, 4), "direct"),
        (VaeParallelMode.SPATIAL_SHARD_WIDTH, (1, 4, 1, 5, 6), "spatial_shard_width"),
    ):
        z = latents(vae, *shape[2:])

        def body(mine: Any, rank: int, z: torch.Tensor = z) -> Any:
            taken = decisions(mine)
            return mine.decode(z).sample, taken[0]

        found = [on_ranks(2, vae, body, mode=mode, merge=merge)[0] for merge in (SUM, BLEND)]
        assert torch.equal(found[0][0], found[1][0])
        assert found[0][1] == found[1][1]
        assert found[0][1].strategy.value == strategy


def test_the_decision_says_what_each_rank_sends() -> None:
    vae = tiny_vae("wan2.1")
    z = latents(vae, 2, 8, 9, batch=2)
    result, decision, _ = shared(vae, DECODE, z, 2)
    megabytes = result.numel() * 4 / 1e6
    assert f"tiles per rank [5, 4], summed over the ranks with {megabytes:.1f} MB from each, imbalance" in str(decision)
    told = decision.to_json()
    assert (told["merge"], told["sent_bytes"]) == ("sum", result.numel() * 4)
    blended = shared(vae, DECODE, z, 2, BLEND)[1]
    assert blended.sent_bytes is None
    assert "summed" not in str(blended)


def test_ranks_that_were_set_up_in_different_ways_are_told_apart() -> None:
    def body(mine: Any, rank: int) -> str:
        mine.parallel_state.merge = (BLEND, SUM)[rank]
        with pytest.raises(DisagreementError) as caught:
            mine.decode(latents(mine, 1, 8, 9))
        return str(caught.value)

    (message,) = set(on_ranks(2, tiny_vae("wan2.1"), body))
    assert message.startswith("ranks came with different tile merge: rank 0 has blend, rank 1 has sum")


@pytest.mark.parametrize("config", ["wan2.1", "ltx-2", "flux.1"])
def test_compare_and_the_self_test_judge_it(config: str) -> None:
    def body(mine: Any, rank: int) -> Any:
        shape = tuple(latents(mine, 1, 8, 9).shape)
        return compare(mine, DECODE, shape, VaeParallelMode.TILE), selftest(mine)

    one, checked = on_ranks(2, tiny_vae(config), body, merge=SUM)[0]
    assert (one.decision.merge, one.holds) == (SUM, True)
    assert one.limit == 8 * torch.finfo(torch.float32).eps
    assert [(other.decision.merge, other.decision.operation, other.holds) for other in checked] == [
        (SUM, ENCODE, True),
        (SUM, DECODE, True),
    ]


def test_the_self_test_finds_a_sum_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def finish(self: Any, merged: torch.Tensor, spec: Any) -> torch.Tensor:
        return self.spec.finish_decode(self, merged * (1 + 1e-4))

    monkeypatch.setattr(DistributedAutoencoderKLWan, "tile_finish", finish)

    def body(mine: Any, rank: int) -> str:
        with pytest.raises(SelfTestError) as caught:
            selftest(mine)
        return str(caught.value)

    (message,) = set(on_ranks(2, tiny_vae("wan2.1"), body, merge=SUM))
    assert "decode with tile is off by" in message
    assert "explains" in message


class OwnMerge(DistributedAutoencoderKL):
    def tile_merge(self, tiles: Any, grid_spec: Any) -> torch.Tensor:
        return super().tile_merge(tiles, grid_spec) * 2


def test_what_cannot_be_summed_is_refused_before_anything_is_set_up() -> None:
    vae = tiny_vae("flux.1")
    with pytest.raises(ConfigurationError, match="vae_tile_merge 'average' is not known; choose one of blend, sum"):
        distribute(vae, size=2, merge="average")
    assert type(vae) is VAES["flux.1"].base
    vae.__class__ = OwnMerge
    with pytest.raises(UnsupportedError, match=r"OwnMerge merges tiles by its own tile_merge, .* take blend"):
        vae.set_parallel_size(2, merge="sum")
    assert not vae.is_distributed_enabled()


def test_a_class_without_tiles_refuses_it() -> None:
    from diffusers import AutoencoderTiny

    vae = AutoencoderTiny(encoder_block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8))
    with pytest.raises(UnsupportedError, match="AutoencoderTiny is not shared in tiles"):
        distribute(vae, size=2, mode="auto", merge="sum")
    assert type(vae) is AutoencoderTiny
