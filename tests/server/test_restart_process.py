# SPDX-License-Identifier: Apache-2.0
"""Servers that are killed, stopped, or run out of disk, as processes; and the one that comes after."""

import contextlib
import dataclasses
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from .process import Server, Start, ready

pytestmark = pytest.mark.e2e

FIELDS = {"prompt": "a cat", "num_frames": 5, "num_inference_steps": 2}


def post(client: httpx.Client, **fields: Any) -> str:
    answer = client.post("/v1/videos", json={**FIELDS, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def follow(client: httpx.Client, identity: str, *states: str) -> dict[str, Any]:
    while (job := client.get(f"/v1/videos/{identity}").json())["status"] not in states:
        pass
    return job


def up(server: Server, port: int) -> contextlib.AbstractContextManager[httpx.Client]:
    """A client, once the server has its address and then takes jobs."""
    assert server.says("listening on")
    return ready(port)


def clips(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir()}


def test_kill_9_loses_no_job(start: Start, port: int, tmp_path: Path, png: bytes) -> None:
    settings = {"host": "127.0.0.1", "port": port, "media_storage_path": str(tmp_path / "media")}
    server = start(**settings, hold=True)
    with up(server, port) as client:
        running = post(client)
        waiting = [post(client, prompt=f"cat {n}") for n in range(4)]
        data = {key: str(value) for key, value in FIELDS.items()} | {"size": "64x48"}
        waiting.append(client.post("/v1/videos", data=data, files={"input_reference": png}).json()["id"])
        follow(client, running, "in_progress")
        before = {identity: client.get(f"/v1/videos/{identity}").json() for identity in waiting}
        server.process.send_signal(signal.SIGKILL)
        assert server.ends() == -signal.SIGKILL
    second = start(**settings, hold=True)
    with up(second, port) as client:
        job = client.get(f"/v1/videos/{running}").json()
        assert (job["status"], job["error"]["code"]) == ("failed", "server_restarted")
        follow(client, waiting[0], "in_progress")
        assert [client.get(f"/v1/videos/{identity}").json() for identity in waiting[1:]] == [
            before[identity] for identity in waiting[1:]
        ]
        second.process.send_signal(signal.SIGUSR1)
        assert [follow(client, identity, "completed", "failed")["status"] for identity in waiting] == ["completed"] * 5
        listed = client.get("/v1/videos?order=asc").json()["data"]
        assert [job["id"] for job in listed] == [running, *waiting]
        # The same request of a client who sent it now: the seed was drawn before the first server was killed.
        direct = post(client, prompt="cat 0", seed=listed[1]["seed"])
        follow(client, direct, "completed")
        first, second_ = (client.get(f"/v1/videos/{identity}/content").content for identity in (waiting[0], direct))
        assert first == second_
    assert clips(tmp_path / "media") == {*waiting, direct}


def everything(client: httpx.Client) -> list[dict[str, Any]]:
    jobs: list[dict[str, Any]] = []
    more = True
    while more:
        after = {"after": jobs[-1]["id"]} if jobs else {}
        page = client.get("/v1/videos", params={"limit": 100, "order": "asc", **after}).json()
        jobs += page["data"]
        more = page["has_more"]
    return jobs


@dataclasses.dataclass
class Known:
    """What a client was told of its jobs; ``unsure`` are those that it has asked to delete."""

    acknowledged: set[str] = dataclasses.field(default_factory=set)
    unsure: set[str] = dataclasses.field(default_factory=set)
    deleted: set[str] = dataclasses.field(default_factory=set)
    completed: set[str] = dataclasses.field(default_factory=set)


def work(client: httpx.Client, known: Known, chance: random.Random) -> None:
    """Ask for videos, delete some and look at the list, until the server is gone."""
    with contextlib.suppress(httpx.TransportError):
        while True:
            answer = client.post("/v1/videos", json=FIELDS)
            if answer.status_code == 200:
                known.acknowledged.add(answer.json()["id"])
            if chance.random() < 0.3:
                victim = chance.choice(sorted(known.acknowledged - known.deleted))
                known.unsure.add(victim)
                assert client.delete(f"/v1/videos/{victim}").status_code in (200, 404)
                known.deleted.add(victim)
            jobs = client.get("/v1/videos?limit=100").json()["data"]
            known.completed |= {job["id"] for job in jobs if job["status"] == "completed"}


def check(client: httpx.Client, folder: Path, known: Known) -> None:
    """Hold a server that has just begun to what the ones before it said."""
    jobs = everything(client)
    listed = {job["id"] for job in jobs}
    assert known.acknowledged - known.unsure <= listed and not known.deleted & listed
    for identity in known.deleted:
        assert client.get(f"/v1/videos/{identity}/content").status_code == 410
    there = set()
    for job in jobs:
        final = follow(client, job["id"], "completed", "failed")
        if final["status"] == "completed":
            there.add(job["id"])
            part = client.get(f"/v1/videos/{job['id']}/content", headers={"Range": "bytes=0-9"})
            assert part.status_code == 206
        else:
            assert final["error"]["code"] == "server_restarted" and job["id"] not in known.completed
    assert clips(folder) == there


@pytest.mark.slow
def test_kill_9_at_any_moment(start: Start, port: int, tmp_path: Path) -> None:
    settings = {"host": "127.0.0.1", "port": port, "media_storage_path": str(tmp_path)}
    chance, known = random.Random(0), Known()
    for _ in range(4):
        server = start(**settings)
        with up(server, port) as client:
            check(client, tmp_path, known)
            timer = threading.Timer(chance.uniform(0.2, 1.5), server.process.kill)
            timer.start()
            work(client, known, chance)
            assert server.ends() == -signal.SIGKILL
    with up(start(**settings), port) as client:
        check(client, tmp_path, known)
    assert len(known.completed - known.unsure) > 5 and len(known.deleted) > 2


def test_after_sigterm_the_next_server_runs_what_waits(start: Start, port: int, tmp_path: Path) -> None:
    settings = {"host": "127.0.0.1", "port": port, "media_storage_path": str(tmp_path)}
    server = start(**settings, hold=True, grace=0.2)
    answers: list[httpx.Response] = []
    with up(server, port) as client:
        running, waiting = post(client), post(client)
        follow(client, running, "in_progress")
        url = f"http://127.0.0.1:{port}/v1/videos/sync"
        sync = threading.Thread(target=lambda: answers.append(httpx.post(url, json=FIELDS, timeout=20)))
        sync.start()
        assert server.says("3 jobs came")
        server.process.send_signal(signal.SIGTERM)
        sync.join(20)
        assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "server_shutdown"
    assert server.ends() == 0
    with up(start(**settings), port) as client:
        assert follow(client, waiting, "completed", "failed")["status"] == "completed"
        assert follow(client, running, "failed")["error"]["code"] == "server_shutdown"
        assert len(client.get("/v1/videos").json()["data"]) == 2
    assert clips(tmp_path) == {waiting}


def test_an_engine_that_cannot_start_leaves_the_queue_alone(start: Start, port: int, tmp_path: Path) -> None:
    settings = {"host": "127.0.0.1", "port": port, "media_storage_path": str(tmp_path)}
    server = start(**settings, hold=True)
    with up(server, port) as client:
        follow(client, post(client), "in_progress")
        waiting = post(client)
        server.process.kill()
        server.ends()
    assert start(**settings, fault="no memory").ends() == 1
    with up(start(**settings), port) as client:
        assert follow(client, waiting, "completed", "failed")["status"] == "completed"


def test_the_second_server_in_one_folder_is_refused(start: Start, port: int, tmp_path: Path) -> None:
    first = start(host="127.0.0.1", port=port, media_storage_path=str(tmp_path))
    with up(first, port):
        second = start(host="127.0.0.1", port=0, media_storage_path=str(tmp_path))
        assert second.ends() == 2
        assert second.says(f"error: another server (process {first.process.pid}) keeps its videos in {tmp_path};")
        assert "engine starts" not in second.output
    first.process.kill()
    first.ends()
    third = start(host="127.0.0.1", port=port, media_storage_path=str(tmp_path))
    assert third.says("ScriptedPipeline")


def test_a_newer_index_is_refused(start: Start, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "jobs.sqlite3") as db:
        db.execute(f"PRAGMA application_id = {0x56414531}")
        db.execute("PRAGMA user_version = 2")
        db.execute("CREATE TABLE jobs (id)")
    db.close()
    server = start(host="127.0.0.1", port=0, media_storage_path=str(tmp_path))
    assert server.ends() == 2 and "engine starts" not in server.output
    assert server.says("has version 2 and this server reads version 1")


SMALL = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")


def can_mount(folder: Path) -> bool:
    if shutil.which("unshare") is None:
        return False
    return (
        subprocess.run([*SMALL, 'mount -t tmpfs -o size=1m tmpfs "$0"', str(folder)], capture_output=True).returncode
        == 0
    )


@pytest.fixture
def small_disk(start: Start, port: int, tmp_path: Path) -> Server:
    """A server whose folder has room for 2 MiB, in a mount that goes with the process."""
    if not can_mount(tmp_path):
        pytest.skip("this system lets no user mount a file system")
    mount = 'mount -t tmpfs -o size=2m tmpfs "$0" && exec "$@"'
    return start(*SMALL, mount, str(tmp_path), host="127.0.0.1", port=port, media_storage_path=str(tmp_path))


def test_a_full_disk_fails_the_job_and_the_next_is_right(small_disk: Server, port: int, tmp_path: Path) -> None:
    with up(small_disk, port) as client:
        folder = Path(f"/proc/{small_disk.process.pid}/root{tmp_path}")
        good = post(client)
        assert follow(client, good, "completed", "failed")["status"] == "completed"
        large = post(client, size="1024x768", num_frames=9)
        job = follow(client, large, "completed", "failed")
        assert (job["status"], job["error"]["code"]) == ("failed", "storage_full")
        assert clips(folder) == {good}
        after = post(client)
        assert follow(client, after, "completed", "failed")["status"] == "completed"
        assert clips(folder) == {good, after}
        spare = os.statvfs(folder)
        (folder / "theirs").write_bytes(b"x" * (spare.f_bavail * spare.f_bsize))
        refused = client.post("/v1/videos", json={"prompt": "x" * 30_000})
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "storage_full")
        assert len(client.get("/v1/videos").json()["data"]) == 3
        assert client.delete(f"/v1/videos/{after}").status_code == 200
        assert clips(folder) == {good}
        (folder / "theirs").unlink()
        assert follow(client, post(client), "completed", "failed")["status"] == "completed"
