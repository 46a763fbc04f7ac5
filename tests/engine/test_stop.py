# SPDX-License-Identifier: Apache-2.0
"""However an engine ends, every job ends with it and no process stays."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.engine.engines import RESULT_SECONDS, Engines, Tape, ask, during, submit
from tests.engine.processes import children, is_running, stopped, until
from vllm_omni_vae.engine.engine import Engine
from vllm_omni_vae.errors import Cancelled, EngineError
from vllm_omni_vae.pipelines.request import Stage

pytestmark = pytest.mark.distributed


def test_closing_ends_the_running_job_the_waiting_ones_and_every_process(engines: Engines) -> None:
    engine = engines.take("i2v")
    others = children() - set(engine.worker_pids)
    tape = Tape(during(Stage.DECODE))
    large = {"width": 160, "height": 160, "num_frames": 9}
    running = submit(engine, ask(engine, **large), tape)
    waiting = [submit(engine, ask(engine)) for _ in range(2)]
    cancelled = submit(engine, ask(engine))
    cancelled.cancel()
    assert tape.reached.wait(RESULT_SECONDS)
    engine.close()
    for handle in (running, *waiting):
        error = handle.future.exception(0)
        assert isinstance(error, EngineError)
        assert error.code == "engine_stopped"
    assert isinstance(cancelled.future.exception(0), Cancelled)
    assert tape.stages[-1] is Stage.DECODE
    assert children() == others
    assert engine.worker_pids == []

    engine.close()
    for handle in (running, *waiting, cancelled):
        handle.cancel()
    assert engine.wait() is None
    assert engine.health().healthy is False
    assert engine.health().reason == "stopped"
    with pytest.raises(EngineError, match="takes no jobs: stopped"):
        submit(engine, ask(engine))


def test_closing_before_the_start(engines: Engines) -> None:
    before = children()
    engine = Engine(engines.config("t2v on one rank"))
    waiting = submit(engine, ask(engine))
    engine.close()
    assert isinstance(waiting.future.exception(0), EngineError)
    with pytest.raises(EngineError, match="stopped"):
        engine.start()
    engine.close()
    assert children() == before


def test_ranks_die_with_the_process_that_started_them(checkpoints: Mapping[str, Path]) -> None:
    """Also a rank that is too busy to notice that its pipe was closed."""
    code = (
        "import sys\n"
        "from vllm_omni_vae.config import EngineConfig\n"
        "from vllm_omni_vae.engine.engine import Engine\n"
        "engine = Engine(EngineConfig(model=sys.argv[1]))\n"
        "engine.start()\n"
        "print(*engine.worker_pids, flush=True)\n"
        "engine.wait()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(checkpoints["wan2.2-t2v"])], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            pids = [int(pid) for pid in process.stdout.readline().split()]
            assert all(map(is_running, pids))
            with stopped(pids[0]):
                process.kill()
                process.wait(RESULT_SECONDS)
                until(lambda: not any(map(is_running, pids)))
        finally:
            process.kill()
