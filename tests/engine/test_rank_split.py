# SPDX-License-Identifier: Apache-2.0
"""A split by rank that is asked for reaches the VAE of every rank, is checked at load, and is what the job tells."""

import dataclasses

import numpy as np
import pytest

from tests.engine.engines import Engines, Tape, ask, run
from vllm_omni_vae.config import DiffusionParallelConfig
from vllm_omni_vae.engine.api import Progress
from vllm_omni_vae.engine.engine import Engine
from vllm_omni_vae.pipelines.request import Stage

pytestmark = pytest.mark.distributed


def test_flags_and_the_environment_reach_the_ranks(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OMNI_WAN_VAE_ENCODE_SPLIT", "rank")
    monkeypatch.setenv("VLLM_OMNI_WAN_VAE_ENCODE_MARGIN", "3")
    config = engines.config("i2v")
    parallel = DiffusionParallelConfig(
        vae_patch_parallel_size=2,
        vae_encode_margin=1,
        vae_decode_split="rank",  # type: ignore[arg-type]
    )
    vae = dataclasses.replace(config.vae, vae_selftest=True)
    engine = Engine(dataclasses.replace(config, parallel=parallel, vae=vae))
    monkeypatch.undo()
    try:
        engine.start()
        (report,) = engine.report
        assert report.detail == "tile on 2 ranks, encode split by rank, margin 1, decode split by rank, margin 2"
        assert report.selftest == "4 checks, bit-equal"
        tape = Tape()
        result = run(engine, ask(engine), tape)
        told = [(one["operation"], one["strategy"], one["margin"], one["grid"]) for one in result.decisions]
        assert told == [("encode", "rank_split", 1, (1, 1, 2)), ("decode", "rank_split", 2, (1, 1, 2))]
        assert [(use.strategy, use.tiles) for use in result.vae_use] == 4 * [("rank_split", 0)]
        # Rank 0 tells of its frames' network calls, and then of its piece: 5 frames are 2 latent frames.
        decode = [e for e in tape.events if isinstance(e, Progress) and e.stage is Stage.DECODE]
        assert (1, 2) in [(event.done, event.total) for event in decode]
        again = run(engine, ask(engine))
        assert np.array_equal(result.frames, again.frames)
    finally:
        engine.close()
