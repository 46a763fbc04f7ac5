# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` of a diffusers checkpoint starts this package's server with what the user gave."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from vllm_omni_vae.config import DiffusionParallelConfig, EngineConfig, ServerConfig, TileExtent, VaeConfig

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(500)]


def _as_read(config: Any) -> Any:
    """``config`` as it comes back from the other process's JSON."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, tuple | list) else value

    return plain(dataclasses.asdict(config))


def _assert_started(outcome: Mapping[str, Any], engine: EngineConfig, server: ServerConfig) -> None:
    assert outcome["ran"] == "ours", outcome["stderr"]
    assert outcome["exit"] is None
    assert outcome["engine"] == _as_read(engine)
    assert outcome["server"] == _as_read(server)


def test_a_bare_model_gets_our_defaults_and_not_vllms(with_plugin: Mapping[str, Any], models: Path) -> None:
    outcome = with_plugin["commands"]["bare"]
    _assert_started(outcome, EngineConfig(model=str(models / "wan")), ServerConfig())
    assert "Ignored" not in outcome["stderr"]


def test_flags_of_both_reach_their_fields(with_plugin: Mapping[str, Any], models: Path) -> None:
    outcome = with_plugin["commands"]["full"]
    engine = EngineConfig(
        model=str(models / "wan"),
        parallel=DiffusionParallelConfig(
            vae_patch_parallel_size=2,
            vae_parallel_mode="spatial_shard_width",
            num_gpus=4,
            ulysses_degree=2,
            use_hsdp=True,
        ),
        vae=VaeConfig(vae_tile_size=TileExtent(256, 320)),
        dtype="bfloat16",
        seed=11,
        flow_shift=5.0,
        default_sampling_params={"num_inference_steps": 4},
    )
    server = ServerConfig(
        host="127.0.0.1",
        port=8123,
        api_key=("k1", "k2"),
        served_model_name=("wan", "wan-alias"),
        allowed_origins=("https://a",),
        disable_uvicorn_access_log=True,
        allowed_media_domains=("a.example", "b.example"),
        max_pixels=1000,
    )
    _assert_started(outcome, engine, server)
    assert "Ignored" not in outcome["stderr"]


def test_a_value_that_equals_vllms_default_still_counts_as_given(with_plugin: Mapping[str, Any], models: Path) -> None:
    outcome = with_plugin["commands"]["defaults_given"]
    _assert_started(outcome, EngineConfig(model=str(models / "wan"), seed=0), ServerConfig())


def test_flags_for_language_models_are_named_once_and_ignored(with_plugin: Mapping[str, Any], models: Path) -> None:
    outcome = with_plugin["commands"]["llm_flags"]
    _assert_started(outcome, EngineConfig(model=str(models / "wan")), ServerConfig(port=8123))
    assert outcome["stderr"].count("Ignored, because they mean nothing to a diffusion model") == 1
    assert "--gpu-memory-utilization, --max-model-len\n" in outcome["stderr"]


def test_the_model_may_be_given_as_a_flag(with_plugin: Mapping[str, Any], models: Path) -> None:
    engine = EngineConfig(model=str(models / "wan"), vae=VaeConfig(vae_use_tiling=True))
    _assert_started(with_plugin["commands"]["model_flag"], engine, ServerConfig())


def test_a_yaml_file_gives_model_and_flags_and_the_command_line_wins(
    with_plugin: Mapping[str, Any], models: Path
) -> None:
    engine = EngineConfig(
        model=str(models / "wan"),
        parallel=DiffusionParallelConfig(vae_patch_parallel_size=2),
        vae=VaeConfig(vae_use_slicing=True),
        default_sampling_params={"num_inference_steps": 3},
    )
    _assert_started(with_plugin["commands"]["yaml"], engine, ServerConfig(port=8300))


@pytest.mark.parametrize("name", ["unregistered", "unregistered_with_flag"])
def test_a_pipeline_that_is_not_registered_is_refused_with_those_that_are(
    with_plugin: Mapping[str, Any], name: str
) -> None:
    outcome = with_plugin["commands"][name]
    assert (outcome["ran"], outcome["exit"]) == (None, 2)
    assert "NobodysPipeline checkpoint, which cannot be served" in outcome["stderr"]
    assert "WanPipeline" in outcome["stderr"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bad_value", "'wide' is no tile extent"),
        ("bad_combination", "error: vae_parallel_mode tile on 2 ranks works in tiles"),
        ("bad_shared_value", "error: distributed_executor_backend 'uni' is not available"),
    ],
)
def test_a_value_that_cannot_work_ends_the_start_with_one_line(
    with_plugin: Mapping[str, Any], name: str, message: str
) -> None:
    outcome = with_plugin["commands"][name]
    assert (outcome["ran"], outcome["exit"]) == (None, 2)
    assert message in outcome["stderr"].splitlines()[-1]
    assert "Traceback" not in outcome["stderr"]
