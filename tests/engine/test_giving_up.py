# SPDX-License-Identifier: Apache-2.0
"""Ranks that break again and again are not started for ever."""

import contextlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for

import pytest

from tests.engine.engines import RESULT_SECONDS, Engines, Tape, ask, during, submit
from tests.engine.processes import children
from vllm_omni_vae.errors import EngineError
from vllm_omni_vae.pipelines.request import Stage

pytestmark = pytest.mark.distributed


def test_three_restarts_in_a_row_end_the_engine(engines: Engines) -> None:
    engine = engines.take("t2v, sharded weights and a follower")
    first = engine.worker_pids
    others = children() - set(first)
    tape = Tape(during(Stage.DENOISE), lambda: os.kill(first[0], signal.SIGKILL))
    running, waiting = submit(engine, ask(engine, steps=40), tape), submit(engine, ask(engine))
    killed = {first[0]}
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(engine.wait)
        try:
            assert "rank 0 died by signal 9" in str(running.future.exception(RESULT_SECONDS))
            while not ended.done():
                for pid in set(engine.worker_pids[:1]) - killed:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)  # while it loads
                    killed.add(pid)
                wait_for([ended], 0.005)
            health = engine.health()
            with pytest.raises(EngineError, match=r"takes no jobs: .*rank 0 died by signal 9"):
                submit(engine, ask(engine))
        finally:
            engine.close()
        reason = ended.result()
    assert len(killed) == 4, "the first ranks, and three times others in their place"
    assert isinstance(reason, EngineError)
    assert "rank 0 died by signal 9" in str(reason)
    assert not health.healthy
    assert health.reason == str(reason)
    assert waiting.future.exception(0) is reason
    assert engine.health() == health, "closing it does not hide why it ended"
    assert children() == others
