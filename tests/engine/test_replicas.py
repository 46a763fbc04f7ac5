# SPDX-License-Identifier: Apache-2.0
"""Replicas run jobs at the same time from one queue, and what happens to one of them is no matter of the others."""

import contextlib
import os
import signal
import threading

import numpy as np
import pytest

from tests.engine.engines import RESULT_SECONDS, Engines, Tape, ask, during, run, submit
from tests.engine.processes import children, is_running, until
from tests.engine.reference import Reference
from vllm_omni_vae.engine.api import JobEvent, Progress, Started
from vllm_omni_vae.engine.engine import Engine
from vllm_omni_vae.errors import EngineError
from vllm_omni_vae.pipelines.request import Stage

pytestmark = pytest.mark.distributed

SETUP = "t2v, two replicas"


class Held(Tape):
    """A listener that holds its job, on the thread of its replica, at the first step until `go` is set."""

    def __init__(self) -> None:
        super().__init__(during(Stage.DENOISE), self._hold)
        self.arrived, self.go = threading.Event(), threading.Event()
        self.replica = -1

    def _hold(self) -> None:
        self.replica = int(threading.current_thread().name.removeprefix("replica-"))
        self.arrived.set()
        assert self.go.wait(RESULT_SECONDS)


def test_as_many_jobs_run_as_there_are_replicas_and_the_queue_keeps_its_order(
    engines: Engines, reference: Reference
) -> None:
    engine = engines[SETUP]
    pids, requests = engine.worker_pids, [ask(engine, seed=seed) for seed in range(4)]
    begun: list[int] = []

    def note(number: int) -> Tape:
        return Tape(lambda event: isinstance(event, Started), lambda: begun.append(number))

    first, second = Held(), Held()
    try:
        held = [submit(engine, request, tape) for request, tape in zip(requests, (first, second), strict=False)]
        assert first.arrived.wait(RESULT_SECONDS) and second.arrived.wait(RESULT_SECONDS)
        assert {first.replica, second.replica} == {0, 1}
        waiting = [submit(engine, requests[number], note(number)) for number in (2, 3)]
        assert begun == []
        first.go.set()
        results = [handle.future.result(RESULT_SECONDS) for handle in waiting]
        assert begun == [2, 3]
        assert not held[1].future.done()
    finally:
        first.go.set()
        second.go.set()
    results = [handle.future.result(RESULT_SECONDS) for handle in held] + results
    for request, result in zip(requests, results, strict=True):
        assert np.array_equal(result.frames, reference.frames("wan2.2-t2v", request))
        assert len(result.peak_memory_mb) == 1
    assert len(set(pids)) == 2 and engine.worker_pids == pids
    assert engine.health().healthy and engine.health().reason == ""


def test_a_killed_rank_fails_the_job_of_its_replica_alone(engines: Engines, reference: Reference) -> None:
    engine = engines[SETUP]
    pids, requests = engine.worker_pids, [ask(engine, seed=seed) for seed in (5, 6)]
    failing, other = Held(), Held()
    try:
        handles = [submit(engine, request, tape) for request, tape in zip(requests, (failing, other), strict=True)]
        assert failing.arrived.wait(RESULT_SECONDS) and other.arrived.wait(RESULT_SECONDS)
        os.kill(pids[failing.replica], signal.SIGKILL)
        failing.go.set()
        error = handles[0].future.exception(RESULT_SECONDS)
        assert isinstance(error, EngineError) and error.code == "worker_died"
        health = engine.health()
        assert health.healthy and f"replica {failing.replica}: restarting: " in health.reason
        assert [state.healthy for state in engine.replicas].index(False) == failing.replica
        other.go.set()
        result = handles[1].future.result(RESULT_SECONDS)
    finally:
        failing.go.set()
        other.go.set()
    assert np.array_equal(result.frames, reference.frames("wan2.2-t2v", requests[1]))
    until(lambda: all(state.healthy for state in engine.replicas), RESULT_SECONDS)
    assert engine.worker_pids[other.replica] == pids[other.replica]
    assert not is_running(pids[failing.replica])
    assert engine.restarts == {"worker_died": 1}
    assert engine.health().reason == ""


def test_one_that_gives_up_leaves_the_jobs_to_the_other_and_closing_leaves_nothing(
    engines: Engines, reference: Reference
) -> None:
    engine = engines.take(SETUP)
    others = children() - set(engine.worker_pids)
    first, stays = engine.worker_pids
    killed = set()
    finished_on_each(engine)
    try:
        while not engine.replicas[0].reason.startswith("the worker of rank 0 died"):
            for pid in set(engine.worker_pids) - {stays} - killed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        assert first in killed and len(killed) == 4, "the first rank, and three times another in its place"
        assert engine.health().healthy and engine.health().reason.startswith("replica 0: the worker of rank 0 died")
        request = ask(engine)
        assert np.array_equal(run(engine, request).frames, reference.frames("wan2.2-t2v", request))
        assert engine.worker_pids == [stays]
        tape = Tape(_is_progress)
        running, waiting = submit(engine, ask(engine, steps=40), tape), submit(engine, request)
        assert tape.reached.wait(RESULT_SECONDS)
    finally:
        engine.close()
    for handle in (running, waiting):
        error = handle.future.exception(0)
        assert isinstance(error, EngineError) and error.code == "engine_stopped"
    assert engine.wait() is None
    assert children() == others


def finished_on_each(engine: Engine) -> None:
    """Have every replica finish a job, from which restarts are counted."""
    tapes = [Held(), Held()]
    handles = [submit(engine, ask(engine, width=32, height=32), tape) for tape in tapes]
    assert all(tape.arrived.wait(RESULT_SECONDS) for tape in tapes)
    for tape, handle in zip(tapes, handles, strict=True):
        tape.go.set()
        handle.future.result(RESULT_SECONDS)


def _is_progress(event: JobEvent) -> bool:
    return isinstance(event, Progress)
