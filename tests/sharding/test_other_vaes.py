# SPDX-License-Identifier: Apache-2.0
"""The table of diffusers' other autoencoders tells the truth: what it calls exact is, what it refuses is not."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch

from tests.helpers.other_vaes import OTHERS, OtherVae
from tests.helpers.vaes import decisions, on_ranks
from vllm_omni_vae.autoencoders import Operation, Strategy, distribute
from vllm_omni_vae.autoencoders.twin import tensor_in
from vllm_omni_vae.autoencoders.untiled import UntiledVaeMixin, untiled_class
from vllm_omni_vae.autoencoders.untiled_classes import CLASSES, UntiledClass
from vllm_omni_vae.config import VaeParallelMode
from vllm_omni_vae.errors import DeadlockError, RankError, UnsupportedError, VaeParallelError

ENCODE, DECODE = Operation.ENCODE, Operation.DECODE
HEIGHT, WIDTH, GRID = (VaeParallelMode(f"spatial_shard_{axis}") for axis in ("height", "width", "grid"))
SPREADS = [(HEIGHT, 2), (WIDTH, 2), (GRID, 4)]
ELSEWHERE = ("dc with attention", "ltx noise")
"""Not exact, and random numbers, which need processes: ``tests/distributed/test_untiled.py``."""

FACTS = {facts.name: facts for facts in CLASSES}


def lines(exact: bool) -> list[tuple[str, Operation]]:
    """Every configuration and operation that the table calls exact, or refuses with a shard's own means."""
    found = []
    for name, other in OTHERS.items():
        facts = FACTS[other.name]
        if name in ELSEWHERE or (facts.encode and facts.decode):
            continue
        found += [(name, way) for way in Operation if (not facts.refusal(way)) is exact]
    return found


def run(vae: Any, way: Operation, x: torch.Tensor, other: OtherVae) -> torch.Tensor:
    return tensor_in(getattr(vae, way.value)(x, **other.arguments(way)))


@torch.no_grad()
def alone(vae: Any, way: Operation, x: torch.Tensor, other: OtherVae) -> torch.Tensor:
    """The class's own result on one rank."""
    return run(copy.deepcopy(vae), way, x, other)


def shared(vae: Any, way: Operation, x: torch.Tensor, other: OtherVae, mode: VaeParallelMode, ranks: int) -> Any:
    """The owner's result, after every rank is seen to have taken ``mode``."""

    def body(mine: Any, rank: int) -> torch.Tensor:
        taken = decisions(mine)
        result = run(mine, way, x, other)
        assert [decision.strategy.value for decision in taken] == [mode.value]
        return result

    return on_ranks(ranks, vae, body, mode=mode, kind=untiled_class(vae))[0]


def scaled_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    assert got.shape == wanted.shape
    assert wanted.isfinite().all()
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())


def test_every_line_of_the_table_is_tried() -> None:
    assert {other.name for other in OTHERS.values()} == set(FACTS)
    assert [facts.name for facts in CLASSES] == sorted(FACTS)
    assert all(isinstance(getattr(diffusers, name), type) for name in FACTS)


@pytest.mark.parametrize(("name", "way"), lines(exact=True))
def test_is_the_untiled_result(name: str, way: Operation) -> None:
    other = OTHERS[name]
    vae, x = other.made(), other.given(way)
    wanted = alone(vae, way, x, other)
    for mode, ranks in SPREADS:
        assert scaled_error(shared(vae, way, x, other, mode, ranks), wanted) <= 1e-12, mode


@pytest.mark.parametrize("way", list(Operation))
@pytest.mark.parametrize("name", ["ltx", "hunyuan video", "cogvideox", "tiny", "dc"])
def test_float32_is_within_its_rounding(name: str, way: Operation) -> None:
    other = OTHERS[name]
    vae, x = other.made(torch.float32), other.given(way, torch.float32)
    assert scaled_error(shared(vae, way, x, other, GRID, 4), alone(vae, way, x, other)) <= 1e-5


@pytest.mark.parametrize(("name", "way"), lines(exact=False))
def test_a_refused_operation_runs_on_each_rank_with_its_reason(name: str, way: Operation) -> None:
    other = OTHERS[name]
    vae, x = other.made(), other.given(way)

    def body(mine: Any, rank: int) -> Any:
        taken = decisions(mine)
        return run(mine, way, x, other) if other.name != "VQModel" else mine.decode(x).sample, taken

    wanted = alone(vae, way, x, other) if other.name != "VQModel" else vae.decode(x).sample
    for got, (decision,) in on_ranks(2, vae, body, mode=HEIGHT, kind=untiled_class(vae)):
        assert torch.equal(got, wanted)
        assert (decision.strategy, decision.fallback) == (Strategy.DIRECT, True)
        assert decision.reason == f"{HEIGHT}: {FACTS[other.name].refusal(way)}"


def claimed(monkeypatch: pytest.MonkeyPatch, name: str) -> type[UntiledVaeMixin]:
    """The distributed class if the table called all of it exact."""
    facts = UntiledClass(OTHERS[name].name)
    monkeypatch.setattr("vllm_omni_vae.autoencoders.untiled.CLASSES", (facts,))
    found = untiled_class(OTHERS[name].made())
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["minimax", "dc with attention"])
def test_what_is_refused_would_not_be_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other, kind = OTHERS[name], claimed(monkeypatch, name)
    vae, x = other.made(), other.given(DECODE)
    wanted = alone(vae, DECODE, x, other)

    def body(mine: Any, rank: int) -> float:
        return scaled_error(run(mine, DECODE, x, other), wanted)

    try:
        assert on_ranks(2, vae, body, mode=HEIGHT, kind=kind)[0] > 1e-3
    except VaeParallelError as error:
        assert isinstance(error, (RankError, DeadlockError))


def test_the_loss_of_a_codebook_is_no_tensor_of_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    other, kind = OTHERS["vq"], claimed(monkeypatch, "vq")
    vae, x = other.made(), other.given(DECODE)

    def body(mine: Any, rank: int) -> str:
        taken = decisions(mine)
        mine.decode(x)
        return taken[0].reason

    reasons = on_ranks(2, vae, body, mode=HEIGHT, kind=kind)
    assert reasons == [f"{HEIGHT}: DecoderOutput of 2 values cannot be put together from shards"] * 2


@pytest.mark.parametrize("way", list(Operation))
def test_a_class_without_an_untiled_path_has_none(way: Operation) -> None:
    other = OTHERS["allegro"]
    with pytest.raises(NotImplementedError, match="without tiling has not been implemented"):
        run(other.made(), way, other.given(way), other)


@pytest.mark.parametrize(
    ("name", "mode", "reason"),
    [
        ("allegro", HEIGHT, "cannot be distributed: encode: diffusers has no un-tiled path for it"),
        ("dc with attention", HEIGHT, "AutoencoderDC with SanaMultiscaleLinearAttention cannot be distributed"),
        ("ltx", VaeParallelMode.TILE, "AutoencoderKLLTXVideo cannot run vae_parallel_mode tile; it has auto, spatial_"),
    ],
)
def test_refused_at_set_up(name: str, mode: VaeParallelMode, reason: str) -> None:
    vae = OTHERS[name].made()
    before = type(vae)
    with pytest.raises(UnsupportedError, match=reason):
        distribute(vae, size=2, mode=mode)
    assert type(vae) is before


def test_too_few_latents_run_direct_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    other = OTHERS["tiny"]
    vae, z = other.made(), torch.ones(1, 4, 1, 9, dtype=torch.float64)

    def body(mine: Any, rank: int) -> Any:
        taken = decisions(mine)
        return [mine.decode(z).sample for _ in range(2)], taken

    with caplog.at_level(logging.WARNING):
        answers = on_ranks(2, vae, body, mode=HEIGHT, kind=untiled_class(vae))
    with torch.no_grad():
        wanted = vae.decode(z).sample
    for samples, taken in answers:
        assert all(torch.equal(sample, wanted) for sample in samples)
        assert [(d.strategy, d.fallback) for d in taken] == [(Strategy.DIRECT, True)] * 2
    told = [record.message for record in caplog.records if "direct" in record.message]
    assert told == [f"VAE decode: direct ({HEIGHT}: 1x9 latents cannot give each of 2 ranks a row or column)"]


@pytest.mark.parametrize(
    ("name", "way", "shape", "reason"),
    [
        ("tiny", ENCODE, (1, 3, 36, 40), "36x40 is no whole number of latents"),
        ("tiny", ENCODE, (1, 3, 12, 12), "12x12 is no whole number of latents"),
        ("asymmetric", DECODE, (1, 4, 6, 6), "an argument besides the input is a map"),
    ],
)
def test_other_requests_that_are_no_shard_run_direct(
    name: str, way: Operation, shape: tuple[int, ...], reason: str
) -> None:
    vae = OTHERS[name].made()
    x = torch.ones(shape, dtype=torch.float64)
    maps = torch.ones(1, 3, 24, 24, dtype=torch.float64)
    more = {"image": maps, "mask": maps[:, :1]} if name == "asymmetric" else {}

    def body(mine: Any, rank: int) -> Any:
        taken = decisions(mine)
        return tensor_in(getattr(mine, way.value)(x, **more)), taken

    with torch.no_grad():
        wanted = tensor_in(getattr(vae, way.value)(x, **more))
    for got, (decision,) in on_ranks(2, vae, body, mode=WIDTH, kind=untiled_class(vae)):
        assert torch.equal(got, wanted)
        assert (decision.strategy, decision.reason) == (Strategy.DIRECT, f"{WIDTH}: {reason}")


@pytest.mark.parametrize(
    ("name", "return_dict", "kind", "field"),
    [
        ("tiny", True, "AutoencoderTinyOutput", "latents"),
        ("dc", True, "EncoderOutput", "latent"),
        ("ltx", True, "AutoencoderKLOutput", "latent_dist"),
        ("cosmos", True, "AutoencoderKLOutput", "latent_dist"),
        ("vq", True, "VQEncoderOutput", "latents"),
        ("ltx", False, "tuple", ""),
    ],
)
def test_encode_returns_what_the_class_returns_on_every_rank(
    name: str, return_dict: bool, kind: str, field: str
) -> None:
    other = OTHERS[name]
    vae, x = other.made(), other.given(ENCODE)
    with torch.no_grad():
        own = vae.encode(x, return_dict=return_dict)
    answers = on_ranks(2, vae, lambda mine, _: mine.encode(x, return_dict), mode=WIDTH, kind=untiled_class(vae))
    for answer in answers:
        assert type(answer).__name__ == kind
        assert type(answer) is type(own)
        if field:
            assert list(answer.keys()) == [field]
            assert type(answer[field]) is type(own[field])
        assert torch.equal(tensor_in(answer), tensor_in(answers[0]))
        assert scaled_error(tensor_in(answer), tensor_in(own)) <= 1e-12


def test_decode_leaves_a_placeholder_where_the_sample_is_not() -> None:
    other = OTHERS["hunyuan video"]
    vae, z = other.made(), other.given(DECODE)
    wanted = alone(vae, DECODE, z, other)
    call: Callable[[Any, int], torch.Tensor] = lambda mine, _: mine.decode(z).sample  # noqa: E731
    first, second = on_ranks(2, vae, call, mode=HEIGHT, output=1, kind=untiled_class(vae))
    assert (tuple(first.shape), bool(first.any())) == ((1, 3, 1, 1, 1), False)
    assert scaled_error(second, wanted) <= 1e-12
    for everyone in on_ranks(2, vae, call, mode=HEIGHT, broadcast=True, kind=untiled_class(vae)):
        assert scaled_error(everyone, wanted) <= 1e-12


def test_auto_takes_the_longer_axis() -> None:
    other = OTHERS["tiny"]
    vae, z = other.made(), other.given(DECODE)

    def body(mine: Any, rank: int) -> Any:
        taken = decisions(mine)
        return mine.decode(z).sample, taken[0].strategy

    sample, strategy = on_ranks(2, vae, body, mode=VaeParallelMode.AUTO, kind=untiled_class(vae))[0]
    assert strategy is Strategy.SPATIAL_SHARD_WIDTH
    assert scaled_error(sample, alone(vae, DECODE, z, other)) <= 1e-12


def test_tiles_slices_and_what_is_done_in_time_are_as_they_are_set() -> None:
    other = OTHERS["hunyuan video in tiles of time"]
    vae = other.made()
    assert vae.use_framewise_decoding
    z = torch.cat([other.given(DECODE), -other.given(DECODE)])
    wanted = alone(vae, DECODE, z, other)
    vae.enable_slicing()
    vae.enable_tiling(16, 16, 16, 8, 8, 12)

    def body(mine: Any, rank: int) -> Any:
        return mine.decode(z).sample, mine.use_tiling, mine.use_slicing

    for sample, *switches in on_ranks(2, vae, body, mode=HEIGHT, broadcast=True, kind=untiled_class(vae)):
        assert scaled_error(sample, wanted) <= 1e-12
        assert switches == [True, True]


@pytest.mark.parametrize("name", ["magvit", "cogvideox"])
def test_a_failed_call_leaves_nothing_behind(name: str) -> None:
    other = OTHERS[name]
    vae, x = other.made(), other.given(ENCODE)
    wanted = alone(vae, ENCODE, x, other)

    def body(mine: Any, rank: int) -> torch.Tensor:
        own = mine.encoder.conv_out.forward
        mine.encoder.conv_out.forward = lambda *_, **__: 1 / 0
        with pytest.raises(RankError, match="rank 0 failed: ZeroDivisionError"):
            mine.encode(x)
        mine.encoder.conv_out.forward = own
        return tensor_in(mine.encode(x))

    for moments in on_ranks(2, vae, body, mode=WIDTH, kind=untiled_class(vae)):
        assert scaled_error(moments, wanted) <= 1e-12


def test_state_dict_keys_and_the_saved_class_are_diffusers_own() -> None:
    vae = OTHERS["ltx"].made()
    keys = list(vae.state_dict())
    vae.__class__ = untiled_class(vae)
    assert list(vae.state_dict()) == keys
    assert '"_class_name": "AutoencoderKLLTXVideo"' in vae.to_json_string()
    assert untiled_class(torch.nn.Linear(1, 1)) is None
