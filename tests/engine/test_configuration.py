# SPDX-License-Identifier: Apache-2.0
"""What an engine knows before it starts any process: its model, its defaults, and what it refuses."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.engine.processes import children
from vllm_omni_vae.config import DiffusionParallelConfig, EngineConfig
from vllm_omni_vae.engine.engine import Engine
from vllm_omni_vae.errors import ConfigurationError, UnsupportedError
from vllm_omni_vae.pipelines import processors
from vllm_omni_vae.pipelines.request import GenerationRequest

SMALL: dict[str, Any] = {"prompt": "a boat", "width": 64, "height": 64, "num_frames": 5}


@pytest.fixture
def build(checkpoints: Mapping[str, Path]) -> Any:
    """Make an engine for a family; no process may come of it."""

    def build(family: str = "wan2.2-t2v", **fields: Any) -> Engine:
        before = children()
        try:
            return Engine(EngineConfig(model=str(checkpoints[family]), **fields))
        finally:
            assert children() == before

    return build


@pytest.mark.parametrize(
    ("parallel", "flag"),
    [
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size"),
        ({"cfg_parallel_size": 2}, "--cfg-parallel-size"),
        ({"ulysses_degree": 2, "ring_degree": 2}, "--ring-degree"),
        ({"ulysses_degree": 2, "use_hsdp": True}, "--use-hsdp"),
    ],
)
def test_parallelism_that_the_pipeline_does_not_have_is_refused(
    parallel: dict[str, Any], flag: str, build: Any
) -> None:
    with pytest.raises(ConfigurationError, match=rf"WanPipeline cannot be run as asked: {flag}"):
        build(parallel=DiffusionParallelConfig(**parallel))


def test_a_processor_that_cannot_be_loaded_is_refused(
    checkpoints: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(checkpoints["wan2.2-t2v"], tmp_path / "checkpoint")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"tokenizer": ["transformers", "PixtralProcessor"]}))
    Engine(EngineConfig(model=str(folder)))
    monkeypatch.setattr(processors, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"cannot be run as asked: tokenizer: .* needs torchvision"):
        Engine(EngineConfig(model=str(folder)))


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no diffusers checkpoint: there is no model_index\.json"):
        Engine(EngineConfig(model=str(tmp_path)))


def test_a_pipeline_that_nobody_serves_is_refused(checkpoints: Mapping[str, Path], tmp_path: Path) -> None:
    index = json.loads((checkpoints["wan2.2-t2v"] / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"_class_name": "FluxPipeline"}))
    with pytest.raises(UnsupportedError, match="FluxPipeline checkpoint, which cannot be served"):
        Engine(EngineConfig(model=str(tmp_path)))


@pytest.mark.parametrize("missing", ["transformer/config.json", "vae/config.json"])
def test_an_incomplete_checkpoint_is_refused(missing: str, checkpoints: Mapping[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoints["wan2.2-t2v"], tmp_path / "copy"))
    (folder / missing).unlink()
    with pytest.raises(ConfigurationError, match=rf"{missing}.*is this a complete diffusers checkpoint\?"):
        Engine(EngineConfig(model=str(folder)))


def test_an_engine_that_was_not_started_is_not_healthy(build: Any) -> None:
    engine = build()
    assert not engine.health().healthy
    assert engine.health().reason
    assert engine.worker_pids == []
    assert engine.card.pipeline_class == "WanPipeline"


def test_the_operator_s_values_are_filled_in(build: Any) -> None:
    engine = build(flow_shift=4.0, boundary_ratio=0.5, default_sampling_params={"num_inference_steps": 7, "fps": 8})
    request = engine.resolve(GenerationRequest(**SMALL, fps=12))
    assert (request.flow_shift, request.boundary_ratio) == (4.0, 0.5)
    assert (request.num_inference_steps, request.fps) == (7, 12)
    given = engine.resolve(GenerationRequest(**SMALL, flow_shift=1.0, boundary_ratio=0.9))
    assert (given.flow_shift, given.boundary_ratio) == (1.0, 0.9)


def test_a_seed_is_the_request_s_else_the_engine_s_else_a_new_one(build: Any) -> None:
    open_request, given = GenerationRequest(**SMALL), GenerationRequest(**SMALL, seed=0)
    assert build(seed=11).resolve(open_request).seed == 11
    assert build(seed=0).resolve(open_request).seed == 0
    assert build(seed=11).resolve(given).seed == 0
    engine = build()
    seeds = {engine.resolve(open_request).seed for _ in range(4)}
    assert len(seeds) == 4
    assert all(isinstance(seed, int) and 0 <= seed < 2**63 for seed in seeds)


def test_a_seed_among_the_operator_s_values_is_used(build: Any) -> None:
    assert build(default_sampling_params={"seed": 7}).resolve(GenerationRequest(**SMALL)).seed == 7


@pytest.mark.parametrize(
    ("family", "defaults"),
    [
        ("wan2.2-t2v", {"num_inference_stpes": 30}),
        ("wan2.2-t2v", {"prompt": "a boat"}),
        ("wan2.2-t2v", {"width": 100}),
        ("wan2.2-t2v", {"num_frames": 6}),
        ("wan2.2-ti2v-5b", {"guidance_scale_2": 3.0}),
        ("wan2.2-ti2v-5b", {"boundary_ratio": 0.5}),
    ],
    ids=["misspelt", "never used", "impossible size", "impossible frames", "one expert", "no boundary"],
)
def test_an_operator_s_value_that_no_request_can_use_is_refused_at_start(
    family: str, defaults: dict[str, Any], build: Any
) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(defaults))):
        build(family, default_sampling_params=defaults)
