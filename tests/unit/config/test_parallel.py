# SPDX-License-Identifier: Apache-2.0
"""The parallelism that is asked for: sizes, modes, and what they add up to."""

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_vae.config import DiffusionParallelConfig, VaeParallelMode, VaeTileMerge
from vllm_omni_vae.errors import ConfigurationError, VaeParallelError

SIZES = (
    "vae_patch_parallel_size",
    "tensor_parallel_size",
    "ulysses_degree",
    "ring_degree",
    "cfg_parallel_size",
    "hsdp_replicate_size",
    "data_parallel_size",
)


def test_the_default_is_one_rank_that_tiles_nothing() -> None:
    config = DiffusionParallelConfig()
    assert config.vae_parallel_mode is VaeParallelMode.TILE
    assert config.vae_tile_merge is VaeTileMerge.BLEND
    assert (config.vae_patch_parallel_size, config.dit_world_size, config.world_size) == (1, 1, 1)


def test_it_is_a_value() -> None:
    config = DiffusionParallelConfig(vae_patch_parallel_size=2)
    assert config == DiffusionParallelConfig(vae_patch_parallel_size=2)
    assert hash(config) == hash(DiffusionParallelConfig(vae_patch_parallel_size=2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.vae_patch_parallel_size = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        DiffusionParallelConfig(2)  # type: ignore[misc]


@pytest.mark.parametrize("mode", VaeParallelMode)
def test_modes_are_read_from_their_text(mode: VaeParallelMode) -> None:
    assert VaeParallelMode.parse(mode.value) is VaeParallelMode.parse(mode) is mode
    assert DiffusionParallelConfig(vae_parallel_mode=mode.value).vae_parallel_mode is mode  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "TILE", "tiles", "spatial_shard", "direct", "rank_split"])
def test_an_unknown_mode_is_refused_with_those_there_are(text: str) -> None:
    expected = f"vae_parallel_mode {text!r} is not known; choose one of tile, auto, spatial_shard_height"
    with pytest.raises(ConfigurationError, match=re.escape(expected)):
        DiffusionParallelConfig(vae_parallel_mode=text)  # type: ignore[arg-type]


@pytest.mark.parametrize("merge", VaeTileMerge)
def test_merges_are_read_from_their_text(merge: VaeTileMerge) -> None:
    config = DiffusionParallelConfig(vae_patch_parallel_size=2, vae_tile_merge=merge.value)  # type: ignore[arg-type]
    assert config.vae_tile_merge is merge


def test_a_merge_that_is_unknown_or_would_do_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="vae_tile_merge 'SUM' is not known; choose one of blend, sum"):
        DiffusionParallelConfig(vae_patch_parallel_size=2, vae_tile_merge="SUM")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="vae_tile_merge sum does nothing on one VAE rank; give"):
        DiffusionParallelConfig(vae_tile_merge=VaeTileMerge.SUM)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1])
def test_a_size_counts_ranks(name: str, value: int) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} is {value}; it counts ranks and must be at least 1"):
        DiffusionParallelConfig(**{name: value})


def test_a_configuration_error_is_also_a_value_error() -> None:
    with pytest.raises(ValueError, match="at least 1") as caught:
        DiffusionParallelConfig(vae_patch_parallel_size=0)
    assert isinstance(caught.value, VaeParallelError)


@pytest.mark.parametrize(
    ("values", "denoiser", "world"),
    [
        ({"vae_patch_parallel_size": 4}, 1, 4),
        ({"tensor_parallel_size": 2, "vae_patch_parallel_size": 4}, 2, 4),
        ({"tensor_parallel_size": 2, "ulysses_degree": 2, "ring_degree": 2, "cfg_parallel_size": 2}, 16, 16),
        ({"cfg_parallel_size": 2, "num_gpus": 3}, 2, 3),
        ({"vae_patch_parallel_size": 8, "num_gpus": 2}, 1, 2),
        ({"use_hsdp": True, "hsdp_shard_size": 4}, 4, 4),
        ({"use_hsdp": True, "hsdp_shard_size": 2, "hsdp_replicate_size": 2}, 4, 4),
        ({"use_hsdp": True, "ulysses_degree": 4}, 4, 4),
        ({"use_hsdp": True, "ulysses_degree": 4, "hsdp_replicate_size": 2}, 4, 4),
    ],
)
def test_world_sizes(values: dict[str, Any], denoiser: int, world: int) -> None:
    config = DiffusionParallelConfig(**values)
    assert (config.dit_world_size, config.world_size) == (denoiser, world)


def test_the_vae_takes_no_more_ranks_than_there_are() -> None:
    assert DiffusionParallelConfig(vae_patch_parallel_size=8, num_gpus=2).vae_ranks == 2
    assert DiffusionParallelConfig(vae_patch_parallel_size=2, num_gpus=8).vae_ranks == 2
    assert DiffusionParallelConfig(vae_patch_parallel_size=8).vae_ranks == 8


@pytest.mark.parametrize(
    ("values", "mesh"),
    [
        ({"use_hsdp": True, "hsdp_shard_size": 4}, (1, 4)),
        ({"use_hsdp": True, "hsdp_shard_size": 2, "hsdp_replicate_size": 3}, (3, 2)),
        ({"use_hsdp": True, "ulysses_degree": 4, "hsdp_replicate_size": 2}, (2, 2)),
        ({"use_hsdp": True}, (1, 1)),
    ],
)
def test_hsdp_meshes(values: dict[str, Any], mesh: tuple[int, int]) -> None:
    assert DiffusionParallelConfig(**values).hsdp_mesh == mesh


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"use_hsdp": True, "hsdp_shard_size": 0}, "hsdp_shard_size is 0; give at least 1, or -1"),
        ({"use_hsdp": True, "hsdp_shard_size": -2}, "hsdp_shard_size is -2"),
        ({"hsdp_shard_size": 2}, "do nothing without use_hsdp"),
        ({"hsdp_replicate_size": 2}, "do nothing without use_hsdp"),
        ({"use_hsdp": True, "hsdp_replicate_size": 2}, "1 denoiser ranks cannot hold 2 copies"),
        ({"use_hsdp": True, "ulysses_degree": 4, "hsdp_replicate_size": 3}, "4 denoiser ranks cannot hold 3 copies"),
        ({"use_hsdp": True, "ulysses_degree": 4, "hsdp_shard_size": 2}, "HSDP covers 2 ranks and .* parallelism 4"),
        ({"num_gpus": 3, "tensor_parallel_size": 4}, "num_gpus is 3 but the denoiser's parallelism needs 4"),
        ({"num_gpus": 0}, "num_gpus is 0"),
        ({"num_gpus": 2, "use_hsdp": True, "hsdp_shard_size": 4}, "num_gpus is 2 but .* needs 4"),
    ],
)
def test_sizes_that_contradict_each_other(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        DiffusionParallelConfig(**values)


@given(st.fixed_dictionaries({name: st.integers(1, 4) for name in SIZES[:5]}), st.none() | st.integers(1, 300))
def test_every_rank_has_a_place(sizes: dict[str, int], num_gpus: int | None) -> None:
    denoiser = sizes["tensor_parallel_size"] * sizes["ulysses_degree"]
    denoiser *= sizes["ring_degree"] * sizes["cfg_parallel_size"]
    if num_gpus is not None and num_gpus < denoiser:
        with pytest.raises(ConfigurationError):
            DiffusionParallelConfig(**sizes, num_gpus=num_gpus)
        return
    config = DiffusionParallelConfig(**sizes, num_gpus=num_gpus)
    assert config.dit_world_size == denoiser <= config.world_size
    assert 1 <= config.vae_ranks <= min(config.world_size, sizes["vae_patch_parallel_size"])
    assert config.world_size == (num_gpus or max(denoiser, sizes["vae_patch_parallel_size"]))


def test_replicas_share_the_ranks_that_there_are() -> None:
    shared = DiffusionParallelConfig(vae_patch_parallel_size=2, data_parallel_size=3, num_gpus=6)
    assert (shared.world_size, shared.vae_ranks) == (2, 2)
    assert DiffusionParallelConfig(vae_patch_parallel_size=2, data_parallel_size=3).world_size == 2
    assert DiffusionParallelConfig(vae_patch_parallel_size=2, data_parallel_size=2, num_gpus=2).vae_ranks == 1
    with pytest.raises(ConfigurationError, match=r"num_gpus is 4, which 3 replicas .* cannot share evenly"):
        DiffusionParallelConfig(data_parallel_size=3, num_gpus=4)
    with pytest.raises(ConfigurationError, match="num_gpus is 2 but the denoiser's parallelism needs 4 ranks"):
        DiffusionParallelConfig(ulysses_degree=2, data_parallel_size=2, num_gpus=2)
