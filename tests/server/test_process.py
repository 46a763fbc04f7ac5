# SPDX-License-Identifier: Apache-2.0
"""The server as a process: what it takes before it loads the model, what it says, and how it ends."""

import signal
import socket
import threading
from pathlib import Path

import httpx
import pytest

from .process import Start, ready

pytestmark = pytest.mark.e2e


def test_start_and_end(start: Start, port: int, tmp_path: Path) -> None:
    server = start(host="127.0.0.1", port=port)
    assert server.says(f"listening on http://127.0.0.1:{port}") and server.says("ScriptedPipeline on 2 rank(s), cpu")
    with ready(port) as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "scripted"
    server.process.send_signal(signal.SIGTERM)
    assert server.ends() == 0
    assert server.says("engine closes")
    table = server.output.index("ScriptedPipeline on 2 rank(s), cpu, float32")
    assert server.output[table + 3].split() == ["vae", "AutoencoderKLWan", "on", "tile", "on", "2", "ranks"]
    assert sum("ScriptedPipeline" in line for line in server.output) == 1


def test_after_sigterm_the_running_job_finishes_and_no_other_is_taken(start: Start, port: int, tmp_path: Path) -> None:
    server = start(host="127.0.0.1", port=port, hold=True, media_storage_path=str(tmp_path))
    assert server.says("ScriptedPipeline")
    with ready(port) as client:
        running, waiting = (client.post("/v1/videos", json={"prompt": "a cat"}).json()["id"] for _ in range(2))
        while client.get(f"/v1/videos/{running}").json()["status"] != "in_progress":
            pass
        server.process.send_signal(signal.SIGTERM)
        while client.get("/health").status_code == 200:
            pass
        refused = client.post("/v1/videos", json={"prompt": "a cat"})
        assert refused.status_code == 503 and "shutting down" in refused.json()["error"]["message"]
        assert client.get(f"/v1/videos/{waiting}").json()["status"] == "queued"
        assert client.get(f"/v1/videos/{running}").json()["status"] == "in_progress"
        server.process.send_signal(signal.SIGUSR1)
        assert server.ends() == 0
    assert {path.name for path in (tmp_path / running).iterdir()} == {"video.mp4", "thumbnail.webp", "spritesheet.jpg"}


def test_after_sigterm_what_waits_fails_where_nothing_is_kept(start: Start, port: int) -> None:
    server = start(host="127.0.0.1", port=port, hold=True)
    assert server.says("ScriptedPipeline")
    with ready(port) as client:
        running, waiting = (client.post("/v1/videos", json={"prompt": "a cat"}).json()["id"] for _ in range(2))
        while client.get(f"/v1/videos/{running}").json()["status"] != "in_progress":
            pass
        server.process.send_signal(signal.SIGTERM)
        while client.get("/health").status_code == 200:
            pass
        job = client.get(f"/v1/videos/{waiting}").json()
        assert (job["status"], job["error"]["code"]) == ("failed", "server_shutdown")
        assert client.get(f"/v1/videos/{running}").json()["status"] == "in_progress"
        server.process.send_signal(signal.SIGUSR1)
        assert server.ends() == 0


def test_after_the_grace_period_the_running_job_fails(start: Start, port: int, tmp_path: Path) -> None:
    server = start(host="127.0.0.1", port=port, hold=True, grace=0.2, media_storage_path=str(tmp_path))
    assert server.says("ScriptedPipeline")
    with ready(port) as client:
        answers: list[httpx.Response] = []

        def sync() -> None:
            answers.append(httpx.post(f"{client.base_url}/v1/videos/sync", json={"prompt": "a cat"}, timeout=20))

        thread = threading.Thread(target=sync)
        thread.start()
        while not [job for job in client.get("/v1/videos").json()["data"] if job["status"] == "in_progress"]:
            pass
        server.process.send_signal(signal.SIGTERM)
        thread.join(10)
        assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "server_shutdown"
        assert server.ends() == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["jobs.lock", "jobs.sqlite3"]


@pytest.mark.parametrize("streams", [False, True])
def test_after_sigterm_images_are_still_answered(start: Start, port: int, tmp_path: Path, streams: bool) -> None:
    server = start(host="127.0.0.1", port=port, hold=True, images=True, media_storage_path=str(tmp_path))
    assert server.says("ScriptedImagePipeline")
    answers: list[httpx.Response] = []

    def ask() -> None:
        url, body = f"http://127.0.0.1:{port}/v1/images/generations", {"prompt": "a cat", "stream": streams}
        answers.append(httpx.post(url, json=body, timeout=20))

    with ready(port) as client:
        clients = [threading.Thread(target=ask) for _ in range(2)]
        for thread in clients:
            thread.start()
        assert server.says("a job runs") and server.says("2 jobs came")
        server.process.send_signal(signal.SIGTERM)
        while client.get("/health").status_code == 200:
            pass
        while len(answers) < 1:
            pass
        failed = answers[0]
        assert failed.status_code == (200 if streams else 503) and "server_shutdown" in failed.text
        server.process.send_signal(signal.SIGUSR1)
        for thread in clients:
            thread.join(10)
    assert server.ends() == 0
    assert answers[1].status_code == 200 and "b64_json" in answers[1].text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["jobs.lock", "jobs.sqlite3"]


def test_a_second_ctrl_c_ends_the_wait(start: Start, port: int) -> None:
    server = start(host="127.0.0.1", port=port, hold=True, grace=60)
    assert server.says("ScriptedPipeline")
    with ready(port) as client:
        identity = client.post("/v1/videos", json={"prompt": "a cat"}).json()["id"]
        while client.get(f"/v1/videos/{identity}").json()["status"] != "in_progress":
            pass
        server.process.send_signal(signal.SIGINT)
        while client.get("/health").status_code == 200:
            pass
        server.process.send_signal(signal.SIGINT)
        assert server.ends() == 0
    assert server.says("engine closes")


def test_sigterm_while_the_model_is_loaded(start: Start, port: int) -> None:
    server = start(host="127.0.0.1", port=port)
    assert server.says("engine starts")
    server.process.send_signal(signal.SIGTERM)
    assert server.ends() == 0


def test_an_address_that_is_taken_is_found_before_the_model_is_loaded(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        server = start(host="127.0.0.1", port=port)
        assert server.ends() == 2
        assert server.says(f"error: cannot listen on host 127.0.0.1, port {port}:")
    assert "engine starts" not in server.output


def test_a_certificate_that_is_not_there(start: Start, port: int, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.pem")
    server = start(host="127.0.0.1", port=port, ssl_keyfile=missing, ssl_certfile=missing)
    assert server.ends() == 2
    assert server.says("error: cannot use the TLS files")
    assert "engine starts" not in server.output


def test_an_engine_that_cannot_start_ends_the_process(start: Start, port: int) -> None:
    server = start(host="127.0.0.1", port=port, fault="rank 0 has no memory")
    assert server.ends() == 1
    assert server.says("error: rank 0 has no memory")
    assert "left" not in server.output


def test_an_engine_that_gives_up_ends_the_process(start: Start, port: int) -> None:
    server = start(host="127.0.0.1", port=port)
    assert server.says("ScriptedPipeline")
    with ready(port):
        server.process.send_signal(signal.SIGUSR2)
        assert server.ends() == 1
    assert server.says("error: rank 1 died again")


def test_a_unix_socket(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stale:
        stale.bind(str(path))
    server = start(uds=str(path))
    assert server.says(f"listening on unix:{path}")
    transport = httpx.HTTPTransport(uds=str(path))
    with httpx.Client(transport=transport, base_url="http://server") as client:
        assert client.get("/version").status_code == 200
        second = start(uds=str(path))
        assert second.ends() == 2 and second.says("error: cannot listen on")
        assert client.get("/version").status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.ends() == 0
    assert not path.exists()
