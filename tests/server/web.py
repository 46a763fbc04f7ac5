# SPDX-License-Identifier: Apache-2.0
"""A small web server on the loopback, to fetch pictures from."""

import contextlib
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[BaseHTTPRequestHandler], None]


class Web:
    """What is served, by path, and what was asked for; ``connections`` counts them."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self.port: int = server.server_address[1]
        self.pages: dict[str, Answer] = {}
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.connections = 0

    def url(self, path: str, host: str = "localhost", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"


def file(data: bytes, status: int = 200, **headers: str) -> Answer:
    """An answer with these bytes."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            handler.send_header(name, value)
        handler.end_headers()
        with contextlib.suppress(OSError):  # who asked may have gone
            handler.wfile.write(data)

    return answer


@contextlib.contextmanager
def serving(address: str = "127.0.0.1", port: int = 0, context: ssl.SSLContext | None = None) -> Iterator[Web]:
    """Serve at ``address`` until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            web.requests.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
            web.pages.get(self.path, file(b"", 404))(self)

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def process_request(self, *args: object) -> None:
            web.connections += 1
            super().process_request(*args)  # type: ignore[arg-type]

        def handle_error(self, *args: object) -> None:
            pass

    with Server((address, port), Handler) as server:
        web = Web(server)
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield web
        finally:
            server.shutdown()
            thread.join(10)
