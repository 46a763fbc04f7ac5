# SPDX-License-Identifier: Apache-2.0
"""Flags are the configuration's fields: each has one, and what is given arrives in it."""

import argparse
import re
import types
import typing
from typing import Any

import pytest

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
from vllm_omni_vae.config.engine import ExecutorBackend
from vllm_omni_vae.config.flags import Flag, add_arguments, engine_config, flags, pick

FLAGS = flags()


def _parse(*words: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_arguments(parser, shared=True)
    return vars(parser.parse_args(words))


def _samples(flag: Flag) -> list[tuple[list[str], Any]]:
    """Words after the flag, and the value they stand for."""
    kind = flag.type
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    if typing.get_origin(kind) is tuple:
        return [(["a"], ("a",)), (["a", "b"], ("a", "b")), (['["a", "b"]'], ("a", "b")), (["[a"], ("[a",))]
    samples: dict[Any, list[tuple[list[str], Any]]] = {
        bool: [([], True)],
        int: [(["7"], 7), (["-1"], -1)],
        float: [(["2.5"], 2.5)],
        str: [(["some text"], "some text")],
        TileExtent: [(["32x48"], TileExtent(32, 48)), (["32x48x8"], TileExtent(32, 48, 8))],
        VaeParallelMode: [([mode.value], mode) for mode in VaeParallelMode],
        VaeTileMerge: [([merge.value], merge) for merge in VaeTileMerge],
        VaeSplit: [([split.value], split) for split in VaeSplit],
        ExecutorBackend: [([backend.value], backend) for backend in ExecutorBackend],
    }
    return samples.get(kind) or [(['{"a": [1]}'], {"a": [1]})]


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_what_is_given_arrives_in_its_field_and_nothing_else_does(flag: Flag) -> None:
    for spelling in flag.spellings:
        for words, value in _samples(flag):
            assert _parse(spelling, *words) == {flag.name: value}
    if flag.type in (bool, bool | None):
        assert _parse("--no" + flag.spellings[0][1:]) == {flag.name: False}


def test_nothing_given_is_the_default_configuration() -> None:
    given = _parse()
    assert given == {}
    assert engine_config("model", given) == EngineConfig(model="model")
    assert pick(ServerConfig, given) == ServerConfig()


def test_every_field_of_every_configuration_is_a_flag_or_named_here() -> None:
    fields = {
        field
        for config in (DiffusionParallelConfig, VaeConfig, EngineConfig, ServerConfig)
        for field in config.__dataclass_fields__
    }
    assert fields - {flag.name for flag in FLAGS} == {"model", "parallel", "vae"}
    assert len({flag.name for flag in FLAGS}) == len(FLAGS)


def test_a_whole_configuration_survives_the_command_line() -> None:
    words = [
        *("--vae-patch-parallel-size", "4", "--vae-parallel-mode", "spatial_shard_grid", "--vae-tile-size", "256x320"),
        *("--vae-use-slicing", "--usp", "2", "--ring", "2", "--use-hsdp", "--dtype", "float16"),
        *("--boundary-ratio", "0.9", "--api-key", "k1", "k2", "--no-allow-credentials", "--max-queued-jobs", "3"),
    ]
    assert engine_config("model", _parse(*words)) == EngineConfig(
        model="model",
        parallel=DiffusionParallelConfig(
            vae_patch_parallel_size=4,
            vae_parallel_mode=VaeParallelMode.SPATIAL_SHARD_GRID,
            ulysses_degree=2,
            ring_degree=2,
            use_hsdp=True,
        ),
        vae=VaeConfig(vae_tile_size=TileExtent(256, 320), vae_use_slicing=True),
        dtype="float16",
        boundary_ratio=0.9,
    )
    assert pick(ServerConfig, _parse(*words)) == ServerConfig(api_key=("k1", "k2"), max_queued_jobs=3)


def test_help_shows_every_flag_once_with_its_default() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, shared=True)
    text = parser.format_help().split("DiffusionParallelConfig:", 1)[1]
    shown = re.findall(r"^  (-.+?)(?:  |$)", text, re.MULTILINE)
    names = [re.findall(r"--[a-z][a-z0-9-]*", line)[0] for line in shown]
    assert names == [flag.spellings[0] for flag in FLAGS]
    assert "Default: tile." in text


def test_a_parser_that_has_a_spelling_keeps_it() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-gpus", dest="theirs")
    parser.add_argument("--usp", dest="also_theirs")
    added = {flag.name for flag in add_arguments(parser, shared=False)}
    assert "num_gpus" not in added
    assert added == {flag.name for flag in FLAGS if not flag.option.shared} - {"num_gpus"}
    given = vars(parser.parse_args(["--num-gpus", "2", "--usp", "3", "--ulysses-degree", "4"]))
    assert given == {"theirs": "2", "also_theirs": "3", "ulysses_degree": 4}
