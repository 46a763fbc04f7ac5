# SPDX-License-Identifier: Apache-2.0
"""A rank that dies, or fails where the others cannot know, fails one job; the ranks restart and the next is right."""

import itertools
import os
import signal
import time

import numpy as np
import pytest

from tests.engine.engines import RESULT_SECONDS, Engines, Tape, ask, during, run, submit
from tests.engine.processes import is_running, no_more_memory, open_files, until
from tests.engine.reference import Reference
from vllm_omni_vae.errors import EngineError
from vllm_omni_vae.pipelines.request import Stage

pytestmark = pytest.mark.distributed

FAIL_SECONDS = 10.0
"""Requirement: a job whose rank died fails within this time."""


@pytest.mark.parametrize(
    ("stage", "rank"), list(itertools.product([Stage.ENCODE, Stage.DENOISE, Stage.DECODE], [1, 0]))
)
def test_a_killed_rank_fails_the_job_and_the_next_one_is_right(
    stage: Stage, rank: int, engines: Engines, reference: Reference
) -> None:
    engine = engines["i2v"]
    run(engine, ask(engine, width=32, height=32))
    pids, files = engine.worker_pids, open_files()
    killed_at: list[float] = []

    def kill() -> None:
        os.kill(pids[rank], signal.SIGKILL)
        killed_at.append(time.monotonic())

    tape = Tape(during(stage), kill)
    failing = submit(engine, ask(engine, width=96, height=96, steps=40), tape)
    request = ask(engine)
    following = submit(engine, request)
    error = failing.future.exception(RESULT_SECONDS)
    assert time.monotonic() - killed_at[0] < FAIL_SECONDS
    assert isinstance(error, EngineError)
    assert error.code == "worker_died"
    assert f"rank {rank} died by signal 9" in str(error)
    assert tape.stages[-1] is stage

    result = following.future.result(RESULT_SECONDS)
    assert np.array_equal(result.frames, reference.frames("wan2.2-i2v", request))
    assert engine.health().healthy
    assert not set(engine.worker_pids) & set(pids)
    assert not any(is_running(pid) for pid in pids)
    assert open_files() == files


def test_a_rank_that_dies_while_nothing_runs_is_replaced(engines: Engines) -> None:
    engine = engines["i2v"]
    pids, before = engine.worker_pids, engine.restarts.get("worker_died", 0)
    os.kill(pids[1], signal.SIGKILL)
    until(lambda: not engine.health().healthy)
    assert "rank 1 died by signal 9" in engine.health().reason
    assert run(engine, ask(engine)).frames.shape == (5, 64, 80, 3)
    assert engine.health().healthy
    assert engine.restarts["worker_died"] == before + 1
    assert not set(engine.worker_pids) & set(pids)


def test_a_denoiser_rank_that_fails_alone_is_named_and_the_ranks_restart(engines: Engines) -> None:
    """Its peer waits inside the denoiser for what will never come; no collective step can tell it."""
    engine = engines["t2v, ulysses"]
    request = ask(engine)
    before = run(engine, request)
    pids = engine.worker_pids
    with no_more_memory(pids[1]) as take_memory:
        tape = Tape(during(Stage.DENOISE), take_memory)
        large = ask(engine, width=640, height=640, num_frames=1, steps=200)
        error = submit(engine, large, tape).future.exception(RESULT_SECONDS)
    assert isinstance(error, EngineError)
    assert "rank 1" in str(error)
    assert tape.stages[-1] is Stage.DENOISE
    assert run(engine, request).frames.tobytes() == before.frames.tobytes()
    assert not set(engine.worker_pids) & set(pids)
