# SPDX-License-Identifier: Apache-2.0
"""A job can be cancelled wherever it is; the next one is as if it had never been."""

import contextlib
import threading

import pytest

from tests.engine.engines import RESULT_SECONDS, Engines, Tape, ask, cancel_when, during, run, submit
from vllm_omni_vae.engine.engine import Engine
from vllm_omni_vae.errors import Cancelled
from vllm_omni_vae.pipelines.request import Stage

pytestmark = pytest.mark.distributed

LARGE = {"width": 96, "height": 96}


@pytest.fixture
def engine(engines: Engines) -> Engine:
    return engines["i2v"]


@pytest.mark.parametrize("name", ["i2v", "i2v, ulysses and a follower"])
@pytest.mark.parametrize("stage", [Stage.ENCODE, Stage.DENOISE, Stage.DECODE])
def test_a_running_job_is_cancelled_in_the_stage_it_is_in(stage: Stage, name: str, engines: Engines) -> None:
    engine = engines[name]
    before = run(engine, ask(engine))
    pids = engine.worker_pids
    handle, tape = cancel_when(engine, ask(engine, steps=40, **LARGE), during(stage))
    with pytest.raises(Cancelled):
        handle.future.result(RESULT_SECONDS)
    assert tape.stages[-1] is stage, "it went on to a later stage"
    assert run(engine, ask(engine)).frames.tobytes() == before.frames.tobytes()
    assert engine.worker_pids == pids
    assert engine.health().healthy


def test_a_job_that_waits_is_cancelled_at_once_and_never_starts(engine: Engine) -> None:
    tape = Tape()
    running_tape = Tape(during(Stage.ENCODE))
    running = submit(engine, ask(engine, **LARGE), running_tape)
    waiting, last = submit(engine, ask(engine), tape), submit(engine, ask(engine))
    assert running_tape.reached.wait(RESULT_SECONDS)
    waiting.cancel()
    with pytest.raises(Cancelled, match="before it ran"):
        waiting.future.result(0)
    assert running.future.result(RESULT_SECONDS).frames.shape == (5, 96, 96, 3)
    assert last.future.result(RESULT_SECONDS).frames.shape == (5, 64, 80, 3)
    assert tape.events == []


def test_a_finished_job_cannot_be_cancelled(engine: Engine) -> None:
    handle = submit(engine, ask(engine))
    result = handle.future.result(RESULT_SECONDS)
    handle.cancel()
    handle.cancel()
    assert handle.future.result(0) is result
    assert run(engine, ask(engine)).frames.tobytes() == result.frames.tobytes()


def test_a_job_cancelled_twice_is_cancelled_once(engine: Engine) -> None:
    handle, _ = cancel_when(engine, ask(engine, **LARGE), during(Stage.ENCODE))
    with pytest.raises(Cancelled):
        handle.future.result(RESULT_SECONDS)
    handle.cancel()
    assert run(engine, ask(engine)).frames.shape == (5, 64, 80, 3)


def test_a_job_can_be_cancelled_at_any_of_its_events(engine: Engine) -> None:
    """From the first to the last: whoever cancels before the end gets no clip, and the ranks stay together."""
    request = ask(engine, width=48, height=48)
    tape = Tape()
    expected = run(engine, request, tape)
    pids = engine.worker_pids
    for number in range(len(tape.events)):
        countdown = iter(range(len(tape.events)))
        handle, _ = cancel_when(
            engine, request, lambda _, countdown=countdown, number=number: next(countdown, -1) == number
        )
        with pytest.raises(Cancelled):
            handle.future.result(RESULT_SECONDS)
    assert run(engine, request).frames.tobytes() == expected.frames.tobytes()
    assert engine.worker_pids == pids


def test_cancelling_races_with_starting(engine: Engine) -> None:
    """Between the queue and the ranks no job is lost, and every one ends in one of the two ways."""
    request = ask(engine, width=32, height=32)
    expected = run(engine, request).frames.tobytes()
    pids = engine.worker_pids
    for _ in range(10):
        handle = submit(engine, request)
        thread = threading.Thread(target=handle.cancel)
        thread.start()
        with contextlib.suppress(Cancelled):
            assert handle.future.result(RESULT_SECONDS).frames.tobytes() == expected
        thread.join()
    assert run(engine, request).frames.tobytes() == expected
    assert engine.worker_pids == pids
