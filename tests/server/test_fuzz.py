# SPDX-License-Identifier: Apache-2.0
"""Thousands of requests that no sane client sends: none is a fault of the server, none leaves anything behind."""

import contextlib
import gc
import json
import logging
import os
import re
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_omni_vae.config import ServerConfig
from vllm_omni_vae.server.app import create_app

from . import malformed
from .asgi import Answer, Application, Sent, running
from .scripted_engine import IMAGES, ScriptedEngine

# Answers that each kind must have met, so that not all of it ends at the first check.
MET = {
    "json": {200, 400, 415, 422, 499},
    "forms": {200, 400, 415, 422, 499},
    "pictures": {200, 400, 413, 499},
    "requests": {200, 404, 405, 422, 501},
    "downloads": {200, 206, 416},
    "noise": {400, 413, 415, 422, 499},
}
COUNTS = {"json": 500, "forms": 500, "pictures": 500, "requests": 500, "downloads": 100, "noise": 200}
ERROR_TYPES = {"invalid_request_error", "rate_limit_error", "server_error"}
LEAKS = re.compile(rb'Traceback|File \\?"/| object at 0x|/site-packages/|vllm_omni_vae/')
# Not there on purpose, and said so.
NOT_IMPLEMENTED = 501
MOST_BYTES = 256 * 1024
HEADER = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
TRACKED = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def test_there_are_enough() -> None:
    assert sum(COUNTS.values()) >= 2000


class Target:
    """A server of clips and one of images, with one finished clip, whose id is ``known``."""

    def __init__(self, clips: Application, images: Application, media: Path) -> None:
        self.media = media
        self.clips, self.images = clips, images
        self.statuses: Counter[int | None] = Counter()
        self.known = self.last = self.make()

    @property
    def sent(self) -> int:
        return self.clips.sent + self.images.sent

    def make(self) -> str:
        """Make a clip as a sane client does."""
        job = self.clips.ask("POST", "/v1/videos", {"prompt": "a cat"}).json()
        while job["status"] != "completed":
            assert job["status"] in ("queued", "in_progress"), job
            job = self.clips.ask("GET", f"/v1/videos/{job['id']}").json()
        return job["id"]

    def attack(self, request: Sent) -> None:
        """Send one request, with the id of a clip that there is in the place of KNOWN, and judge the answer."""
        app = self.images if request.target.startswith("/v1/images") else self.clips
        known = Sent(
            request.method,
            request.target.replace("KNOWN", self.known),
            request.headers,
            request.chunks,
            request.complete,
        )
        if known.method == "DELETE" and self.known in known.target:
            known = Sent(known.method, known.target.replace(self.known, "video_" + "0" * 32), known.headers)
        answer = app.send(known)
        self.statuses[answer.status] += 1
        judge(request, answer)

    def jobs(self) -> list[dict[str, Any]]:
        """Every job that can be asked for, newest first."""
        found: list[dict[str, Any]] = []
        while True:
            after = f"&after={found[-1]['id']}" if found else ""
            page = self.clips.ask("GET", f"/v1/videos?limit=100{after}").json()
            found += page["data"]
            if not page["has_more"]:
                return found


def judge(request: Sent, answer: Answer) -> None:
    if answer.status is None:
        assert not request.complete
        return
    assert answer.status < 500 or answer.status == NOT_IMPLEMENTED, (answer.status, answer.body[:500])
    for name, value in answer.headers:
        assert HEADER.fullmatch(name) and HEADER.fullmatch(value), (name, value)
    ids = [value for name, value in answer.headers if name.lower() == b"x-request-id"]
    assert len(ids) == 1 and TRACKED.fullmatch(ids[0])
    if answer.status >= 400 and answer.status != 499 and request.method != "HEAD":
        assert not LEAKS.search(answer.body), answer.body[:1000]
        error = json.loads(answer.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"] and len(error["message"]) <= 2003
        assert error["type"] in ERROR_TYPES and isinstance(error["code"], str)
        assert error["param"] is None or len(error["param"]) <= 2003


class Errors(logging.Handler):
    """What any logger says at ERROR or above: a traceback, mostly."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if not line.endswith(f"is answered {NOT_IMPLEMENTED}"):
            self.lines.append(line)


@pytest.fixture
def errors() -> Iterator[Errors]:
    handler = Errors()
    logging.getLogger().addHandler(handler)
    yield handler
    logging.getLogger().removeHandler(handler)


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: Errors) -> Iterator[Target]:
    """Two servers; after the test nothing is left of what was sent to them but the clips that they made."""
    media, images, temporary = (tmp_path / name for name in ("media", "images", "temporary"))
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    limits = {"max_upload_bytes": MOST_BYTES, "max_pixels": 64 * 64, "max_frames": 9, "max_queued_jobs": 5000}
    made = [
        create_app(engine, ServerConfig(media_storage_path=str(folder), **limits), model_name="m")  # type: ignore[arg-type]
        for engine, folder in ((ScriptedEngine(), media), (ScriptedEngine(card=IMAGES), images))
    ]
    with running(made[0]) as clips, running(made[1]) as pictures:
        files = open_files()
        target = Target(clips, pictures, media)
        yield target
        gc.collect()
        assert open_files() == files
    assert list(temporary.iterdir()) == []
    assert sorted(path.name for path in images.iterdir()) == ["jobs.lock", "jobs.sqlite3"]
    with contextlib.closing(sqlite3.connect(media / "jobs.sqlite3")) as index:
        assert index.execute("SELECT id, status FROM jobs").fetchall() == [(target.last, "completed")]
        assert index.execute("SELECT count(*) FROM images").fetchall() == [(0,)]
    assert errors.lines == []


def open_files() -> int:
    """Regular files that this process has open."""
    paths = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum(path.is_file() for path in paths)


def send_many(kind: str, requests: st.SearchStrategy[Sent], target: Target) -> None:
    """Send the requests of one kind, and look at what is left."""
    before = target.sent

    @settings(
        max_examples=COUNTS[kind],
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(requests)
    def attack(request: Sent) -> None:
        target.attack(request)

    attack()
    assert target.sent - before >= COUNTS[kind]
    assert MET[kind] <= set(target.statuses), target.statuses
    assert target.clips.ask("GET", "/health").status == 200
    assert target.images.ask("GET", "/health").status == 200
    settled(target)


def settled(target: Target) -> None:
    """Both servers still work, and there are the files and rows of the jobs that were completed, and no others."""
    assert target.images.ask("POST", "/v1/images/generations", {"prompt": "a cat"}).status == 200
    last = target.last = target.make()
    jobs = target.jobs()
    while any(job["status"] in ("queued", "in_progress") for job in jobs):
        jobs = target.jobs()
    assert {job["status"] for job in jobs} == {"completed"}
    completed = {job["id"] for job in jobs}
    assert {target.known, last} <= completed
    assert {path.name for path in target.media.iterdir() if path.is_dir()} == completed
    assert target.clips.ask("GET", f"/v1/videos/{last}/content").status == 200
    for identity in completed - {last}:
        assert target.clips.ask("DELETE", f"/v1/videos/{identity}").status == 200
    assert [path.name for path in target.media.iterdir() if path.is_dir()] == [last]


KINDS: dict[str, Callable[[], st.SearchStrategy[Sent]]] = {
    "json": lambda: malformed.json_bodies(malformed.VIDEO_BODIES + malformed.IMAGE_BODIES),
    "forms": lambda: malformed.forms(malformed.VIDEO_BODIES + malformed.IMAGE_BODIES),
    "pictures": lambda: malformed.pictures(malformed.VIDEO_BODIES + malformed.IMAGE_BODIES),
    "requests": malformed.requests,
    "downloads": malformed.downloads,
    "noise": lambda: malformed.noise(malformed.VIDEO_BODIES + malformed.IMAGE_BODIES),
}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_breaks(kind: str, target: Target) -> None:
    send_many(kind, KINDS[kind](), target)
