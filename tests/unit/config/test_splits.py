# SPDX-License-Identifier: Apache-2.0
"""Splits by rank: what is asked for by flag, by Python or by the environment, and what is refused."""

import dataclasses
from typing import Any

import pytest

from vllm_omni_vae.config import IN_TILES, DiffusionParallelConfig, EngineConfig, VaeSplit, VaeSplits, VaeTileMerge
from vllm_omni_vae.config.flags import engine_config
from vllm_omni_vae.errors import ConfigurationError

WAN = "VLLM_OMNI_WAN_VAE_ENCODE"
VARIABLES = (
    *(f"VLLM_OMNI_VAE_{way}_{what}" for way in ("ENCODE", "DECODE") for what in ("SPLIT", "MARGIN")),
    f"{WAN}_SPLIT",
    f"{WAN}_MARGIN",
)
TWO = {"vae_patch_parallel_size": 2}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def splits(**values: Any) -> VaeSplits:
    return DiffusionParallelConfig(**TWO | values).vae_splits


def test_the_default_is_tiles() -> None:
    config = DiffusionParallelConfig(**TWO)
    assert (config.vae_encode_split, config.vae_decode_split, config.vae_splits) == ("tile", "tile", IN_TILES)
    assert IN_TILES.margin("encode") is IN_TILES.margin("decode") is None


@pytest.mark.parametrize("operation", ["encode", "decode"])
def test_each_operation_has_its_own(operation: str) -> None:
    split, margin, other = f"vae_{operation}_split", f"vae_{operation}_margin", {"encode": "decode"}.get(operation)
    assert splits(**{split: "rank"}) == VaeSplits(**{operation: 2})
    assert splits(**{split: VaeSplit.RANK, margin: 0}) == VaeSplits(**{operation: 0})
    assert splits(**{split: "rank", margin: 5}).margin(operation) == 5
    assert splits(**{split: "rank"}).margin(other or "encode") is None
    assert splits(**{split: "tile"}) == IN_TILES


def test_a_configuration_can_be_changed_afterwards() -> None:
    config = DiffusionParallelConfig(**TWO, vae_encode_split="rank", vae_encode_margin=3)  # type: ignore[arg-type]
    assert dataclasses.replace(config, num_gpus=2).vae_splits == VaeSplits(encode=3)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"vae_encode_split": "ranks"}, "vae_encode_split 'ranks' is not known; choose one of tile, rank"),
        ({"vae_decode_split": "RANK"}, "vae_decode_split 'RANK' is not known"),
        ({"vae_encode_split": "rank", "vae_encode_margin": -1}, "vae_encode_margin is -1; it counts latent rows"),
        ({"vae_encode_split": "rank", "vae_encode_margin": 1.5}, "vae_encode_margin is 1.5; it counts latent rows"),
        ({"vae_encode_split": "rank", "vae_encode_margin": True}, "vae_encode_margin is True; it counts"),
        ({"vae_encode_margin": 2}, "vae_encode_margin 2 does nothing without vae_encode_split rank; add that"),
        ({"vae_decode_margin": 0}, "vae_decode_margin 0 does nothing without vae_decode_split rank"),
        ({"vae_decode_margin": 1, "vae_encode_split": "rank"}, "vae_decode_margin 1 does nothing without"),
        ({"vae_encode_split": "rank", "vae_patch_parallel_size": 1}, "vae_encode_split rank does nothing on one VAE"),
        (
            {"vae_encode_split": "rank", "vae_decode_split": "rank", "vae_tile_merge": "sum"},
            "vae_tile_merge sum is for tiles, and both encode and decode are split by rank",
        ),
    ],
)
def test_what_does_nothing_or_has_no_meaning_is_refused(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        splits(**values)


def test_tiles_of_the_other_operation_may_be_summed() -> None:
    config = DiffusionParallelConfig(**TWO, vae_encode_split="rank", vae_tile_merge="sum")  # type: ignore[arg-type]
    assert (config.vae_splits, config.vae_tile_merge) == (VaeSplits(encode=2), VaeTileMerge.SUM)


def test_a_value_from_python_is_checked() -> None:
    with pytest.raises(ConfigurationError, match="decode margin is -2; it counts latent rows and must be a whole"):
        VaeSplits(decode=-2)


@pytest.mark.parametrize("prefix", ["VLLM_OMNI_VAE_ENCODE", WAN])
def test_the_environment_of_encode(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{prefix}_SPLIT", "rank")
    assert splits() == VaeSplits(encode=2)
    monkeypatch.setenv(f"{prefix}_MARGIN", "4")
    assert splits() == VaeSplits(encode=4)
    assert splits(vae_encode_margin=1) == VaeSplits(encode=1), "flags win"
    assert splits(vae_encode_split="tile") == IN_TILES, "flags win"
    monkeypatch.setenv(f"{prefix}_SPLIT", "")
    assert splits() == IN_TILES, "an empty variable is none"


def test_the_environment_of_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OMNI_VAE_DECODE_SPLIT", "rank")
    monkeypatch.setenv("VLLM_OMNI_VAE_DECODE_MARGIN", "0")
    assert splits() == VaeSplits(decode=0)


def test_the_variable_for_every_family_comes_before_the_other_engine_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{WAN}_SPLIT", "rank")
    monkeypatch.setenv("VLLM_OMNI_VAE_ENCODE_SPLIT", "tile")
    assert splits() == IN_TILES


def test_a_variable_that_has_nothing_to_act_on_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{WAN}_MARGIN", "4")
    assert splits() == IN_TILES
    monkeypatch.setenv(f"{WAN}_SPLIT", "rank")
    assert DiffusionParallelConfig().vae_splits == IN_TILES
    assert splits() == VaeSplits(encode=4)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        (f"{WAN}_SPLIT", "ranks", f"{WAN}_SPLIT 'ranks' is not known; choose one of tile, rank"),
        (f"{WAN}_MARGIN", "two", f"{WAN}_MARGIN is 'two'; it counts latent rows"),
        ("VLLM_OMNI_VAE_DECODE_MARGIN", "-1", "VLLM_OMNI_VAE_DECODE_MARGIN is -1; it counts latent rows"),
    ],
)
def test_a_variable_that_cannot_be_meant_is_refused_by_its_name(
    name: str, value: str, reason: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=reason):
        DiffusionParallelConfig(vae_patch_parallel_size=ranks)


def test_flags_reach_the_engine_s_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OMNI_VAE_DECODE_SPLIT", "rank")
    values = {**TWO, "vae_encode_split": VaeSplit.RANK, "vae_encode_margin": 3}
    found: EngineConfig = engine_config("m", values)
    assert found.parallel.vae_splits == VaeSplits(encode=3, decode=2)
