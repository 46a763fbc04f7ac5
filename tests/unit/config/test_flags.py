# SPDX-License-Identifier: Apache-2.0
"""Every field is one flag, and what is parsed comes back as the same configuration."""

import argparse
import dataclasses
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_vae.config import (
    DiffusionParallelConfig,
    EngineConfig,
    ServerConfig,
    TileExtent,
    VaeConfig,
    VaeParallelMode,
    VaeSplit,
    VaeTileMerge,
)
from vllm_omni_vae.config.flags import CONFIGS, Flag, add_arguments, engine_config, flags, pick
from vllm_omni_vae.errors import ConfigurationError

NOT_FLAGS = {"model", "parallel", "vae"}


def parser(*, shared: bool = True) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="p")
    add_arguments(made, shared=shared)
    return made


def parse(*words: str) -> dict[str, Any]:
    return vars(parser().parse_args(words))


def test_every_field_is_declared_once_and_is_one_flag() -> None:
    fields = [f.name for config in CONFIGS for f in dataclasses.fields(config) if f.name not in NOT_FLAGS]
    assert [flag.name for flag in flags()] == fields
    assert max(Counter(fields).values()) == 1
    spellings = Counter(spelling for flag in flags() for spelling in flag.spellings)
    assert max(spellings.values()) == 1


@pytest.mark.parametrize("flag", flags(), ids=lambda flag: flag.name)
def test_every_flag_explains_itself_in_the_help(flag: Flag) -> None:
    assert flag.option.help.endswith(".")
    text = " ".join(parser().format_help().split())
    assert flag.spellings[0] in text
    assert " ".join(flag.option.help.split())[:40] in text


def test_nothing_given_nothing_set() -> None:
    assert parse() == {}
    assert engine_config("m", parse()) == EngineConfig(model="m")
    assert pick(ServerConfig, parse()) == ServerConfig()


def test_shared_flags_are_left_to_vllm() -> None:
    mine = add_arguments(argparse.ArgumentParser(), shared=False)
    assert {"vae_patch_parallel_size", "vae_use_tiling", "boundary_ratio", "media_ttl"} <= {f.name for f in mine}
    assert not {"tensor_parallel_size", "dtype", "host", "port", "api_key"} & {f.name for f in mine}
    assert {f.name for f in add_arguments(argparse.ArgumentParser(), shared=True)} == {f.name for f in flags()}


def test_spellings_that_are_taken_are_left_out() -> None:
    theirs = argparse.ArgumentParser()
    theirs.add_argument("--vae-use-tiling", dest="theirs")
    theirs.add_argument("--ulysses-degree", dest="theirs_too")
    mine = {flag.name for flag in add_arguments(theirs, shared=False)}
    assert "vae_use_tiling" not in mine
    assert theirs.parse_args(["--vae-use-tiling", "1", "--usp", "4"]) == argparse.Namespace(
        theirs="1", theirs_too=None, ulysses_degree=4
    )


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--vae-patch-parallel-size", "2"], {"vae_patch_parallel_size": 2}),
        (["--vae-parallel-mode", "auto"], {"vae_parallel_mode": VaeParallelMode.AUTO}),
        (["--vae-tile-merge", "sum"], {"vae_tile_merge": VaeTileMerge.SUM}),
        (["--vae-encode-split", "rank"], {"vae_encode_split": VaeSplit.RANK}),
        (["--vae-decode-split", "tile"], {"vae_decode_split": VaeSplit.TILE}),
        (["--vae-encode-margin", "0", "--vae-decode-margin", "3"], {"vae_encode_margin": 0, "vae_decode_margin": 3}),
        (["-tp", "2", "--usp", "3", "--ring", "4"], {"tensor_parallel_size": 2, "ulysses_degree": 3, "ring_degree": 4}),
        (["--vae-use-tiling"], {"vae_use_tiling": True}),
        (["--no-vae-use-tiling"], {"vae_use_tiling": False}),
        (["--vae-tile-size", "64x96"], {"vae_tile_size": TileExtent(64, 96)}),
        (["--vae-tile-stride=48x64x8"], {"vae_tile_stride": TileExtent(48, 64, 8)}),
        (["--boundary-ratio", "0.9"], {"boundary_ratio": 0.9}),
        (["--seed", "0"], {"seed": 0}),
        (["--default-sampling-params", '{"fps": 16}'], {"default_sampling_params": {"fps": 16}}),
        (["--api-key", "a", "b"], {"api_key": ("a", "b")}),
        (["--allowed-origins", '["x", "y"]'], {"allowed_origins": ("x", "y")}),
        (["--media-ttl", "5"], {"media_ttl": 5.0}),
    ],
)
def test_words_to_values(words: list[str], values: dict[str, Any]) -> None:
    assert parse(*words) == values


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--vae-parallel-mode", "tiles"], "vae_parallel_mode 'tiles' is not known; choose one of tile, auto"),
        (["--vae-tile-merge", "mean"], "vae_tile_merge 'mean' is not known; choose one of blend, sum"),
        (["--vae-encode-split", "ranks"], "split 'ranks' is not known; choose one of tile, rank"),
        (["--vae-tile-size", "64"], "'64' is no tile extent; write HxW"),
        (["--default-sampling-params", "nope"], "'nope' is not JSON"),
        (["--vae-patch-parallel-size", "two"], "invalid int value: 'two'"),
    ],
)
def test_a_bad_word_is_a_usage_error_with_the_reason(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(*words)
    assert caught.value.code == 2
    assert reason in capsys.readouterr().err


def words_of(flag: Flag, value: Any) -> list[str]:
    name = flag.spellings[0]
    if isinstance(value, bool):
        return [name if value else "--no-" + name[2:]]
    if isinstance(value, tuple):
        return [name, *value] if value else []
    return [] if value is None else [f"{name}={value}"]


@given(
    st.fixed_dictionaries(
        {"vae_use_tiling": st.just(True)},
        optional={
            "vae_patch_parallel_size": st.integers(1, 8),
            "vae_parallel_mode": st.sampled_from(VaeParallelMode),
            "num_gpus": st.integers(16, 64),
            "tensor_parallel_size": st.integers(1, 4),
            "ulysses_degree": st.integers(1, 4),
            "use_hsdp": st.booleans(),
            "vae_use_slicing": st.booleans(),
            "vae_tile_size": st.builds(TileExtent, st.integers(1, 999), st.integers(1, 999)),
            "vae_tile_stride": st.builds(TileExtent, st.integers(1, 999), st.integers(1, 999), st.integers(1, 9)),
            "dtype": st.sampled_from(["auto", "float32", "bfloat16"]),
            "seed": st.integers(0, 2**31),
            "flow_shift": st.floats(0.1, 20),
            "worker_timeout": st.floats(0.001, 1e6),
        },
    )
)
def test_a_configuration_survives_the_command_line(values: dict[str, Any]) -> None:
    by_name = {flag.name: flag for flag in flags()}
    words = [word for name, value in values.items() for word in words_of(by_name[name], value)]
    assert engine_config("m", parse(*words)) == engine_config("m", values)


def test_pick_leaves_other_names_alone() -> None:
    values = {"vae_patch_parallel_size": 2, "port": 1, "vae_use_slicing": True, "something": "else"}
    assert pick(DiffusionParallelConfig, values) == DiffusionParallelConfig(vae_patch_parallel_size=2)
    assert pick(VaeConfig, values) == VaeConfig(vae_use_slicing=True)
    assert pick(ServerConfig, values).port == 1


@pytest.mark.parametrize("flag", ["--vae-tile-size", "--vae-tile-stride"])
def test_a_tile_geometry_without_tiles_is_refused(flag: str) -> None:
    with pytest.raises(ConfigurationError, match="does nothing without tiling"):
        engine_config("m", parse(flag, "64x64"))
    assert engine_config("m", parse(flag, "64x64", "--vae-patch-parallel-size", "2")).vae is not None
    assert engine_config("m", parse(flag, "64x64", "--vae-use-tiling")).vae.vae_use_tiling


def test_what_contradicts_is_refused_when_all_is_known() -> None:
    with pytest.raises(ConfigurationError, match="drop --no-vae-use-tiling"):
        engine_config("m", parse("--vae-patch-parallel-size", "2", "--no-vae-use-tiling"))
