# SPDX-License-Identifier: Apache-2.0
"""A start that cannot work says why and leaves nothing behind."""

import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engine.engines import RESULT_SECONDS, Engines, ask, submit
from tests.engine.processes import children, open_files, until
from vllm_omni_vae.config import DiffusionParallelConfig
from vllm_omni_vae.engine.engine import Engine
from vllm_omni_vae.errors import ConfigurationError, EngineError

pytestmark = pytest.mark.distributed


@pytest.fixture
def copy(checkpoints: Mapping[str, Path], tmp_path: Path) -> Path:
    """A checkpoint of one's own to spoil."""
    return Path(shutil.copytree(checkpoints["wan2.2-t2v"], tmp_path / "copy"))


def check_refused(engine: Engine, kind: type[Exception], reason: str) -> None:
    """Starting raises ``kind``; all processes end by themselves; the engine says the same ever after."""
    before = children()
    with pytest.raises(kind, match=reason) as caught:
        engine.start()
    until(lambda: children() == before)
    assert engine.wait() is caught.value
    assert not engine.health().healthy
    assert engine.health().reason == str(caught.value)
    with pytest.raises(EngineError, match="takes no jobs"):
        submit(engine, ask(engine))
    engine.close()


def test_ring_attention_is_refused_on_the_cpu(engines: Engines) -> None:
    engine = Engine(engines.config("t2v on one rank", parallel=DiffusionParallelConfig(ring_degree=2)))
    check_refused(engine, ConfigurationError, "--ring-degree: the CPU's attention")


def test_a_missing_weight_file_is_named(engines: Engines, copy: Path) -> None:
    """Only rank 0 reads it; the other one, which waits for rank 0, ends too."""
    (copy / "transformer_2" / "diffusion_pytorch_model.safetensors").unlink()
    parallel = DiffusionParallelConfig(vae_patch_parallel_size=2)
    engine = Engine(engines.config("t2v on one rank", model=str(copy), parallel=parallel))
    check_refused(engine, EngineError, r"rank 0 could not load the model: .*transformer_2")


def test_closing_ends_a_start(engines: Engines) -> None:
    before, files = children(), open_files()
    engine = Engine(engines.config("t2v on one rank"))
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(engine.start)
        until(lambda: engine.worker_pids)
        waiting = submit(engine, ask(engine))
        engine.close()
        error = started.exception(RESULT_SECONDS)
    assert isinstance(error, EngineError)
    assert error.code == "engine_stopped"
    assert isinstance(waiting.future.exception(0), EngineError)
    assert children() == before
    assert open_files() == files
    assert engine.wait() is None
