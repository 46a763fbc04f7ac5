# SPDX-License-Identifier: Apache-2.0
"""A rank that stands still fails the job after ``worker_timeout``, wherever it stands; nothing waits for ever."""

import contextlib
import os
import signal
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.engines import RESULT_SECONDS, Engines, Tape, ask, during, picture, run, submit
from tests.engine.processes import stop, stopped, until
from tests.engine.reference import Reference
from vllm_omni_vae.engine.engine import Engine
from vllm_omni_vae.errors import EngineError
from vllm_omni_vae.pipelines.request import Stage

pytestmark = pytest.mark.distributed

STALL_SECONDS = 12.0
"""Bound for a job to fail whose rank stands still: four times the ``worker_timeout`` of the engine here."""

SETUP = "i2v without patience"

HALF_AN_ANSWER = """
import os
import signal
from multiprocessing.connection import Connection

send = Connection._send

def send_half(self, data, *args):
    if len(data) > 150_000:
        send(self, bytes(data[:50_000]))
        os.kill(os.getpid(), signal.SIGSTOP)
    send(self, data, *args)

Connection._send = send_half
"""

FOUR_SECONDS_PER_STEP = """
from datetime import timedelta
from torch.distributed import distributed_c10d

distributed_c10d.default_pg_timeout = timedelta(seconds=4)
"""


@pytest.fixture
def engine(engines: Engines) -> Engine:
    return engines[SETUP]


@pytest.fixture
def held() -> Iterator[contextlib.ExitStack]:
    """Holds stopped processes, and lets them go on at the end."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def in_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make ranks that start from now on run some code before anything else."""

    def prepare(code: str) -> None:
        lines = "import sys\nif 'vllm_omni_vae.worker' in sys.orig_argv:\n" + textwrap.indent(code, "    ")
        (tmp_path / "sitecustomize.py").write_text(lines)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    return prepare


def check_stall(failing: Future[Any], engine: Engine, pids: list[int], family: str, reference: Reference) -> None:
    """The job fails as stalled, and the next one is right, on other ranks."""
    error = failing.exception(STALL_SECONDS)
    assert isinstance(error, EngineError)
    assert error.code == "worker_stalled"
    assert "no sign of progress for 3 s" in str(error)
    request = ask(engine)
    assert np.array_equal(run(engine, request).frames, reference.frames(family, request))
    assert not set(engine.worker_pids) & set(pids)


def test_a_rank_that_stands_still_in_a_job(engine: Engine, reference: Reference, held: contextlib.ExitStack) -> None:
    pids = engine.worker_pids
    tape = Tape(during(Stage.DECODE), lambda: held.enter_context(stopped(pids[1])))
    handle = submit(engine, ask(engine, width=96, height=96), tape)
    check_stall(handle.future, engine, pids, "wan2.2-i2v", reference)
    assert tape.stages[-1] is Stage.DECODE


def test_a_rank_that_stands_still_before_a_request_larger_than_its_pipe(
    engine: Engine, reference: Reference, held: contextlib.ExitStack
) -> None:
    pids = engine.worker_pids
    held.enter_context(stopped(pids[1]))
    handle = submit(engine, ask(engine, image=picture(640, 640)))
    check_stall(handle.future, engine, pids, "wan2.2-i2v", reference)


def test_a_rank_that_stands_still_in_the_middle_of_its_answer(
    engines: Engines, reference: Reference, in_every_rank: Callable[[str], None]
) -> None:
    """The engine has begun to read what will never end."""
    in_every_rank(HALF_AN_ANSWER)
    engine = Engine(engines.config("t2v on one rank", worker_timeout=3.0))
    ended, pids = threading.Event(), []
    try:
        engine.start()
        pids = engine.worker_pids
        handle = submit(engine, ask(engine, width=128, height=96))
        check_stall(handle.future, engine, pids, "wan2.2-t2v", reference)
    finally:
        threading.Thread(target=lambda: (engine.close(), ended.set()), daemon=True).start()
        ended.wait(STALL_SECONDS)
        for pid in [] if ended.is_set() else pids:
            os.kill(pid, signal.SIGKILL)


def test_loading_may_take_longer_than_a_job_s_silence(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank with the whole pipeline loads for minutes after one that holds only the autoencoder is done."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where the ranks' rendezvous is
    engine = Engine(engines.config(SETUP, worker_timeout=1.0))
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(engine.start)
        try:
            until(lambda: len(engine.worker_pids) == 2)
            with stopped(engine.worker_pids[1]):
                until(lambda: [*tmp_path.glob("*/rendezvous")], RESULT_SECONDS)
                wait_for([started], 2.5)  # the other rank waits at the rendezvous
            started.result(RESULT_SECONDS)
            assert engine.health().healthy
        finally:
            engine.close()


@pytest.mark.slow
def test_a_follower_waits_as_long_as_the_denoiser_takes(
    engines: Engines, reference: Reference, in_every_rank: Callable[[str], None]
) -> None:
    """A collective step of torch gives up after half an hour by default; here after four seconds."""
    in_every_rank(FOUR_SECONDS_PER_STEP)
    engine = Engine(engines.config("i2v"))
    try:
        engine.start()
        (leader, _) = engine.worker_pids
        tape = Tape(during(Stage.DENOISE), lambda: stop(leader))
        request = ask(engine)
        handle = submit(engine, request, tape)
        assert tape.reached.wait(RESULT_SECONDS)
        with stopped(leader):
            wait_for([handle.future], 5.0)
        assert np.array_equal(handle.future.result(RESULT_SECONDS).frames, reference.frames("wan2.2-i2v", request))
    finally:
        engine.close()
