# SPDX-License-Identifier: Apache-2.0
"""What one caller does to its own job is nobody else's: the engine and its ranks go on."""

import dataclasses
import threading
from concurrent.futures import CancelledError

import pytest

from tests.engine.engines import RESULT_SECONDS, Engines, Tape, ask, during, run, submit
from vllm_omni_vae.engine.engine import Engine
from vllm_omni_vae.errors import Cancelled
from vllm_omni_vae.pipelines.request import Stage

pytestmark = pytest.mark.distributed


@pytest.fixture
def engine(engines: Engines) -> Engine:
    return engines["i2v"]


def check_goes_on(engine: Engine, pids: list[int]) -> None:
    """It still makes clips, on the ranks that it had."""
    assert engine.health().healthy
    assert run(engine, ask(engine)).frames.shape == (5, 64, 80, 3)
    assert engine.worker_pids == pids


def test_a_waiting_future_that_is_cancelled_itself(engine: Engine) -> None:
    """As asyncio does when a coroutine that awaits `asyncio.wrap_future` of it is cancelled."""
    pids = engine.worker_pids
    tape = Tape(during(Stage.DENOISE))
    running, waiting = submit(engine, ask(engine, steps=20), tape), submit(engine, ask(engine))
    assert tape.reached.wait(RESULT_SECONDS)
    waiting.future.cancel()
    with pytest.raises((Cancelled, CancelledError)):
        waiting.future.result(RESULT_SECONDS)
    assert running.future.result(RESULT_SECONDS).frames.shape == (5, 64, 80, 3)
    check_goes_on(engine, pids)


def test_a_running_future_that_is_cancelled_itself(engine: Engine) -> None:
    pids = engine.worker_pids
    tape = Tape(during(Stage.DENOISE))
    running = submit(engine, ask(engine, steps=20), tape)
    assert tape.reached.wait(RESULT_SECONDS)
    running.future.cancel()
    running.cancel()
    with pytest.raises((Cancelled, CancelledError)):
        running.future.result(RESULT_SECONDS)
    check_goes_on(engine, pids)


def test_a_request_that_cannot_be_sent_fails_alone(engine: Engine) -> None:
    pids = engine.worker_pids
    unsendable = dataclasses.replace(ask(engine), extra_params={"max_sequence_length": threading.Lock()})
    error = submit(engine, unsendable).future.exception(RESULT_SECONDS)
    assert isinstance(error, Exception)
    assert "pickle" in str(error)
    check_goes_on(engine, pids)
