# SPDX-License-Identifier: Apache-2.0
"""A real HTTP server on a free port, in a thread, around a `ScriptedEngine`."""

import dataclasses
import io
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from PIL import Image

from vllm_omni_vae.config import ServerConfig
from vllm_omni_vae.server.app import create_app

from .process import Server, Start
from .scripted_engine import ScriptedEngine

MODEL = "scripted"


@dataclasses.dataclass
class Running:
    """A server that answers, with clients for it; ``stop`` ends it and returns when it has."""

    url: str
    engine: ScriptedEngine
    http: httpx.Client
    openai: openai.OpenAI
    media: Path
    stop: Callable[[], None]

    def clips(self) -> list[Path]:
        """What there is of clips on the disk, beside the index of jobs."""
        return [path for path in self.media.iterdir() if path.is_dir()]

    def wait_for(self, video_id: str, *states: str) -> dict[str, Any]:
        """Follow the job's events until it is in one of ``states``; the client's timeout bounds it."""
        with self.http.stream("GET", f"/v1/videos/{video_id}/events") as events:
            for line in events.iter_lines():
                if line.startswith("data: ") and any(f'"status": "{state}"' in line for state in states):
                    break
        return self.http.get(f"/v1/videos/{video_id}").json()


Serve = Callable[..., Running]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a server as a process; none is left."""
    servers: list[Server] = []

    def begin(*within: str, **settings: Any) -> Server:
        servers.append(Server(*within, **settings))
        return servers[-1]

    yield begin
    for server in servers:
        server.process.kill()
        server.process.wait(10)


@pytest.fixture
def port() -> int:
    """A port that is free."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def leaving() -> Iterator[list[tuple[threading.Thread, ScriptedEngine]]]:
    """Servers that were told to stop: they do while the next test runs, and have when the file's last one has."""
    servers: list[tuple[threading.Thread, ScriptedEngine]] = []
    yield servers
    for thread, engine in servers:
        thread.join(15)
        assert not thread.is_alive()
        assert engine.closed


@pytest.fixture
def serve(
    engine: ScriptedEngine, tmp_path: Path, leaving: list[tuple[threading.Thread, ScriptedEngine]]
) -> Iterator[Serve]:
    stops: list[Callable[[], None]] = []

    def start(*, ready: bool = True, http: str = "auto", engine: ScriptedEngine = engine, **settings: Any) -> Running:
        media = tmp_path / "media"
        config = ServerConfig(**{"media_storage_path": str(media), **settings})
        app = create_app(engine, config, model_name=MODEL)
        sock = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        server = uvicorn.Server(
            uvicorn.Config(app, log_level="warning", http=http, lifespan="on", timeout_graceful_shutdown=1)
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        key = config.api_key[0] if config.api_key else "none"
        headers = {"Authorization": f"Bearer {key}"}
        client = httpx.Client(base_url=url, headers=headers, timeout=20)
        sdk = openai.OpenAI(base_url=f"{url}/v1", api_key=key, timeout=20, max_retries=0)

        def leave() -> None:
            client.close()
            sdk.close()
            server.should_exit = True
            leaving.append((thread, engine))

        def stop() -> None:
            stops.remove(hurry)
            leave()
            thread.join(15)
            assert not thread.is_alive()

        def hurry() -> None:
            engine.may_start.set()
            engine.may_finish.set()
            leave()

        stops.append(hurry)
        while ready and client.get("/health").status_code != 200:
            pass
        return Running(url, engine, client, sdk, media, stop)

    yield start
    for hurry in stops:
        hurry()


@pytest.fixture
def png() -> bytes:
    """A red picture of 40 x 30 pixels."""
    buffer = io.BytesIO()
    Image.new("RGB", (40, 30), (255, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()
