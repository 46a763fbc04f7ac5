# SPDX-License-Identifier: Apache-2.0
"""Reference images by their address: what is fetched, from where, and what never is."""

import asyncio
import base64
import socket
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import trustme
from starlette.testclient import TestClient

from vllm_omni_vae.config import ServerConfig
from vllm_omni_vae.errors import ConfigurationError, RequestError
from vllm_omni_vae.server.addresses import IPAddress
from vllm_omni_vae.server.app import create_app
from vllm_omni_vae.server.decode import Upload
from vllm_omni_vae.server.fetch import ImageFetcher

from .scripted_engine import IMAGES, ScriptedEngine
from .web import Web, file, serving

LIMIT = 100_000
PICTURE = b"\x89PNG and the rest"


def loopback(address: IPAddress, port: int) -> bool:
    return address.is_loopback


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    with serving() as web:
        web.pages["/picture"] = file(PICTURE)
        web.pages["/picture?a=b%20c"] = file(PICTURE)
        web.pages["/large"] = file(b"x" * (LIMIT + 1))
        web.pages["/most"] = file(b"x" * LIMIT)
        web.pages["/empty"] = file(b"")
        web.pages["/moved"] = file(b"", 302, Location=web.url("/picture"))
        web.pages["/broken"] = file(b"abc", **{"Content-Length": "10", "Connection": "close"})
        web.pages["/endless"] = endless
        web.pages["/slow"] = slow
        yield web


def endless(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    try:
        while True:
            handler.wfile.write(b"x" * 8192)
    except OSError:
        pass


def slow(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    for _ in range(100):  # a header that comes letter by letter: each is in time, all are not
        try:
            handler.wfile.write(b"x")
        except OSError:
            return
        threading.Event().wait(0.02)


def fetch(*urls: str, hosts: tuple[str, ...] = ("localhost",), **options: Any) -> list[bytes | str]:
    async def fetched() -> list[Upload]:
        fetcher = ImageFetcher(hosts, LIMIT, **{"may_connect": loopback, **options})
        return await fetcher.fetch([Upload(url, "the_field") for url in urls])

    return [upload.source for upload in asyncio.run(fetched())]


def refusal(*urls: str, **options: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        fetch(*urls, **options)
    assert caught.value.param == "the_field"
    assert caught.value.code != "image_not_fetched" or "127.0.0" not in str(caught.value)
    return caught.value


def test_a_file_of_an_allowed_host(web: Web) -> None:
    seen = len(web.requests)
    assert fetch(web.url("/picture"), web.url("/picture?a=b%20c#part"), web.url("/empty")) == [PICTURE, PICTURE, b""]
    asked = web.requests[seen:]
    assert [path for path, _ in asked] == ["/picture", "/picture?a=b%20c", "/empty"]
    for _, headers in asked:
        assert set(headers) == {"host", "accept", "accept-encoding", "user-agent"}
        assert headers["host"] == f"localhost:{web.port}"
        assert headers["accept-encoding"] == "identity"


def test_what_is_no_address_is_left_alone() -> None:
    assert fetch("data:image/png;base64,AAAA", "ftp://localhost/a", "") == [
        "data:image/png;base64,AAAA",
        "ftp://localhost/a",
        "",
    ]


def test_without_hosts_nothing_is_fetched(web: Web) -> None:
    before = web.connections
    assert fetch(web.url("/picture"), hosts=()) == [web.url("/picture")]
    assert web.connections == before


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:PORT/picture",
        "http://localhost.example:PORT/picture",
        "http://xlocalhost:PORT/picture",
        "http://localhost.:PORT/picture",
        "http://[::1]:PORT/picture",
        "http://2130706433:PORT/picture",
        "http://example.com/?http://localhost",
        "http://example.com/#@localhost",
    ],
)
def test_another_host_is_refused(web: Web, url: str) -> None:
    before = web.connections
    error = refusal(url.replace("PORT", str(web.port)))
    assert (error.status, error.code) == (400, "unsupported_url")
    assert web.connections == before


@pytest.mark.parametrize(
    "url",
    [
        "http://user@localhost/a",
        "http://user:word@localhost/a",
        "http://example.com@localhost/a",
        "http://localhost\\@example.com/a",
        "http://localhost/a b",
        "http://localhost/a\r\nX: y",
        "http://local\thost/a",
        "http://localhost/\x00",
        "http://localhost/é",
        "http://löcalhost/a",
        "http://localhost:port/a",
        "http://localhost:99999/a",
        "http://[::1/a",
        "http:///a",
        "https://",
        "http://localhost/" + "a" * 9000,
    ],
)
def test_a_malformed_address_is_refused(web: Web, url: str) -> None:
    before = web.connections
    error = refusal(url)
    assert (error.status, error.code) == (400, "invalid_url")
    assert web.connections == before


def test_a_name_that_leads_inside_is_not_followed(web: Web) -> None:
    before = web.connections
    with pytest.raises(RequestError) as caught:
        asyncio.run(ImageFetcher(("localhost",), LIMIT).fetch([Upload("http://localhost/picture", "image")]))
    assert (caught.value.status, caught.value.code) == (400, "image_not_fetched")
    assert refusal(web.url("/picture"), may_connect=lambda address, port: False).code == "image_not_fetched"
    assert web.connections == before


def test_a_name_is_looked_up_once_and_the_checked_address_is_used(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name whose meaning changes between the check and the connection; no resolver here would do that."""
    answers = [["127.0.0.1"], ["127.0.0.2"], ["127.0.0.2"]]
    asked = []

    def look_up(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in answers.pop(0)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with serving("127.0.0.2", web.port) as other:
        assert fetch(web.url("/picture", host="rebound.example"), hosts=("rebound.example",)) == [PICTURE]
        assert asked == ["rebound.example"]
        assert other.connections == 0


def test_addresses_that_fail_the_check_are_left_out(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (last, port)) for last in ("127.0.0.2", "127.0.0.1")]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with serving("127.0.0.2", web.port) as other:
        got = fetch(web.url("/picture"), may_connect=lambda address, port: str(address) == "127.0.0.1")
        assert got == [PICTURE]
        assert other.connections == 0


def test_no_redirect_is_followed(web: Web) -> None:
    seen = len(web.requests)
    error = refusal(web.url("/moved"))
    assert (error.status, error.code) == (400, "image_not_fetched")
    assert "302" in str(error)
    assert [path for path, _ in web.requests[seen:]] == ["/moved"]


def test_no_proxy_is_used(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "https_proxy"):
            monkeypatch.setenv(name, proxy.url(""))
        assert fetch(web.url("/picture")) == [PICTURE]
        assert proxy.connections == 0


@pytest.mark.parametrize("path", ["/nowhere", "/broken"])
def test_no_file_there(web: Web, path: str) -> None:
    error = refusal(web.url(path))
    assert (error.status, error.code) == (400, "image_not_fetched")


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    assert refusal(f"http://localhost:{port}/a").code == "image_not_fetched"
    assert refusal("http://no-such-host.invalid/a", hosts=("no-such-host.invalid",)).code == "image_not_fetched"


@pytest.mark.parametrize("urls", [["/large"], ["/endless"], ["/most", "/picture"]])
def test_bytes_are_limited_while_they_come(web: Web, urls: list[str]) -> None:
    error = refusal(*map(web.url, urls))
    assert (error.status, error.code) == (413, "image_too_large")
    assert str(LIMIT) in str(error)


def test_bytes_at_the_limit(web: Web) -> None:
    assert fetch(web.url("/most")) == [b"x" * LIMIT]


def test_time_is_limited_for_all_of_it(web: Web) -> None:
    error = refusal(web.url("/slow"), timeout=0.3)
    assert (error.status, error.code) == (400, "image_not_fetched")
    assert "0.3 s" in str(error)


def test_the_certificate_must_be_the_host_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    for name, right in (("localhost", True), ("127.0.0.1", False), ("other.example", False)):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert(name).configure_cert(context)
        with serving(context=context) as web:
            web.pages["/picture"] = file(PICTURE)
            url = web.url("/picture", scheme="https")
            if right:
                assert fetch(url) == [PICTURE]
            else:
                assert refusal(url).code == "image_not_fetched"


def test_an_unknown_certificate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("localhost").configure_cert(context)
    with serving(context=context) as web:
        assert refusal(web.url("/picture", scheme="https")).code == "image_not_fetched"
        assert web.requests == []


def client(tmp_path: Path, engine: ScriptedEngine, *, widened: bool = True, **settings: Any) -> TestClient:
    config = ServerConfig(media_storage_path=str(tmp_path), allowed_media_domains=("localhost",), **settings)
    fetcher = ImageFetcher(config.allowed_media_domains, LIMIT, may_connect=loopback) if widened else None
    return TestClient(create_app(engine, config, model_name="m", fetcher=fetcher))


def wait_until_ready(server: TestClient) -> None:
    while server.get("/health").status_code != 200:
        pass


def test_a_clip_of_a_picture_by_its_address(web: Web, tmp_path: Path, png: bytes) -> None:
    web.pages["/red.png"] = file(png)
    web.pages["/text.png"] = file(b"hello", **{"Content-Type": "image/png"})
    url, engine = web.url("/red.png"), ScriptedEngine()
    sent: list[dict[str, Any]] = [
        {"json": {"prompt": "a cat", "input_reference": {"image_url": url}}},
        {"json": {"prompt": "a cat", "image_reference": url}},
        {"data": {"prompt": "a cat", "input_reference[image_url]": url}},
    ]
    with client(tmp_path, engine) as server:
        wait_until_ready(server)
        for content in sent:
            assert server.post("/v1/videos", **content).status_code == 200
        wrong = {"prompt": "a cat", "input_reference": {"image_url": web.url("/text.png")}}
        answer = server.post("/v1/videos", json=wrong)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_image")
    assert len(engine.requests) == 3
    for request in engine.requests:
        (image,) = request.images
        assert image.shape == (48, 64, 3) and (image == (255, 0, 0)).all()


def test_an_edit_of_pictures_by_their_addresses(web: Web, tmp_path: Path, png: bytes) -> None:
    web.pages["/red.png"] = file(png)
    url, engine = web.url("/red.png"), ScriptedEngine(card=IMAGES)
    data = "data:image/png;base64," + base64.b64encode(png).decode()
    with client(tmp_path, engine) as server:
        wait_until_ready(server)
        body = {"prompt": "a cat", "images": [{"image_url": url}, {"image_url": data}]}
        assert server.post("/v1/images/edits", json=body).status_code == 200
        seen = web.connections
        crowd = {"prompt": "a cat", "images": [{"image_url": url}] * 4}
        answer = server.post("/v1/images/edits", json=crowd)
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "too_many_images")
        assert web.connections == seen
    assert len(engine.requests[0].images) == 2


def test_by_default_the_inside_is_out_of_reach(web: Web, tmp_path: Path) -> None:
    before = web.connections
    with client(tmp_path, ScriptedEngine(), widened=False) as server:
        wait_until_ready(server)
        answer = server.post("/v1/videos", json={"prompt": "a cat", "image_reference": web.url("/picture")})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "image_not_fetched")
    assert web.connections == before


def test_hosts_are_names_in_lower_case() -> None:
    given = ["Images.Example.COM", "localhost", "xn--bcher-kva.example", "10.0.0.1"]
    config = ServerConfig(allowed_media_domains=given)  # type: ignore[arg-type]
    assert config.allowed_media_domains == ("images.example.com", "localhost", "xn--bcher-kva.example", "10.0.0.1")


@pytest.mark.parametrize(
    "host",
    ["", "https://a.example", "a.example/b", "a.example:80", "*.example", "a..b", "-a.b", "bücher.example", "a b"],
)
def test_what_is_no_host_name_ends_the_start(host: str) -> None:
    with pytest.raises(ConfigurationError, match="is no host name; write it as"):
        ServerConfig(allowed_media_domains=("a.example", host))
