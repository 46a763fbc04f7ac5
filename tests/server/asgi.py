# SPDX-License-Identifier: Apache-2.0
"""The application without a network in front of it: it gets exactly the bytes that a test wants it to get."""

import asyncio
import contextlib
import dataclasses
import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

from fastapi import FastAPI


@dataclasses.dataclass(frozen=True, slots=True)
class Sent:
    """One request, byte for byte.

    Attributes:
        method: Of HTTP, or any other word.
        target: Path and query, percent-encoded.
        headers: In their order; one name may come more than once.
        chunks: The body in pieces.
        complete: Whether the body ends with them; else the client goes away.
    """

    method: str
    target: str = "/"
    headers: tuple[tuple[bytes, bytes], ...] = ()
    chunks: tuple[bytes, ...] = ()
    complete: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What came back; ``status`` is None where a client that went away got no answer."""

    status: int | None
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Application:
    """An application that runs on an event loop of its own; ``sent`` counts its requests."""

    def __init__(self, app: FastAPI, loop: asyncio.AbstractEventLoop) -> None:
        self._app = app
        self._loop = loop
        self.sent = 0

    def send(self, request: Sent, *, patience: float = 20.0) -> Answer:
        """Return the answer to ``request``.

        Raises:
            TimeoutError: there is none within ``patience`` seconds.
        """
        self.sent += 1
        return asyncio.run_coroutine_threadsafe(self._answer(request), self._loop).result(patience)

    def ask(self, method: str, target: str, body: Any = None) -> Answer:
        """Send JSON as a sane client does."""
        headers, chunks = (), ()
        if body is not None:
            headers, chunks = ((b"content-type", b"application/json"),), (json.dumps(body).encode(),)
        return self.send(Sent(method, target, headers, chunks))

    async def _answer(self, request: Sent) -> Answer:
        path, _, query = request.target.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": "http",
            "path": unquote_to_bytes(path).decode("utf-8", "replace"),
            "raw_path": path.encode("latin-1", "replace"),
            "query_string": query.encode("latin-1", "replace"),
            "root_path": "",
            "headers": list(request.headers),
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        chunks: Sequence[bytes] = request.chunks or (b"",)
        place = 0
        messages: list[dict[str, Any]] = []
        over = asyncio.Event()

        async def receive() -> dict[str, Any]:
            nonlocal place
            if place < len(chunks):
                place += 1
                more = place < len(chunks) or not request.complete
                return {"type": "http.request", "body": chunks[place - 1], "more_body": more}
            if request.complete:
                await over.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            messages.append(message)

        try:
            await self._app(scope, receive, send)
        except BaseException:
            # A server would have sent what was begun; one that ends so has a bug, which the status tells.
            messages = messages or [{"status": 599, "headers": ()}]
        finally:
            over.set()
        if not messages:
            return Answer(None, (), b"")
        headers = tuple((bytes(name), bytes(value)) for name, value in messages[0]["headers"])
        return Answer(messages[0]["status"], headers, b"".join(message.get("body", b"") for message in messages))


@contextlib.contextmanager
def running(app: FastAPI) -> Iterator[Application]:
    """Run ``app`` until the end of the block, and wait until it takes jobs."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    life = app.router.lifespan_context(app)

    def run(coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, loop).result(20)

    run(life.__aenter__())
    try:
        application = Application(app, loop)
        while application.ask("GET", "/health").status != 200:
            pass
        yield application
    finally:
        run(life.__aexit__(None, None, None))
        run(loop.shutdown_default_executor())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
