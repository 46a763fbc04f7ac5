# SPDX-License-Identifier: Apache-2.0
"""Before the engine is ready, when it cannot start, and when it is not well."""

import threading
from typing import Any

import pytest

from vllm_omni_vae.engine.api import Health
from vllm_omni_vae.errors import EngineError
from vllm_omni_vae.server import runner

from .conftest import MODEL, Serve
from .scripted_engine import ScriptedEngine
from .test_videos import create, error_of


def test_while_the_model_is_loaded(serve: Serve, engine: ScriptedEngine) -> None:
    engine.may_start.clear()
    server = serve(ready=False)
    for path in ("/health", "/ping"):
        answer = server.http.get(path)
        assert error_of(answer) == (503, None, "loading")
        assert answer.json()["error"]["message"] == "loading"
    for path in ("/v1/videos", "/v1/videos/sync", "/v1/images/generations", "/v1/images/edits"):
        answer = server.http.post(path, json={"prompt": "a cat"})
        assert error_of(answer)[0] == 503 and int(answer.headers["retry-after"]) > 0
    assert server.http.get("/v1/models").json()["data"][0]["id"] == MODEL
    assert server.http.get("/version").json()["version"]
    assert server.http.get("/v1/videos").json()["data"] == []
    engine.may_start.set()
    while server.http.get("/health").status_code != 200:
        pass
    create(server)


def test_an_engine_that_cannot_start_says_why(serve: Serve, engine: ScriptedEngine) -> None:
    engine.start_fault = EngineError("rank 0 could not load the model: no")
    server = serve(ready=False)
    while (answer := server.http.get("/health")).json()["error"]["code"] == "loading":
        pass
    assert error_of(answer) == (503, None, "unhealthy")
    assert "rank 0 could not load the model: no" in answer.json()["error"]["message"]
    assert error_of(server.http.post("/v1/videos", json={"prompt": "a cat"}))[0] == 503


def test_an_engine_with_a_replica_that_is_not_well_is_degraded(serve: Serve) -> None:
    server = serve()
    assert server.http.get("/health").json() == {"status": "healthy"}
    server.engine.state = Health(True, "replica 1: restarting: rank 0 died")
    answer = server.http.get("/health")
    assert answer.status_code == 200
    assert answer.json() == {"status": "degraded", "reason": "replica 1: restarting: rank 0 died"}
    create(server)


def test_an_engine_that_gives_up_takes_no_jobs(serve: Serve) -> None:
    server = serve()
    server.engine.give_up(EngineError("rank 1 died again"))
    while (answer := server.http.get("/health")).status_code == 200:
        pass
    assert error_of(answer) == (503, None, "unhealthy") and "rank 1 died again" in answer.text
    while (answer := server.http.post("/v1/videos", json={"prompt": "a cat"})).status_code == 200:
        pass
    assert error_of(answer)[0] == 503 and "rank 1 died again" in answer.text


def test_an_engine_that_is_not_well_still_queues(serve: Serve) -> None:
    server = serve()
    server.engine.state = Health(False, "restarting: rank 1 died")
    answer = server.http.get("/health")
    assert error_of(answer) == (503, None, "unhealthy")
    assert answer.json()["error"]["message"] == "restarting: rank 1 died"
    create(server)


def test_health_answers_while_a_clip_is_encoded(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    encoding, go_on = threading.Event(), threading.Event()
    export = runner.export_clip

    def held(*args: Any, **more: Any) -> None:
        encoding.set()
        assert go_on.wait(10)
        export(*args, **more)

    monkeypatch.setattr(runner, "export_clip", held)
    identity = create(server)
    assert encoding.wait(10)
    assert server.http.get("/health").status_code == 200
    job = server.http.get(f"/v1/videos/{identity}").json()
    assert job["status"] == "in_progress" and 90 <= job["progress"] < 100
    go_on.set()
    assert server.wait_for(identity, "completed")["progress"] == 100
