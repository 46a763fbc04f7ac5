# SPDX-License-Identifier: Apache-2.0
"""What is no video is a failed job, never a finished one."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.engine.engines import RESULT_SECONDS, Engines, ask, submit
from tests.helpers.weights import spoil
from vllm_omni_vae.engine.engine import Engine
from vllm_omni_vae.errors import EngineError

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def engine(
    engines: Engines, checkpoints: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """The VAE's decoder makes infinite pixels, and the second expert makes latents that are not a number."""
    folder = Path(shutil.copytree(checkpoints["wan2.2-t2v"], tmp_path_factory.mktemp("spoilt") / "copy"))
    spoil(folder / "vae" / "diffusion_pytorch_model.safetensors", "decoder.conv_out.bias", float("inf"))
    spoil(folder / "transformer_2" / "diffusion_pytorch_model.safetensors", "proj_out.bias", float("nan"))
    engine = Engine(engines.config("t2v on one rank", model=str(folder)))
    try:
        engine.start()
        yield engine
    finally:
        engine.close()


@pytest.mark.parametrize("boundary_ratio", [0.0, 1.0], ids=["infinite pixels", "latents that are not a number"])
@pytest.mark.parametrize("width", [32, 80], ids=["direct", "tiled"])
def test_values_that_are_not_finite_fail_the_job(boundary_ratio: float, width: int, engine: Engine) -> None:
    """A decoder clamps infinite pixels to white ones, which look finite."""
    pids = engine.worker_pids
    request = ask(engine, width=width, height=32, boundary_ratio=boundary_ratio)
    error = submit(engine, request).future.exception(RESULT_SECONDS)
    assert isinstance(error, EngineError)
    assert error.code == "invalid_output"
    assert "not finite" in str(error)
    assert engine.worker_pids == pids
    assert engine.health().healthy
