# SPDX-License-Identifier: Apache-2.0
"""Ranks that are Ray actors make what processes make, are replaced when they die or stall, and leave nothing behind."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest

from tests.engine.engines import RESULT_SECONDS, Engines, Tape, ask, during, run, submit
from tests.engine.processes import children, is_running, until
from tests.engine.reference import Reference
from vllm_omni_vae.engine.engine import Engine
from vllm_omni_vae.errors import ConfigurationError, EngineError
from vllm_omni_vae.pipelines.request import Stage
from vllm_omni_vae.worker import ray_cluster

ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(300)]

SETUP = "t2v on two ranks"
RAY_SECONDS = 120.0
"""Bound of a wait for ranks that Ray starts again on a busy machine."""


@pytest.fixture(scope="module", autouse=True)
def home() -> Iterator[Path]:
    """Where Ray keeps its sessions and its token, which a process reads once; short, because sockets are in it."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    with mock.patch.dict(os.environ, {"RAY_TMPDIR": str(folder), "HOME": str(folder)}):  # and without what Ray adds
        os.environ.pop("RAY_ADDRESS", None)
        yield folder
    shutil.rmtree(folder, ignore_errors=True)


def listening(pids: set[int]) -> set[str]:
    """The addresses at which these processes and their descendants can be reached."""
    every = {child for pid in pids for child in psutil.Process(pid).children(recursive=True)}
    every |= {psutil.Process(pid) for pid in pids}
    sockets = [socket for process in every for socket in process.net_connections("tcp")]
    return {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}


def test_actors_make_the_pixels_of_processes_and_are_replaced(engines: Engines, reference: Reference) -> None:
    processes = engines[SETUP]
    request = ask(processes)
    expected = run(processes, request)
    others = children()
    engine = Engine(engines.config(SETUP, distributed_executor_backend="ray", worker_timeout=10.0))
    try:
        engine.start()
        pids = engine.worker_pids
        assert len(set(pids)) == 2 and not set(pids) & children(), "Ray's, not ours"
        result = run(engine, request)
        assert result.frames.tobytes() == expected.frames.tobytes()
        assert np.array_equal(result.frames, reference.frames("wan2.2-t2v", request))
        assert [(use.rank, use.tiles) for use in result.vae_use] == [(0, 6), (1, 6)]
        assert listening(children() - others) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}

        tape = Tape(during(Stage.DENOISE), lambda: os.kill(pids[1], signal.SIGKILL))
        failing, following = submit(engine, ask(engine, steps=40), tape), submit(engine, request)
        error = failing.future.exception(RESULT_SECONDS)
        assert isinstance(error, EngineError) and error.code == "worker_died"
        assert str(error) == "the worker of rank 1 died: its worker process has died"
        assert following.future.result(RAY_SECONDS).frames.tobytes() == expected.frames.tobytes()
        assert not set(engine.worker_pids) & set(pids) and engine.health().healthy

        pids = engine.worker_pids
        tape = Tape(during(Stage.DENOISE), lambda: os.kill(pids[1], signal.SIGSTOP))
        error = submit(engine, ask(engine, steps=40), tape).future.exception(RESULT_SECONDS)
        assert isinstance(error, EngineError) and error.code == "worker_stalled"
        assert engine.restarts == {"worker_died": 1, "worker_stalled": 1}
        until(lambda: not any(map(is_running, pids)))
        started = children() - others
    finally:
        engine.close()
    assert started and children() == others
    assert not ray.is_initialized()
    assert not any(map(is_running, [*pids, *started]))


def test_a_cluster_that_is_there_is_used_and_stays(engines: Engines, reference: Reference) -> None:
    """The ranks meet over TCP, as they do on several machines."""
    config = engines.config(SETUP, distributed_executor_backend="ray")
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR")
    try:
        engine = Engine(config)
        try:
            engine.start()
            request = ask(engine)
            assert np.array_equal(run(engine, request).frames, reference.frames("wan2.2-t2v", request))
            pids, (room,) = engine.worker_pids, _rooms()
            assert (room["strategy"], list(room["bundles"].values())) == ("PACK", [{"CPU": 1.0}] * 2)
        finally:
            engine.close()
        assert ray.is_initialized()
        until(lambda: not any(map(is_running, pids)))
        assert _rooms() == []
    finally:
        ray.shutdown()


def _rooms() -> list[dict[str, Any]]:
    table = ray.util.placement_group_table()
    return [room for room in table.values() if room["state"] != "REMOVED"]


@pytest.mark.parametrize(
    ("address", "reason"),
    [("ray://127.0.0.1:1", "run this on a node of the cluster"), ("127.0.0.1:1", "where no Ray cluster answers")],
)
def test_an_address_without_a_cluster_is_refused(
    address: str, reason: str, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    engine = Engine(engines.config(SETUP, distributed_executor_backend="ray"))
    try:
        with pytest.raises(ConfigurationError, match=f"RAY_ADDRESS is {address}.*{reason}"):
            engine.start()
    finally:
        engine.close()


def test_ray_that_is_not_installed_is_told_before_anything_starts(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match='not installed; install this package with its extra "ray"'):
        Engine(engines.config(SETUP, distributed_executor_backend="ray"))
