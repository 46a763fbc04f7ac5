# SPDX-License-Identifier: Apache-2.0
"""Who may call, and from where."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from vllm_omni_vae.config import ServerConfig
from vllm_omni_vae.server.app import create_app
from vllm_omni_vae.server.auth import OPEN_PATHS

from .scripted_engine import ScriptedEngine

CLOSED = [
    "/v1/models",
    "/v1/videos",
    "/v1/videos/sync",
    "/v1/images/edits",
    "/docs",
    "/openapi.json",
    "/nowhere",
    "/health/",
    "http://testserver//health",
]


Connect = Callable[..., TestClient]


@pytest.fixture
def connect(tmp_path: Path) -> Connect:
    def connect(**settings: Any) -> TestClient:
        config = ServerConfig(media_storage_path=str(tmp_path), **settings)
        return TestClient(create_app(ScriptedEngine(), config, model_name="m"))

    return connect


@pytest.mark.parametrize("path", CLOSED)
@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic one", "one", "Bearer one two", "Bearer öne"]
)
def test_without_a_key_nothing_is_told(connect: Connect, path: str, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header.encode()}
    answer = connect(api_key=("one", "two")).get(path, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_api_key")


@pytest.mark.parametrize("header", ["Bearer one", "bearer two", "BEARER  two ", "Bearer três"])
def test_any_of_the_keys_opens(connect: Connect, header: str) -> None:
    answer = connect(api_key=("one", "two", "três")).get("/v1/models", headers={"Authorization": header.encode()})
    assert answer.status_code == 200


def test_probes_need_no_key(connect: Connect) -> None:
    for root in ("", "/prefix"):
        server = connect(api_key="one", root_path=root)
        for path in OPEN_PATHS:
            assert server.get(path).status_code in (200, 503)
            assert server.get(root + path).status_code in (200, 503)


def test_no_key_configured_means_open(connect: Connect) -> None:
    assert connect().get("/v1/models").status_code == 200


def test_a_browser_may_ask_before_it_sends_a_key(connect: Connect) -> None:
    server = connect(api_key="one", allowed_origins=("https://a.example",))
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    answer = server.options("/v1/videos", headers=asked)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    refused = server.get("/v1/models", headers={"Origin": "https://a.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://a.example"


def test_other_origins_are_not_named(connect: Connect) -> None:
    server = connect(allowed_origins=("https://a.example",))
    answer = server.get("/v1/models", headers={"Origin": "https://b.example"})
    assert "access-control-allow-origin" not in answer.headers


OTHER = "https://b.example"
HERE = "http://testserver"


@pytest.mark.parametrize(
    ("headers", "known"),
    [
        ({}, True),
        ({"Origin": HERE}, True),
        ({"Origin": HERE.upper()}, True),
        ({"Origin": "https://proxy.example", "Sec-Fetch-Site": "same-origin"}, True),
        ({"Origin": "https://a.example", "Sec-Fetch-Site": "cross-site"}, True),
        ({"Origin": OTHER}, False),
        ({"Origin": OTHER, "Sec-Fetch-Site": "cross-site"}, False),
        ({"Origin": HERE, "Sec-Fetch-Site": "cross-site"}, False),
        ({"Origin": f"{HERE}:81", "Sec-Fetch-Site": "same-site"}, False),
        ({"Origin": f"{HERE}:81"}, False),
        ({"Origin": "null"}, False),
        ({"Origin": "http://[b"}, False),
    ],
)
def test_a_page_of_another_site_sends_nothing(connect: Connect, headers: dict[str, str], known: bool) -> None:
    server = connect(allowed_origins=("https://a.example",))
    answer = server.post("/v1/videos", json={}, headers=headers)
    deleted = server.delete("/v1/videos/video_1", headers=headers)
    # The engine of these tests never starts, and there is no such video.
    assert (answer.status_code, deleted.status_code) == ((503, 404) if known else (403, 403))
    if not known:
        assert (answer.json()["error"]["code"], headers["Origin"] in answer.text) == ("unknown_origin", True)
        assert server.get("/v1/videos", headers=headers).status_code == 200


def test_every_origin_may_send_where_all_are_allowed(connect: Connect) -> None:
    answer = connect(allowed_origins=("*",)).post("/v1/videos", json={}, headers={"Origin": OTHER})
    assert answer.status_code == 503
