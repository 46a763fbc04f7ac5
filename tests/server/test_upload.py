# SPDX-License-Identifier: Apache-2.0
"""Bodies above the limit, told and untold, over both of uvicorn's HTTP implementations."""

import itertools
import socket
from collections.abc import Iterator

import openai
import pytest

from .conftest import Serve

LIMIT = 256 * 1024
TOO_LARGE = b"x" * (8 * 2**20)

both = pytest.mark.parametrize("http", ["httptools", "h11"])


def stream(head: bytes, chunk: bytes, chunks: int) -> Iterator[bytes]:
    yield head
    yield from itertools.repeat(chunk, chunks)


@both
def test_the_client_gets_413_and_not_a_broken_pipe(serve: Serve, http: str) -> None:
    server = serve(http=http, max_upload_bytes=LIMIT)
    for _ in range(3):
        with pytest.raises(openai.APIStatusError) as refused:
            server.openai.videos.create(prompt="a cat", input_reference=TOO_LARGE)
        assert (refused.value.status_code, refused.value.code) == (413, "body_too_large")
        assert str(LIMIT) in refused.value.message
    assert server.engine.requests == []


BODIES = [
    ("application/json", b'{"prompt": "'),
    ("multipart/form-data; boundary=b", b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\n'),
    ("multipart/form-data; boundary=b", b'--b\r\nContent-Disposition: form-data; name="f"; filename="f"\r\n\r\n'),
    ("application/x-www-form-urlencoded", b"prompt="),
]


@both
def test_a_body_of_unknown_length_is_cut_off(serve: Serve, http: str) -> None:
    server = serve(http=http, max_upload_bytes=LIMIT)
    for content_type, head in BODIES:
        content = stream(head, b"x" * 65_536, 64)
        answer = server.http.post("/v1/videos", content=content, headers={"Content-Type": content_type})
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"


@both
def test_the_answer_comes_before_an_endless_body_has_ended(serve: Serve, http: str) -> None:
    server = serve(http=http, max_upload_bytes=LIMIT)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        raw.sendall(
            b"POST /v1/videos HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        for _ in range(LIMIT // 16_384 + 1):
            raw.sendall(b"4000\r\n" + b"x" * 16_384 + b"\r\n")
        assert raw.recv(64).startswith(b"HTTP/1.1 413")


def test_a_body_at_the_limit_is_read(serve: Serve) -> None:
    server = serve(max_upload_bytes=LIMIT)
    body = b'{"prompt": "a cat"}'
    answer = server.http.post("/v1/videos", content=body.ljust(LIMIT), headers={"Content-Type": "application/json"})
    assert answer.status_code == 200
    answer = server.http.post("/v1/videos", content=body.ljust(LIMIT + 1), headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
