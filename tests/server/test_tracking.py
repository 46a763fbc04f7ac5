# SPDX-License-Identifier: Apache-2.0
"""Every answer names its request, and what went wrong can be found under that name."""

import asyncio
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from vllm_omni_vae.config import ServerConfig
from vllm_omni_vae.errors import EngineError
from vllm_omni_vae.server.app import create_app

from .conftest import Running, Serve
from .scripted_engine import ScriptedEngine
from .test_videos import create

NEW = re.compile(r"req_[0-9a-f]{32}")


@pytest.fixture
def server(serve: Serve) -> Running:
    return serve()


@pytest.fixture
def application(tmp_path: Path) -> FastAPI:
    return create_app(ScriptedEngine(), ServerConfig(media_storage_path=str(tmp_path)), model_name="m")


def test_every_answer_has_an_id_of_its_own(serve: Serve) -> None:
    server = serve(api_key=("key",), max_upload_bytes=1000, allowed_origins=("https://a.example",))
    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "GET"}
    answers = [
        *(server.http.get(path) for path in ("/health", "/metrics", "/v1/models", "/nowhere", "/v1/videos/v")),
        server.http.get("/v1/models", headers={"Authorization": "no"}),
        server.http.post("/v1/videos", content=b"x" * 2000),
        server.http.post("/v1/videos", json={"prompt": ""}),
        server.http.put("/v1/videos"),
        server.http.options("/v1/videos", headers=preflight),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 404, 404, 401, 413, 422, 405, 200]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert all(NEW.fullmatch(identity) for identity in ids)
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("given", ["a", "trace-1.2:3_4", "A" * 128])
def test_a_sane_id_comes_back(application: FastAPI, given: str) -> None:
    answer = TestClient(application).get("/version", headers={"X-Request-Id": given})
    assert answer.headers.get_list("x-request-id") == [given]


@pytest.mark.parametrize("given", ["", " ", "a b", "A" * 129, "a,b", "a;b", "a/b", "<b>", "é", "a\tb", '"a"'])
def test_any_other_id_is_replaced(application: FastAPI, given: str) -> None:
    answer = TestClient(application).get("/version", headers={"X-Request-Id": given.encode()})
    assert [bool(NEW.fullmatch(one)) for one in answer.headers.get_list("x-request-id")] == [True]


@pytest.mark.parametrize("given", [b"a\r\nSet-Cookie: b=c", b"a\nb", b"a\x00", b"a\r", b"\xff"])
def test_what_could_end_a_header_never_gets_into_one(application: FastAPI, given: bytes) -> None:
    """An HTTP server refuses these before they arrive here; this one would not pass them on either."""
    sent: list[Any] = []
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": "/version",
        "raw_path": b"/version",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"x-request-id", given)],
        "server": ("a.example", 80),
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(application(scope, receive, send))
    values = [value for name, value in sent[0]["headers"] if name.lower() == b"x-request-id"]
    assert len(values) == 1
    assert NEW.fullmatch(values[0].decode())


def test_an_answer_that_is_a_job_s_has_the_job_s_id_unless_the_client_has_one(server: Running) -> None:
    request = {"prompt": "a cat"}
    assert server.http.post("/v1/videos/sync", json=request).headers["x-request-id"].startswith("video_")
    mine = server.http.post("/v1/videos/sync", json=request, headers={"X-Request-Id": "mine"})
    assert mine.headers.get_list("x-request-id") == ["mine"]


def test_a_failure_of_the_server_is_logged_with_the_id(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    server.engine.fault = EngineError("rank 1 died", code="worker_died")
    answer = server.http.post("/v1/videos/sync", json={"prompt": "a cat"}, headers={"X-Request-Id": "mine"})
    assert answer.status_code == 500
    lines = [record.getMessage() for record in caplog.records]
    assert "request mine: POST /v1/videos/sync is answered 500" in lines
    (job,) = [line for line in lines if line.startswith("job video_")]
    assert job.endswith("of request mine failed: worker_died: rank 1 died")


def test_a_job_s_failure_is_found_under_the_request_that_asked_for_it(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    server.engine.may_finish.clear()
    server.engine.fault = EngineError("no memory", code="rank_failed")
    answer = server.http.post("/v1/videos", json={"prompt": "a cat"})
    server.http.get("/v1/models", headers={"X-Request-Id": "another"})
    server.engine.may_finish.set()
    identity, request = answer.json()["id"], answer.headers["x-request-id"]
    server.wait_for(identity, "failed")
    server.wait_for(create(server), "completed")
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [f"job {identity} of request {request} failed: rank_failed: no memory"]


def test_a_bug_is_answered_and_logged_with_the_id(application: FastAPI, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise RuntimeError("a bug")

    application.add_api_route("/broken/{part}", broken)
    client = TestClient(application, raise_server_exceptions=False)
    answer = client.get("/broken/a%0ab", headers={"X-Request-Id": "mine"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert answer.headers.get_list("x-request-id") == ["mine"]
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [
        "request mine: GET /broken/{part} is answered 500"
    ]
    assert 'route="/broken/{part}",status="500"' in client.get("/metrics").text


def test_probes_do_not_fill_the_log(serve: Serve, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture) -> None:
    engine.may_start.clear()
    server = serve(ready=False)
    assert [server.http.get(path).status_code for path in ("/health", "/ping")] == [503, 503]
    assert server.http.post("/v1/videos", json={"prompt": "a cat"}).status_code == 503
    logged = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(logged) == 1
    assert logged[0].endswith("POST /v1/videos is answered 503")
