# SPDX-License-Identifier: Apache-2.0
"""With --vae-check-latents a denoiser rank whose encode gives other latents fails the job; without, nobody knows."""

import os
from pathlib import Path

import pytest

from tests.engine.engines import RESULT_SECONDS, Engines, ask, run, submit
from vllm_omni_vae.config import DiffusionParallelConfig, VaeConfig
from vllm_omni_vae.engine.engine import Engine
from vllm_omni_vae.errors import ConfigurationError, EngineError

pytestmark = pytest.mark.distributed

ANOTHER_BIT_ON_RANK_1 = """
import sys

if "vllm_omni_vae.worker" in sys.orig_argv:
    import torch

    from vllm_omni_vae.worker import loader

    load = loader.load

    def load_and_change(config, rank, *args, **kwargs):
        model = load(config, rank, *args, **kwargs)
        if rank == 1:
            for vae in model.vaes.values():
                vae.encoder.conv_in.weight.detach().view(torch.int32).view(-1)[0] ^= 1 << 22
        return model

    loader.load = load_and_change
"""


def engine_of(engines: Engines, *, check: bool) -> Engine:
    """Two denoiser ranks, each of which encodes the reference image by itself."""
    config = engines.config(
        "i2v", parallel=DiffusionParallelConfig(ulysses_degree=2), vae=VaeConfig(vae_check_latents=check)
    )
    return Engine(config)


@pytest.mark.parametrize("check", [True, False])
def test_a_bit_of_one_rank_s_weights(
    check: bool, engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(ANOTHER_BIT_ON_RANK_1)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    engine = engine_of(engines, check=check)
    try:
        engine.start()
        pids = engine.worker_pids
        for _ in range(2):
            error = submit(engine, ask(engine, width=32, height=32)).future.exception(RESULT_SECONDS)
            if not check:
                assert error is None
                continue
            assert isinstance(error, EngineError)
            assert error.code == "rank_failed"
            assert "different checksum of an encode's result: rank 0 has (" in str(error)
            assert "), rank 1 has (" in str(error)
        assert engine.worker_pids == pids
    finally:
        engine.close()


def test_ranks_that_agree(engines: Engines) -> None:
    engine = engine_of(engines, check=True)
    try:
        engine.start()
        assert run(engine, ask(engine, width=32, height=32)).frames.shape == (5, 32, 32, 3)
    finally:
        engine.close()


def test_one_denoiser_rank_has_nobody_to_compare_with(engines: Engines) -> None:
    with pytest.raises(ConfigurationError, match="there is one"):
        engines.config("i2v", vae=VaeConfig(vae_check_latents=True))
