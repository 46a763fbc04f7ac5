# SPDX-License-Identifier: Apache-2.0
"""Bytes that are no HTTP, or only nearly, over both of uvicorn's implementations."""

import contextlib
import random
import re
import socket
import struct
from collections.abc import Iterator

import pytest

from .conftest import Running, Serve

PATIENCE = 10.0
MUTATIONS = 150
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
GOOD = b"GET /v1/videos?limit=1 HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
JSON = b'{"prompt": ""}'
POST = (
    b"POST /v1/videos HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 14\r\n"
    b"Connection: close\r\n\r\n" + JSON
)
CHUNKED = (
    b"POST /v1/videos HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
    b"Connection: close\r\n\r\n"
)
LIMITS = {"max_upload_bytes": 64 * 1024, "max_pixels": 64 * 64, "max_frames": 9}

WHOLE = [
    GOOD,
    POST,
    CHUNKED + b"e\r\n" + JSON + b"\r\n0\r\n\r\n",
    CHUNKED + b"e;a=b\r\n" + JSON + b"\r\n0\r\nX: trailer\r\n\r\n",
    GOOD.replace(b"Host: a\r\n", b""),
    GOOD.replace(b"HTTP/1.1", b"HTTP/1.0"),
    GOOD.replace(b"/v1/videos?limit=1", b"http://b.example/v1/videos"),
    GOOD.replace(b"/v1/videos?limit=1", b"//b.example/v1/videos"),
    GOOD.replace(b"/v1/videos?limit=1", b"/v1/videos/%2e%2e/%2e%2e/etc/passwd"),
    GOOD.replace(b"/v1/videos?limit=1", b"/static/../../etc/passwd"),
    GOOD.replace(b"/v1/videos?limit=1", b"/static/..%2f..%2fauth.py"),
    GOOD.replace(b"/v1/videos?limit=1", b"/v1/videos/%ff%00"),
    GOOD.replace(b"Host: a", b"Host: a\r\nUpgrade: websocket\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="),
    GOOD.replace(b"Host: a", b"Host: a\r\nX-Request-Id: " + b"a" * 4000),
    POST.replace(b"Content-Length: 14", b"Content-Length: 65537"),
]
"""Requests that have an end, so that there must be an answer."""

BROKEN = [
    b"\r\n\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET /\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    b"GET / HTTP/1.1\nHost: a\n\n",
    b"GET /\x00 HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost a\r\n\r\n",
    b"GET / HTTP/1.1\r\n: a\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nX: a\x00b\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nX-Request-Id: a\rSet-Cookie: b=c\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\n folded: b\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET / HTTP/1.1\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
    POST.replace(b"Content-Length: 14", b"Content-Length: -1"),
    POST.replace(b"Content-Length: 14", b"Content-Length: 1e3"),
    POST.replace(b"Content-Length: 14", b"Content-Length: 14\r\nContent-Length: 15"),
    POST.replace(b"Content-Length: 14", b"Content-Length: " + b"9" * 40),
    POST.replace(b"Content-Length: 14", b"Content-Length: 14\r\nTransfer-Encoding: chunked"),
    POST.replace(b"Content-Length: 14", b"Transfer-Encoding: gzip, chunked"),
    POST.replace(b"Content-Length: 14", b"Transfer-Encoding: identity"),
    POST.replace(b"Content-Length: 14", b"Content-Length: 100"),
    CHUNKED + b"-1\r\n",
    CHUNKED + b"zz\r\n",
    CHUNKED + b"f" * 40 + b"\r\n",
    CHUNKED + b"e\r\n" + JSON + b"XX0\r\n\r\n",
    CHUNKED + b"e\r\n" + JSON,
    CHUNKED + b"e;" + b"a" * 100_000 + b"\r\n" + JSON + b"\r\n0\r\n\r\n",
    CHUNKED + b"1\r\n{\r\n" * 1000,
    GOOD + b"garbage" * 1000,
    GOOD.replace(b"Connection: close\r\n", b"") * 50,
    GOOD[:-1],
    GOOD[:7],
    b"",
]
"""What may be answered or cut off, as the HTTP server likes, but ends in time."""


@pytest.fixture(params=["httptools", "h11"])
def server(serve: Serve, request: pytest.FixtureRequest) -> Running:
    return serve(http=request.param, **LIMITS)


@contextlib.contextmanager
def connected(server: Running) -> Iterator[socket.socket]:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as raw:
        yield raw


def send(server: Running, data: bytes, *, whole: bool) -> list[int]:
    """Return the statuses of what comes back, once the server has closed the connection.

    Raises:
        TimeoutError: it does not.
    """
    got = b""
    with connected(server) as raw:
        try:
            raw.sendall(data)
            if not whole:
                raw.shutdown(socket.SHUT_WR)
            while piece := raw.recv(65_536):
                got += piece
        except TimeoutError:
            raise
        except OSError:  # it has closed the connection before all was sent
            pass
    return [int(status) for status in STATUS.findall(got)]


def still_works(server: Running) -> None:
    assert server.http.get("/health").status_code == 200
    answer = server.http.post("/v1/videos/sync", json={"prompt": "a cat"})
    assert (answer.status_code, answer.content[4:8]) == (200, b"ftyp")
    assert server.clips() == []


def test_nothing_breaks(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    sent = 0
    for data in WHOLE:
        statuses = send(server, data, whole=True)
        assert len(statuses) == 1 and statuses[0] < 500, (data[:100], statuses)
        sent += 1
    chance = random.Random(0)
    mutated = [mutate(chance, chance.choice(WHOLE[:4])) for _ in range(MUTATIONS)]
    for data in [*BROKEN, *mutated]:
        statuses = send(server, data, whole=False)
        assert all(status < 500 for status in statuses), (data[:100], statuses)
        sent += 1
    assert sent == len(WHOLE) + len(BROKEN) + MUTATIONS >= 200
    still_works(server)
    # Of this package: uvicorn on h11 writes a traceback where it has answered a broken chunk itself, before the
    # application hears of it.
    ours = [record for record in caplog.records if record.name.startswith("vllm_omni_vae")]
    assert [record.getMessage() for record in ours] == []


def mutate(chance: random.Random, data: bytes) -> bytes:
    """``data`` with some bytes changed, or a piece of it repeated or cut out."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        place, width = chance.randrange(len(changed)), chance.randint(1, 20)
        match chance.randrange(4):
            case 0:
                changed[place] = chance.randrange(256)
            case 1:
                changed[place:place] = changed[place : place + width]
            case 2 if len(changed) > width + 1:
                del changed[place : place + width]
            case _:
                changed[place:place] = chance.choice([b"\r\n", b"\x00", b" ", b"\n", b":", b"%"])
    return bytes(changed)


def test_clients_that_hold_on_keep_nobody_waiting(server: Running) -> None:
    """A hundred connections with half a request each, and some that are torn down in the middle."""
    with contextlib.ExitStack() as stack:
        for number in range(100):
            raw = stack.enter_context(connected(server))
            raw.sendall((POST[:-5], GOOD[:-2], CHUNKED, b"G")[number % 4])
            if number % 5 == 0:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                raw.close()
        still_works(server)
    still_works(server)
