# SPDX-License-Identifier: Apache-2.0
"""What a Wan pipeline cannot be run with is said at start, by flag and with what to do; all of it at once."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from vllm_omni_vae.config import DiffusionParallelConfig, EngineConfig
from vllm_omni_vae.pipelines.wan2_2 import WanProfile


@pytest.fixture
def refusals(checkpoints: Mapping[str, Path]) -> Any:
    def refusals(family: str = "wan2.2-t2v", boundary_ratio: float | None = None, **parallel: Any) -> list[str]:
        config = EngineConfig(model=family, parallel=DiffusionParallelConfig(**parallel), boundary_ratio=boundary_ratio)
        return WanProfile().refusals(checkpoints[family], config)

    return refusals


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"vae_patch_parallel_size": 4},
        {"ulysses_degree": 2},
        {"ring_degree": 2},
        {"use_hsdp": True, "hsdp_shard_size": 2},
        {"use_hsdp": True, "hsdp_shard_size": 2, "hsdp_replicate_size": 2},
        {"num_gpus": 3, "vae_patch_parallel_size": 2},
    ],
)
def test_what_can_be_done_is_not_refused(parallel: dict[str, Any], refusals: Any) -> None:
    assert refusals(**parallel) == []


@pytest.mark.parametrize(
    ("parallel", "reason"),
    [
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size: .*; use --ulysses-degree"),
        ({"cfg_parallel_size": 2}, "--cfg-parallel-size: "),
        ({"ulysses_degree": 2, "ring_degree": 2}, "--ring-degree together with --ulysses-degree"),
        ({"ulysses_degree": 2, "use_hsdp": True}, "--use-hsdp together with sequence parallelism"),
        ({"ring_degree": 2, "use_hsdp": True}, "--use-hsdp together with sequence parallelism"),
    ],
)
def test_what_cannot_be_done_is_refused_by_flag(parallel: dict[str, Any], reason: str, refusals: Any) -> None:
    (found,) = refusals(**parallel)
    assert re.match(reason, found)


def test_every_reason_is_given_at_once(refusals: Any) -> None:
    found = refusals("wan2.1-t2v", 0.5, tensor_parallel_size=2, cfg_parallel_size=2, ulysses_degree=2, ring_degree=2)
    assert [line.split(":")[0].split(" ")[0] for line in found] == [
        "--tensor-parallel-size",
        "--cfg-parallel-size",
        "--ring-degree",
        "--boundary-ratio",
    ]


@pytest.mark.parametrize(("family", "refused"), [("wan2.2-t2v", 0), ("wan2.1-t2v", 1), ("wan2.2-ti2v-5b", 1)])
def test_a_boundary_needs_two_experts(family: str, refused: int, refusals: Any) -> None:
    found = refusals(family, 0.5)
    assert len(found) == refused
    assert all(line.startswith("--boundary-ratio: this checkpoint has one expert") for line in found)


@pytest.mark.parametrize("parallel", [{}, {"hsdp_shard_size": 1}, {"vae_patch_parallel_size": 2}])
def test_sharding_weights_over_one_rank_is_refused_instead_of_doing_nothing(
    parallel: dict[str, Any], refusals: Any
) -> None:
    (found,) = refusals(use_hsdp=True, **parallel)
    assert found.startswith("--use-hsdp")
