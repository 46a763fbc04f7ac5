# SPDX-License-Identifier: Apache-2.0
"""What a job tells while it runs, in which order jobs run, and what they leave behind when they fail."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest

from tests.engine.engines import RESULT_SECONDS, Engines, Tape, ask, during, run, submit
from tests.engine.processes import no_more_memory
from tests.engine.reference import Reference
from vllm_omni_vae.engine.api import Progress, Started
from vllm_omni_vae.engine.engine import Engine
from vllm_omni_vae.errors import EngineError
from vllm_omni_vae.pipelines.request import Stage

pytestmark = pytest.mark.distributed

STAGES = [Stage.ENCODE, Stage.DENOISE, Stage.DECODE]


@pytest.fixture
def engine(engines: Engines) -> Engine:
    return engines["i2v"]


def test_every_stage_reports_its_units_in_order(engine: Engine) -> None:
    tape = Tape()
    run(engine, ask(engine, steps=3), tape)
    assert tape.events[0] == Started()
    progress = [event for event in tape.events[1:] if isinstance(event, Progress)]
    assert len(progress) == len(tape.events) - 1
    assert tape.stages == STAGES
    assert [e.stage for e in progress] == sorted((e.stage for e in progress), key=STAGES.index)
    assert all(0 <= event.done <= event.total for event in progress)
    assert [(e.done, e.total) for e in progress if e.stage is Stage.DENOISE] == [(1, 3), (2, 3), (3, 3)]
    for stage in (Stage.ENCODE, Stage.DECODE):
        done = [event.done for event in progress if event.stage is stage]
        # 12 tiles on two ranks: the output rank tells of each of its own.
        assert sorted(set(done)) == list(range(7))
        assert all(after >= before for before, after in pairwise(done))


@pytest.mark.parametrize("side", [80, 32], ids=["tiled", "direct"])
def test_the_share_that_is_done_never_falls(side: int, engine: Engine) -> None:
    tape = Tape()
    run(engine, ask(engine, width=side, height=side), tape)
    for stage in STAGES:
        shares = [e.done / e.total for e in tape.events if isinstance(e, Progress) and e.stage is stage]
        assert shares == sorted(shares)
        assert len(set(shares)) > 1


def test_a_result_says_what_it_took(engine: Engine) -> None:
    result = run(engine, ask(engine, fps=24))
    assert result.fps == 24
    assert set(result.stage_durations) == set(STAGES)
    assert all(seconds > 0 for seconds in result.stage_durations.values())
    assert len(result.peak_memory_mb) == len(engine.worker_pids) == 2
    assert all(megabytes > 50 for megabytes in result.peak_memory_mb)
    assert result.frames.dtype == np.uint8


def test_the_same_seed_makes_the_same_clip_and_another_seed_another(engine: Engine) -> None:
    first, again, other = (run(engine, ask(engine, seed=seed)) for seed in (3, 3, 4))
    assert (first.seed, again.seed, other.seed) == (3, 3, 4)
    assert first.frames.tobytes() == again.frames.tobytes() != other.frames.tobytes()


def test_without_a_seed_every_clip_has_its_own_and_names_it(engine: Engine) -> None:
    first, second = (run(engine, ask(engine, width=32, height=32, seed=None)) for _ in range(2))
    assert first.seed != second.seed
    assert first.frames.tobytes() != second.frames.tobytes()
    again = run(engine, ask(engine, width=32, height=32, seed=first.seed))
    assert again.frames.tobytes() == first.frames.tobytes()


def test_jobs_run_one_at_a_time_in_the_order_of_their_submission(engine: Engine) -> None:
    seen: list[tuple[int, bool]] = []
    handles = []
    for number in range(5):
        listener = Tape(lambda event: isinstance(event, Started), lambda number=number: seen.append((number, False)))
        handle = submit(engine, ask(engine, width=32, height=32, seed=number), listener)
        handle.future.add_done_callback(lambda _, number=number: seen.append((number, True)))
        handles.append(handle)
    results = [handle.future.result(RESULT_SECONDS) for handle in handles]
    assert seen == [(number, ended) for number in range(5) for ended in (False, True)]
    assert [result.seed for result in results] == list(range(5))


def test_jobs_from_several_threads_each_get_their_own_clip(engine: Engine) -> None:
    def clip(seed: int) -> bytes:
        return run(engine, ask(engine, width=32, height=32, seed=seed)).frames.tobytes()

    alone = [clip(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(clip, range(4))) == alone
    assert len(set(alone)) == 4


def test_a_listener_that_raises_disturbs_nobody(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    def broken(event: object) -> None:
        raise RuntimeError("the listener's own fault")

    with_listener = run(engine, ask(engine, width=32, height=32), broken)
    assert with_listener.frames.tobytes() == run(engine, ask(engine, width=32, height=32)).frames.tobytes()
    assert "the listener's own fault" in caplog.text


def test_a_request_on_which_every_rank_fails_leaves_the_ranks_as_they_are(engine: Engine, reference: Reference) -> None:
    pids = engine.worker_pids
    request = ask(engine)
    impossible = dataclasses.replace(request, num_inference_steps=0)  # `resolve` was not asked about it
    failing, good = submit(engine, impossible), submit(engine, request)
    error = failing.future.exception(RESULT_SECONDS)
    assert isinstance(error, EngineError)
    assert error.code == "generation_failed"
    assert "IndexError" in str(error)
    assert np.array_equal(good.future.result(RESULT_SECONDS).frames, reference.frames("wan2.2-i2v", request))
    assert engine.worker_pids == pids
    assert engine.health().healthy


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("stage", [Stage.ENCODE, Stage.DECODE])
def test_a_rank_without_memory_fails_the_job_on_all_of_them(stage: Stage, rank: int, engine: Engine) -> None:
    before = run(engine, ask(engine))
    pids = engine.worker_pids
    with no_more_memory(pids[rank]) as take_memory:
        tape = Tape(during(stage), take_memory)
        handle = submit(engine, ask(engine, width=160, height=160), tape)
        error = handle.future.exception(RESULT_SECONDS)
    assert isinstance(error, EngineError)
    assert f"rank {rank}" in str(error)
    assert tape.stages[-1] is stage
    assert run(engine, ask(engine)).frames.tobytes() == before.frames.tobytes()
    assert engine.health().healthy
    if error.code == "out_of_memory" and "did not end with it" not in str(error):  # and no crash inside some library
        assert engine.worker_pids == pids
