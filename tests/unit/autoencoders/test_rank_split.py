# SPDX-License-Identifier: Apache-2.0
"""One piece for each rank: the bits of one rank that runs the same pieces, and near the un-tiled result."""

import copy
import logging
from typing import Any

import pytest
import torch

from tests.helpers.diffusion_decoders import tiny_decoder
from tests.helpers.vaes import RELEASED, VAES, count_calls, decisions, latents, on_ranks, pixels, run_public, tiny_vae
from tests.unit.autoencoders.test_ltx2_time import framewise
from vllm_omni_vae.autoencoders import Decision, Operation, Strategy, distribute, distributed_class, selftest
from vllm_omni_vae.autoencoders.compare import Trial, compare, run_pieces_alone
from vllm_omni_vae.autoencoders.receptive import exact_margin
from vllm_omni_vae.autoencoders.state import ParallelState
from vllm_omni_vae.autoencoders.twin import twin_of
from vllm_omni_vae.cli.blank import make_blank
from vllm_omni_vae.cli.full_size import FULL_SIZE
from vllm_omni_vae.config import VaeParallelMode, VaeSplits, VaeTileMerge
from vllm_omni_vae.distributed import NullCommunicator, VaeGroups
from vllm_omni_vae.errors import DisagreementError, SelfTestError, UnsupportedError

ENCODE, DECODE = Operation
MARGINS = (0, 1, 2, 4)
TILE, AUTO = VaeParallelMode.TILE, VaeParallelMode.AUTO
WIDTH = VaeParallelMode.SPATIAL_SHARD_WIDTH


def given(
    name: str, vae: Any, operation: Operation, time: int, rows: int, cols: int, batch: int = 1, more: int = 0
) -> torch.Tensor:
    """Input of so many latents, and pixels to encode beyond the last whole one where the VAE can do that."""
    tiny = VAES[name]
    if operation is DECODE:
        return latents(vae, time, rows, cols, batch=batch)
    more = more if tiny.unit == 1 else 0
    return pixels(vae, (tiny.frames(time) or (1,))[0], rows * tiny.ratio + more, cols * tiny.ratio + more, batch=batch)


def untiled(name: str, vae: Any, operation: Operation, x: torch.Tensor) -> torch.Tensor:
    whole = copy.deepcopy(vae)
    whole.disable_tiling()
    return run_public(whole, operation, x, **VAES[name].given(operation))


def shared(
    name: str, vae: Any, operation: Operation, x: torch.Tensor, ranks: int, margin: int, **how: Any
) -> tuple[torch.Tensor, Decision]:
    """The owner's result and the decision, after every rank is seen to have run one piece and sent nothing in it."""
    plain = copy.deepcopy(vae)

    def body(mine: Any, rank: int) -> Any:
        taken, ran = decisions(mine), count_calls(mine.encoder if operation is ENCODE else mine.decoder)
        result = run_public(mine, operation, x, **VAES[name].given(operation))
        assert {one.strategy for one in taken} == {Strategy.RANK_SPLIT}
        assert ran
        work = mine.parallel_state.groups.work
        assert work.traffic.messages == (1 if rank else 0), "its result, and no halo"
        return result, taken[0]

    found = on_ranks(ranks, plain, body, splits=VaeSplits(margin, margin), **how)
    if operation is ENCODE:
        assert all(torch.equal(result, found[0][0]) for result, _ in found)
    return found[0]


def on_one_rank(name: str, vae: Any, x: torch.Tensor, decision: Decision) -> torch.Tensor:
    """The same pieces, one after the other, without any communication."""
    alone = copy.deepcopy(vae)
    alone.__class__ = distributed_class(vae)
    return run_pieces_alone(alone, decision.operation, x, VAES[name].given(decision.operation), decision)


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    assert one.shape == other.shape
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize("name", RELEASED)
def test_bits_of_one_rank_and_nearer_to_untiled_the_wider_the_margin(name: str, operation: Operation) -> None:
    vae = tiny_vae(name, torch.float64)
    x = given(name, vae, operation, 1, 3, 13)
    whole = untiled(name, vae, operation, x)
    errors = []
    for margin in MARGINS:
        result, decision = shared(name, vae, operation, x, 2, margin)
        assert torch.equal(result, on_one_rank(name, vae, x, decision))
        assert (decision.grid, decision.margin, decision.tiles_per_rank) == ((1, 1, 2), margin, (1, 1))
        assert decision.coverage == round(1 + 2 * margin / 13, 4)
        errors.append(apart(result, whole))
    assert errors == sorted(errors, reverse=True)
    assert len(set(errors)) == len(MARGINS)
    assert 0 < errors[-1] < errors[0] / 2


@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("name", RELEASED)
def test_uneven_pieces_in_every_type(name: str, ranks: int, operation: Operation) -> None:
    frames = 2 if name in ("wan2.1", "ltx-2.3") else 1
    for dtype, shape in ((torch.float32, (frames, 3, 7, 2)), (torch.bfloat16, (1, 5, 4, 1))):
        vae = tiny_vae(name, dtype)
        x = given(name, vae, operation, *shape, more=3)
        result, decision = shared(name, vae, operation, x, ranks, 1)
        assert torch.equal(result, on_one_rank(name, vae, x, decision))
        assert result.dtype == dtype
        assert decision.grid == ((1, 1, 3) if ranks == 3 else (1, 2, 2))
        assert result.shape == untiled(name, vae, operation, x).shape


@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize("name", ["wan2.1", "sdxl", "ltx-2.3"])
def test_slices_of_a_batch_and_channels_last(name: str, operation: Operation) -> None:
    vae = tiny_vae(name)
    vae.enable_slicing()
    x = given(name, vae, operation, 1, 3, 8, batch=2)
    order = torch.channels_last_3d if VAES[name].step else torch.channels_last
    with_channels_last = x.contiguous(memory_format=order)
    for one in (x, with_channels_last):

        def body(mine: Any, rank: int, one: torch.Tensor = one) -> Any:
            taken = decisions(mine)
            result = run_public(mine, operation, one, **VAES[name].given(operation))
            return result, taken

        result, taken = on_ranks(2, vae, body, splits=VaeSplits(1, 1))[0]
        assert [decision.strategy for decision in taken] == [Strategy.RANK_SPLIT]
        alone = on_one_rank(name, vae, one, taken[0])
        assert torch.equal(result, alone)
        assert result.stride() == alone.stride()


@pytest.mark.parametrize("operation", list(Operation))
def test_a_clip_that_is_tiled_in_time_stays_whole_in_time(operation: Operation) -> None:
    vae = framewise("ltx-2.3", 24, 16)
    x = given("ltx-2.3", vae, operation, 5, 2, 5)
    result, decision = shared("ltx-2.3", vae, operation, x, 2, 1)
    assert decision.grid == (1, 1, 2)
    assert torch.equal(result, on_one_rank("ltx-2.3", vae, x, decision))


def test_samples_of_qwen_image_are_clamped_as_untiled() -> None:
    vae = tiny_vae("qwen-image")
    result, _ = shared("qwen-image", vae, DECODE, latents(vae, 1, 3, 8) * 50, 2, 1)
    assert (float(result.min()), float(result.max())) == (-1.0, 1.0)


@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize("name", ["ltx-2", "ltx-2.3"])
def test_the_exact_margin_is_the_untiled_result_and_one_less_is_not(name: str, operation: Operation) -> None:
    vae = tiny_vae(name, torch.float64)
    mine = copy.deepcopy(vae)
    mine.__class__ = distributed_class(vae)
    exact = exact_margin(twin_of(mine), operation)
    assert exact == {"ltx-2": (7, 7), "ltx-2.3": (7, 8)}[name][operation is DECODE]
    x = given(name, vae, operation, 1, 2, 2 * exact + 5)
    whole = untiled(name, vae, operation, x)
    errors = []
    for margin in (exact - 1, exact):
        decision = Decision(operation, Strategy.RANK_SPLIT, "", tiles_per_rank=(1, 1), margin=margin)
        errors.append(apart(on_one_rank(name, vae, x, decision), whole))
    assert errors[1] <= 1e-12 < 1e-8 < errors[0]


@pytest.mark.parametrize("name", [name for name in RELEASED if not name.startswith("ltx")])
def test_no_margin_is_exact_with_attention_or_group_norm(name: str) -> None:
    vae = tiny_vae(name)
    vae.__class__ = distributed_class(vae)
    assert [exact_margin(twin_of(vae), operation) for operation in Operation] == [None, None]


def test_how_far_the_full_size_ltx_2_looks() -> None:
    vae = make_blank(FULL_SIZE["ltx-2"], "bfloat16", 2, None, None)
    assert [exact_margin(vae, operation) for operation in Operation] == [16, 22]


def test_the_decision_says_what_it_is() -> None:
    vae = tiny_vae()
    _, decision = shared("wan2.1", vae, DECODE, latents(vae, 1, 4, 9), 4, 1)
    assert str(decision) == (
        "decode: rank_split 1x2x2 (time x height x width), margin 1, pieces per rank [1, 1, 1, 1], imbalance 1.09, "
        "coverage 1.83, approximate: near the un-tiled result (as configured)"
    )
    told = decision.to_json()
    assert (told["strategy"], told["margin"], told["grid"], told["coverage"]) == ("rank_split", 1, (1, 2, 2), 1.8333)
    assert not decision.fallback
    assert not decision.sharded


def decided(vae: Any, operation: Operation, seen: tuple[int, int, int], ranks: int, **how: Any) -> Decision:
    """What would run, without running it."""
    comm = NullCommunicator(0, ranks)
    mine = copy.deepcopy(vae)
    mine.__class__ = distributed_class(vae)
    mode, instead = how.pop("mode", TILE), how.pop("instead", None)
    state = ParallelState(VaeGroups.over(comm), mode, False, **how)
    return mine.decide(state, operation, seen, mode=instead)


def test_it_takes_the_place_of_tiles_and_of_nothing_else() -> None:
    vae, splits = tiny_vae(), VaeSplits(decode=1)
    for mode, seen, ranks, strategy in (
        (TILE, (1, 8, 8), 2, "rank_split"),
        (AUTO, (1, 8, 8), 2, "spatial_shard_width"),
        (WIDTH, (1, 8, 8), 2, "spatial_shard_width"),
        (WIDTH, (1, 9, 1), 2, "rank_split"),
        (TILE, None, 2, "direct"),
    ):
        decision = decided(vae, DECODE, seen, ranks, mode=mode, splits=splits)
        assert (decision.strategy.value, decision.fallback) == (strategy, seen == (1, 9, 1)), (mode, seen)
    assert decided(vae, ENCODE, (1, 64, 64), 2, splits=splits).strategy is Strategy.TILE
    assert "spatial_shard_width: 9x1 latents" in decided(vae, DECODE, (1, 9, 1), 2, mode=WIDTH, splits=splits).reason


def test_a_call_that_is_run_once_more_in_tiles_is_in_tiles() -> None:
    retry = decided(tiny_vae(), DECODE, (1, 8, 8), 2, splits=VaeSplits(decode=1), instead=TILE)
    assert (retry.strategy, retry.margin) == (Strategy.TILE, None)


def test_a_request_that_is_too_small_falls_back_to_tiles_with_the_reason() -> None:
    decision = decided(tiny_vae(), DECODE, (1, 5, 1), 7, splits=VaeSplits(decode=2))
    assert (decision.strategy, decision.fallback, decision.margin) == (Strategy.TILE, True, None)
    assert decision.reason.startswith("split by rank: 5x1 latents cannot give each of 7 ranks a piece of at least 1x1")
    thin = tiny_vae("ltx-2")
    assert decided(thin, DECODE, (1, 5, 5), 5, splits=VaeSplits(decode=0)).strategy is Strategy.TILE
    assert decided(thin, DECODE, (1, 5, 5), 5, splits=VaeSplits(decode=1)).strategy is Strategy.RANK_SPLIT


def test_pieces_are_not_summed_and_tiles_of_the_other_operation_are() -> None:
    how: dict[str, Any] = {"splits": VaeSplits(encode=1), "merge": VaeTileMerge.SUM}
    encode, decode = (decided(tiny_vae(), way, (1, 64, 64), 2, **how) for way in Operation)
    assert (encode.strategy, encode.merge, encode.sent_bytes) == (Strategy.RANK_SPLIT, VaeTileMerge.BLEND, None)
    assert (decode.strategy, decode.merge) == (Strategy.TILE, VaeTileMerge.SUM)


def test_ranks_with_other_splits_are_told_apart() -> None:
    def body(mine: Any, rank: int) -> str:
        mine.parallel_state.splits = VaeSplits(decode=rank)
        with pytest.raises(DisagreementError) as caught:
            mine.decode(latents(mine, 1, 8, 9))
        return str(caught.value)

    (message,) = set(on_ranks(2, tiny_vae(), body))
    assert message.startswith("ranks came with different splits: rank 0 has ")


@pytest.mark.usefixtures("two_ranks")
def test_what_is_said_when_it_is_set(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    vae = distribute(tiny_vae(), size=2, mode="auto", splits=VaeSplits(0, 3))
    assert vae.parallel_state.splits == VaeSplits(0, 3)
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    warning = "VAE encode of AutoencoderKLWan is split by rank without a margin, which is less accurate than tiles"
    assert [line for line in lines if line[0] == "WARNING"] == [("WARNING", f"{warning}; 2 is usual")]
    for operation in Operation:
        where = "is split by rank only where vae_parallel_mode auto would take tiles"
        assert ("INFO", f"VAE {operation} of AutoencoderKLWan {where}") in lines


@pytest.mark.usefixtures("two_ranks")
def test_families_that_cannot_be_cut_into_pieces_refuse_it_by_name() -> None:
    from diffusers import AutoencoderTiny

    decoder = tiny_decoder()
    with pytest.raises(UnsupportedError, match="LTX2VideoDiffusionDecoderModel cannot run vae_decode_split rank: its"):
        distribute(decoder, size=2, splits=VaeSplits(decode=2))
    assert type(decoder).__name__ == "LTX2VideoDiffusionDecoderModel"
    distribute(decoder, size=2, splits=VaeSplits(encode=2))
    layers = {"encoder_block_out_channels": (8, 8, 8, 8), "decoder_block_out_channels": (8, 8, 8, 8)}
    other = AutoencoderTiny(**layers)
    with pytest.raises(UnsupportedError, match="AutoencoderTiny cannot run vae_encode_split rank: it is not shared in"):
        distribute(other, size=2, mode="auto", splits=VaeSplits(encode=2))


def test_noise_that_a_network_draws_is_refused_with_the_request() -> None:
    with pytest.raises(UnsupportedError, match="injects noise"):
        decided(tiny_vae("ltx-2 noise"), DECODE, (1, 8, 8), 2, splits=VaeSplits(decode=2))


@pytest.mark.parametrize("mode", [TILE, WIDTH])
@pytest.mark.parametrize("name", ["wan2.1", "wan2.2-ti2v-5b", "ltx-2", "flux.1"])
def test_the_self_test_checks_it_and_its_fallbacks(name: str, mode: VaeParallelMode) -> None:
    found = on_ranks(3, tiny_vae(name), lambda mine, _: selftest(mine), mode=mode, splits=VaeSplits(decode=2))
    assert all(one == found[0] for one in found)
    shards = [] if mode is TILE else [mode.value]
    ran = [(one.decision.operation, one.decision.strategy.value) for one in found[0]]
    assert ran == [
        *((ENCODE, way) for way in (*shards, "tile")),
        *((DECODE, way) for way in (*shards, "tile", "rank_split")),
    ]
    (piece,) = [one for one in found[0] if one.decision.margin is not None]
    assert (piece.error, piece.limit, piece.holds, piece.decision.margin) == (0.0, 0.0, True, 2)
    assert sum(piece.decision.tiles_per_rank) == 3


def test_the_self_test_finds_a_rank_that_drops_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = distributed_class(tiny_vae())
    assert kind is not None
    run = kind.tile_exec

    def shifted(self: Any, task: Any, **arguments: Any) -> torch.Tensor:
        tile = run(self, task, **arguments)
        return tile.roll(1, -1) if self.parallel_state.groups.work.size > 1 else tile

    monkeypatch.setattr(kind, "tile_exec", shifted)

    def body(mine: Any, rank: int) -> str:
        with pytest.raises(SelfTestError) as caught:
            selftest(mine)
        return str(caught.value)

    (message,) = set(on_ranks(2, tiny_vae(), body, splits=VaeSplits(decode=1)))
    assert "decode with rank_split differs from the same on one rank by " in message


def test_a_comparison_does_not_look_at_what_is_set() -> None:
    def body(mine: Any, rank: int) -> Any:
        shape = tuple(latents(mine, 1, 4, 9).shape)
        plain = compare(mine, DECODE, shape, TILE)
        pieces = compare(mine, DECODE, shape, TILE, splits=VaeSplits(decode=0))
        return plain.decision, pieces.decision, mine.parallel_state.splits, isinstance(mine.parallel_state, Trial)

    plain, pieces, splits, tried = on_ranks(2, tiny_vae(), body, splits=VaeSplits(decode=3))[0]
    assert (plain.strategy, pieces.strategy, pieces.margin) == (Strategy.TILE, Strategy.RANK_SPLIT, 0)
    assert (splits, tried) == (VaeSplits(decode=3), False)


def test_progress_is_told_of_each_network_call_in_a_piece() -> None:
    vae = tiny_vae()

    def body(mine: Any, rank: int) -> list[tuple[int, int]]:
        heard: list[tuple[int, int]] = []
        mine.parallel_state.executor.observer = lambda done, total: heard.append((done, total))
        mine.decode(latents(mine, 3, 4, 9))
        return heard

    for heard in on_ranks(2, vae, body, splits=VaeSplits(decode=1)):
        assert heard == [(0, 1), (0, 3), (1, 3), (2, 3), (1, 1)]
