# SPDX-License-Identifier: Apache-2.0
"""How much room videos may take, and what happens when there is none left."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from vllm_omni_vae.server import runner
from vllm_omni_vae.server.index import JobIndex
from vllm_omni_vae.server.storage import MediaFolder, is_full

from .conftest import Serve
from .scripted_engine import ScriptedEngine
from .test_videos import create, error_of


def test_at_the_limit_new_videos_are_refused_and_old_ones_stay(serve: Serve) -> None:
    server = serve(media_max_bytes=1)
    first = create(server)
    server.wait_for(first, "completed")
    for path in ("/v1/videos", "/v1/videos/sync", f"/v1/videos/{first}/remix"):
        answer = server.http.post(path, json={"prompt": "a cat"})
        assert error_of(answer) == (507, None, "storage_full")
        assert " and 1 are all they may" in answer.json()["error"]["message"]
        assert answer.headers["x-should-retry"] == "false"
    assert len(server.engine.requests) == 1
    assert server.http.get(f"/v1/videos/{first}/content").status_code == 200
    used = sum(path.stat().st_size for path in (server.media / first).iterdir())

    server.stop()
    server = serve(engine=ScriptedEngine(), media_max_bytes=used)
    assert f"take {used} bytes" in server.http.post("/v1/videos", json={"prompt": "a cat"}).text
    server.stop()
    server = serve(engine=ScriptedEngine(), media_max_bytes=used + 1)
    second = create(server)
    server.wait_for(second, "completed")
    assert error_of(server.http.post("/v1/videos", json={"prompt": "a cat"}))[2] == "storage_full"
    server.http.delete(f"/v1/videos/{first}")
    server.wait_for(create(server), "completed")


def test_what_was_accepted_below_the_limit_is_finished(serve: Serve) -> None:
    server = serve(media_max_bytes=1)
    server.engine.may_finish.clear()
    jobs = [create(server) for _ in range(3)]
    server.engine.may_finish.set()
    assert [server.wait_for(each, "completed", "failed")["status"] for each in jobs] == ["completed"] * 3


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_fails_one_job(serve: Serve, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    server = serve()
    with monkeypatch.context() as patched:

        def full(*args: Any, folder: Path, **more: Any) -> None:
            raise OSError(number, os.strerror(number))

        patched.setattr(runner, "export_clip", full)
        job = server.wait_for(create(server), "failed", "completed")
        assert (job["status"], job["error"]["code"]) == ("failed", "storage_full")
        answer = server.http.post("/v1/videos/sync", json={"prompt": "a cat"})
        assert error_of(answer) == (507, None, "storage_full")
    assert server.clips() == []
    server.wait_for(create(server), "completed")


def test_a_video_whose_row_cannot_be_written_fails(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    with monkeypatch.context() as patched:
        settle = MediaFolder.settle

        def full(self: MediaFolder, identity: str) -> int:
            settle(self, identity)
            raise OSError(errno.ENOSPC, "full")

        patched.setattr(MediaFolder, "settle", full)
        job = server.wait_for(create(server), "failed", "completed")
        assert (job["status"], job["error"]["code"]) == ("failed", "storage_full")
    while server.clips():
        pass
    server.wait_for(create(server), "completed")


def test_a_job_that_cannot_be_kept_is_not_accepted(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    add = JobIndex.add

    def full(self: JobIndex, record: Any, images: Any) -> Any:
        def none() -> Any:
            raise OSError(errno.ENOSPC, "full")

        return add(self, record, none)

    with monkeypatch.context() as patched:
        patched.setattr(JobIndex, "add", full)
        assert error_of(server.http.post("/v1/videos", json={"prompt": "a cat"})) == (507, None, "storage_full")
    assert server.http.get("/v1/videos").json()["data"] == [] and server.engine.requests == []
    server.wait_for(create(server), "completed")


def test_what_is_full() -> None:
    assert is_full(OSError(errno.ENOSPC, "x")) and is_full(OSError(errno.EFBIG, "x"))
    assert not is_full(OSError(errno.EACCES, "x")) and not is_full(ValueError())
