# SPDX-License-Identifier: Apache-2.0
"""A client that stands still in the middle of an upload or a download holds up nobody, and gets all when it goes on."""

import contextlib
import json
import random
import socket
from collections.abc import Iterator

import pytest

from .conftest import Running, Serve

LARGE = 16 * 2**20


@contextlib.contextmanager
def connected(server: Running) -> Iterator[socket.socket]:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.settimeout(20)
        raw.connect((host, int(port)))
        yield raw


def made(server: Running) -> str:
    video = server.openai.videos.create(prompt="a cat")
    assert server.wait_for(video.id, "completed", "failed")["status"] == "completed"
    return video.id


def read_answer(raw: socket.socket) -> bytes:
    """The body of an answer whose connection ends with it."""
    data = b""
    while piece := raw.recv(2**16):
        data += piece
    return data.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("ends", ["goes on", "goes away"])
def test_a_download_that_stands_still(serve: Serve, ends: str) -> None:
    server = serve()
    clip = made(server)
    content = random.Random(0).randbytes(LARGE)  # more than the system keeps for a connection
    (file,) = server.media.glob(f"{clip}/*.mp4")
    file.write_bytes(content)
    with connected(server) as raw:
        raw.sendall(f"GET /v1/videos/{clip}/content HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
        first = raw.recv(1024)
        assert first.startswith(b"HTTP/1.1 200")
        assert server.http.get(f"/v1/videos/{clip}/content").content == content
        assert server.http.get(f"/v1/videos/{made(server)}/content").status_code == 200
        assert server.http.get("/health").status_code == 200
        if ends == "goes on":
            assert first.partition(b"\r\n\r\n")[2] + _rest(raw, first) == content
    assert server.http.delete(f"/v1/videos/{clip}").json()["deleted"]
    assert not file.parent.exists()
    assert server.http.get(f"/v1/videos/{made(server)}/content").status_code == 200


def _rest(raw: socket.socket, first: bytes) -> bytes:
    rest = b""
    while piece := raw.recv(2**16):
        rest += piece
    return rest if b"\r\n\r\n" in first else rest.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("ends", ["goes on", "goes away"])
def test_an_upload_that_stands_still(serve: Serve, ends: str) -> None:
    server = serve()
    body = json.dumps({"prompt": "a slow cat"}).encode()
    head = f"Host: a\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with connected(server) as raw:
        raw.sendall(b"POST /v1/videos HTTP/1.1\r\n" + head.encode() + body[:9])
        made(server)
        assert server.http.get("/health").status_code == 200
        assert [request.prompt for request in server.engine.requests] == ["a cat"]
        if ends == "goes on":
            raw.sendall(body[9:])
            slow = json.loads(read_answer(raw))
            assert server.wait_for(slow["id"], "completed", "failed")["status"] == "completed"
    made(server)
    prompts = ["a cat", "a slow cat", "a cat"] if ends == "goes on" else ["a cat", "a cat"]
    assert [request.prompt for request in server.engine.requests] == prompts
