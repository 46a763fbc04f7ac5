# SPDX-License-Identifier: Apache-2.0
"""The engine's, the VAE's and the server's settings."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_vae.config import DiffusionParallelConfig, EngineConfig, ServerConfig, TileExtent, VaeConfig
from vllm_omni_vae.errors import ConfigurationError


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.none() | st.integers(1, 10**4))
def test_a_tile_extent_is_read_back_from_its_text(height: int, width: int, frames: int | None) -> None:
    extent = TileExtent(height, width, frames)
    assert TileExtent.parse(str(extent)) == TileExtent.parse(extent) == extent


@pytest.mark.parametrize("text", ["256X192", " 256x192 ", "256x192"])
def test_tile_extents_forgive_case_and_spaces(text: str) -> None:
    assert TileExtent.parse(text) == TileExtent(256, 192)


@pytest.mark.parametrize(
    "text", ["", "256", "256x", "x256", "0x256", "256x0", "256x256x0", "-1x5", "2.5x2", "1x2x3x4", "256 x 256", "axb"]
)
def test_other_texts_are_no_tile_extent(text: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"{text!r} is no tile extent; write HxW in pixels")):
        TileExtent.parse(text)


def test_a_vae_config_reads_its_extents() -> None:
    config = VaeConfig(vae_tile_size="64x96", vae_tile_stride=TileExtent(48, 80))  # type: ignore[arg-type]
    assert config.vae_tile_size == TileExtent(64, 96)
    assert config.vae_tile_stride == TileExtent(48, 80)
    assert config.vae_use_tiling is None
    with pytest.raises(ConfigurationError, match="'64' is no tile extent"):
        VaeConfig(vae_tile_size="64")  # type: ignore[arg-type]


def engine(**values: Any) -> EngineConfig:
    return EngineConfig(model="m", **values)


@pytest.mark.parametrize("mode", ["tile", "auto"])
def test_tiles_on_several_ranks_contradict_tiling_switched_off(mode: str) -> None:
    parallel = DiffusionParallelConfig(vae_patch_parallel_size=2, vae_parallel_mode=mode)  # type: ignore[arg-type]
    expected = f"vae_parallel_mode {mode} on 2 ranks works in tiles, .* drop --no-vae-use-tiling or set --vae-patch"
    with pytest.raises(ConfigurationError, match=expected):
        engine(parallel=parallel, vae=VaeConfig(vae_use_tiling=False))
    for tiling in (None, True):
        assert engine(parallel=parallel, vae=VaeConfig(vae_use_tiling=tiling)).parallel == parallel


def test_without_tiles_or_ranks_tiling_may_be_off() -> None:
    sharded = DiffusionParallelConfig(vae_patch_parallel_size=2, vae_parallel_mode="spatial_shard_grid")  # type: ignore[arg-type]
    for parallel in (DiffusionParallelConfig(), sharded):
        assert engine(parallel=parallel, vae=VaeConfig(vae_use_tiling=False)).vae.vae_use_tiling is False


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"dtype": "int8"}, "dtype 'int8' is not known; choose one of auto, bfloat16"),
        ({"distributed_executor_backend": "slurm"}, "distributed_executor_backend 'slurm' is not available"),
        ({"boundary_ratio": 1.5}, "boundary_ratio is 1.5; it is a share from 0 to 1"),
        ({"boundary_ratio": float("nan")}, "boundary_ratio is nan"),
        ({"worker_timeout": 0}, "worker_timeout is 0; give seconds above 0"),
        ({"worker_timeout": float("nan")}, "worker_timeout is nan"),
        ({"startup_timeout": -1.0}, "startup_timeout is -1.0"),
        ({"default_sampling_params": "{"}, "'{' is not JSON"),
        ({"default_sampling_params": "[1]"}, "'\\[1\\]' is not a JSON object"),
    ],
)
def test_settings_that_cannot_work(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        engine(**values)


def test_sampling_defaults_are_copied() -> None:
    given_values = {"fps": 16}
    config = engine(default_sampling_params=given_values)
    given_values["fps"] = 8
    assert config.default_sampling_params == {"fps": 16}
    assert engine(default_sampling_params='{"seed": 1}').default_sampling_params == {"seed": 1}
    assert engine().default_sampling_params == {}
    assert engine().default_sampling_params is not engine().default_sampling_params


@pytest.mark.parametrize(
    "name",
    [
        "media_ttl",
        "media_max_bytes",
        "max_queued_jobs",
        "max_upload_bytes",
        "max_pixels",
        "max_frames",
        "job_timeout",
    ],
)
@pytest.mark.parametrize("value", [0, -1])
def test_the_server_s_limits_are_above_zero(name: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} is {value}; give a number above 0"):
        ServerConfig(**{name: value})


@pytest.mark.parametrize("name", ["media_ttl", "job_timeout"])
def test_a_time_that_is_no_number_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} is nan; give a number above 0"):
        ServerConfig(**{name: float("nan")})


def test_the_server_takes_one_string_for_a_list() -> None:
    config = ServerConfig(api_key="k", served_model_name=["a", "b"], allowed_origins=None)  # type: ignore[arg-type]
    assert (config.api_key, config.served_model_name, config.allowed_origins) == (("k",), ("a", "b"), ())


@pytest.mark.parametrize("name", ["ssl_keyfile", "ssl_certfile"])
def test_tls_needs_both_files(name: str) -> None:
    with pytest.raises(ConfigurationError, match="ssl_keyfile and ssl_certfile go together"):
        ServerConfig(**{name: "pem"})
    assert ServerConfig(ssl_keyfile="k", ssl_certfile="c").ssl_keyfile == "k"
