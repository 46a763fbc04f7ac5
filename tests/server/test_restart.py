# SPDX-License-Identifier: Apache-2.0
"""One server after another in one folder: what each finds of the one before it."""

import asyncio
import dataclasses
import errno
import shutil
import sqlite3
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from vllm_omni_vae.engine.api import Health
from vllm_omni_vae.errors import ConfigurationError, EngineError
from vllm_omni_vae.pipelines.request import Stage
from vllm_omni_vae.server.index import JobIndex
from vllm_omni_vae.server.job import Job
from vllm_omni_vae.server.jobs import JobStore
from vllm_omni_vae.server.media import Variant

from .conftest import MODEL, Running, Serve
from .scripted_engine import CARD, ScriptedEngine
from .test_jobs import ERROR, OUTCOME, REQUEST, TTL, Clock, complete, create
from .test_videos import create as post
from .test_videos import error_of


def opened(folder: Path, clock: Clock | None = None) -> JobStore:
    store = JobStore(str(folder), TTL, clock=clock or Clock())
    store.open()
    return store


def kill(store: JobStore) -> None:
    """End a store as SIGKILL does once its writes are through: nothing is tidied up."""
    assert store._index is not None
    store._index.close()
    store._media.close()


def get(store: JobStore, job: Job) -> Job:
    found = store.get(job.id)
    assert found is not None
    return found


def test_every_state_comes_back(tmp_path: Path) -> None:
    clock = Clock()
    store = opened(tmp_path, clock)
    queued, running, completed, failed, deleted, expired = (create(store) for _ in range(6))
    complete(store, expired)
    clock.now += TTL
    assert store.expire() == [expired]
    store.start(running)
    store.advance(running, Stage.DENOISE, 1, 2)
    complete(store, completed)
    store.fail(failed, ERROR)
    store.delete(deleted.id)
    known = {job.id: job.to_json() for job in (queued, completed, failed)}
    progress = running.progress
    kill(store)

    clock.now += 3
    store = opened(tmp_path, clock)
    assert {job.id: get(store, job).to_json() for job in (queued, completed, failed)} == known
    wire = get(store, running).to_json()
    assert (wire["status"], wire["error"]["code"], wire["progress"]) == ("failed", "server_restarted", progress)
    assert wire["completed_at"] == clock.now
    assert (store.gone(deleted.id), store.gone(expired.id)) == ("deleted", "expired")
    page = store.page(after=deleted.id, limit=9, order="desc")
    assert page is not None and [job.id for job in page.jobs] == [failed.id, completed.id, running.id, queued.id]
    assert [(job.id, request) for job, request in store.take_waiting()] == [(queued.id, REQUEST)]
    assert store.take_waiting() == []
    later = create(store)
    page = store.page(after=None, limit=1, order="desc")
    assert page is not None and page.jobs == [later]
    clock.now += TTL - 3
    assert {job.id for job in store.expire()} == {completed.id, failed.id}
    kill(store)
    store = opened(tmp_path, clock)
    assert [store.gone(job.id) for job in (completed, failed, deleted)] == ["expired", "expired", "deleted"]
    assert get(store, running).to_json() == wire
    store.close()


def test_what_was_never_finished_and_what_is_gone_leaves_no_file(tmp_path: Path) -> None:
    store = opened(tmp_path)
    done, half, lost, deleted = (create(store) for _ in range(4))
    for job in (done, deleted):
        complete(store, job)
    half.folder.with_name(half.id + ".part").mkdir()
    # The files were there and the row was not written yet; the row is gone and the files are there still.
    shutil.copytree(done.folder, lost.folder)
    store.delete(deleted.id)
    theirs = [tmp_path / name for name in ("holiday", "video_1", "video_" + "0" * 31, "video_" + "g" * 32)]
    for folder in theirs:
        folder.mkdir()
    (tmp_path / ("video_" + "0" * 32)).touch()
    kill(store)
    opened(tmp_path).close()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {done.id, "jobs.lock", "jobs.sqlite3", "video_" + "0" * 32, *(folder.name for folder in theirs)}


@pytest.mark.parametrize("variant", Variant)
def test_a_video_without_its_files_has_failed(tmp_path: Path, variant: Variant) -> None:
    store = opened(tmp_path)
    job = create(store)
    complete(store, job)
    job.path(variant).unlink()
    kill(store)
    for _ in range(2):
        store = opened(tmp_path)
        wire = get(store, job).to_json()
        assert (wire["status"], wire["error"]["code"], wire["expires_at"]) == ("failed", "files_missing", None)
        assert not job.folder.exists()
        store.close()


def test_a_job_is_on_disk_before_it_is_acknowledged(tmp_path: Path) -> None:
    store = opened(tmp_path)
    job = create(store)
    found = opened(shutil.copytree(tmp_path, tmp_path / "copy"))
    assert get(found, job).to_json() == job.to_json()
    found.close()
    store.close()


def test_a_completed_job_is_on_disk_before_it_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    job = create(store)
    monkeypatch.setattr(store, "_notify", lambda job: seen.append(shutil.copytree(tmp_path, tmp_path / "copy")))
    seen: list[Path] = []
    (folder := job.folder).mkdir()
    for variant in Variant:
        (folder / variant.filename).write_bytes(b"x")
    asyncio.run(store.complete(job, OUTCOME))
    found = opened(seen[0])
    assert get(found, job).to_json() == job.to_json()
    found.close()
    store.close()


def test_two_servers_cannot_have_one_folder(tmp_path: Path) -> None:
    first = opened(tmp_path)
    with pytest.raises(
        ConfigurationError, match=r"another server \(process \d+\) keeps its videos in .*--media-storage"
    ):
        opened(tmp_path)
    create(first)
    first.open()
    first.close()
    opened(tmp_path).close()


def test_videos_that_lost_their_index_are_not_removed(tmp_path: Path) -> None:
    store = opened(tmp_path)
    job = create(store)
    complete(store, job)
    store.close()
    (tmp_path / "jobs.sqlite3").unlink()
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"has 1 videos but not the jobs\.sqlite3 .*--media-storage-path"):
            opened(tmp_path)
    assert job.path(Variant.VIDEO).exists()


@pytest.mark.parametrize("column", ["request", "status", "error", "outcome"])
def test_a_row_that_cannot_be_read_ends_the_start(tmp_path: Path, column: str) -> None:
    store = opened(tmp_path)
    create(store)
    store.close()
    with sqlite3.connect(tmp_path / "jobs.sqlite3") as db:
        db.execute(f"UPDATE jobs SET {column} = '[odd'")
    db.close()
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"cannot read a job in .*--media-storage-path"):
            opened(tmp_path)


def test_an_index_that_cannot_be_written_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(tmp_path).close()

    def full(self: JobIndex) -> Future[None]:
        failed: Future[None] = Future()
        failed.set_exception(OSError(errno.ENOSPC, "database or disk is full"))
        return failed

    with monkeypatch.context() as patched:
        patched.setattr(JobIndex, "flush", full)
        with pytest.raises(ConfigurationError, match=r"cannot write to .*disk is full; make room"):
            opened(tmp_path)
    opened(tmp_path).close()


def test_what_a_client_waits_for_is_not_kept(tmp_path: Path) -> None:
    store = opened(tmp_path)
    job = create(store, kept=False)
    assert not store.outlives(job) and store.outlives(create(store))
    kill(store)
    found = opened(tmp_path)
    assert found.get(job.id) is None and len(found.take_waiting()) == 1
    found.close()


def again(serve: Serve, server: Running, **settings: Any) -> Running:
    server.stop()
    return serve(engine=ScriptedEngine(), **settings)


def test_a_video_is_served_by_the_next_server(serve: Serve, png: bytes) -> None:
    server = serve()
    data = {"prompt": "a cat", "seed": "5"}
    done = server.http.post("/v1/videos", data=data, files={"input_reference": png}).json()["id"]
    server.wait_for(done, "completed")
    deleted = post(server)
    server.wait_for(deleted, "completed")
    server.http.delete(f"/v1/videos/{deleted}")
    known = server.http.get(f"/v1/videos/{done}").json()
    files = {variant: server.http.get(f"/v1/videos/{done}/content?variant={variant}").content for variant in Variant}

    server = again(serve, server)
    assert server.http.get("/v1/videos").json()["data"] == [known]
    for variant, content in files.items():
        assert server.http.get(f"/v1/videos/{done}/content?variant={variant}").content == content
    part = server.http.get(f"/v1/videos/{done}/content", headers={"Range": "bytes=3-9"})
    assert (part.status_code, part.content) == (206, files[Variant.VIDEO][3:10])
    assert error_of(server.http.get(f"/v1/videos/{deleted}/content")) == (410, "video_id", "video_deleted")
    assert error_of(server.http.get(f"/v1/videos/{deleted}"))[0] == 404
    assert '"status": "completed"' in server.http.get(f"/v1/videos/{done}/events").text
    remix = server.http.post(f"/v1/videos/{done}/remix", json={"prompt": "a dog"}).json()
    assert server.wait_for(remix["id"], "completed")["remixed_from_video_id"] == done
    (request,) = server.engine.requests
    assert (request.prompt, request.seed, request.images[0].shape) == ("a dog", 5, (48, 64, 3))

    server = again(serve, server)
    assert server.http.delete(f"/v1/videos/{done}").json()["deleted"] is True
    server = again(serve, server)
    assert [job["id"] for job in server.http.get("/v1/videos").json()["data"]] == [remix["id"]]
    assert [path.name for path in server.clips()] == [remix["id"]]


def test_a_shorter_ttl_holds_for_old_videos_too(serve: Serve) -> None:
    server = serve()
    done = post(server)
    expires = server.wait_for(done, "completed")["expires_at"]
    server = again(serve, server, media_ttl=80_000)
    assert server.http.get(f"/v1/videos/{done}").json()["expires_at"] == expires - 6400
    server = again(serve, server, media_ttl=0.001)
    assert error_of(server.http.get(f"/v1/videos/{done}/content")) == (410, "video_id", "video_expired")
    assert server.clips() == []


def test_what_waits_runs_first_on_the_next_server(serve: Serve, png: bytes) -> None:
    server = serve()
    server.engine.may_finish.clear()
    running = post(server)
    server.wait_for(running, "in_progress")
    data = {"prompt": "a cat", "seed": "5", "fps": "8", "extra_params": '{"shift": 1.5}'}
    waiting = [
        server.http.post("/v1/videos", data=data, files={"input_reference": png}).json()["id"],
        post(server, prompt="a dog", guidance_scale=3),
    ]
    asked = server.engine.requests[1:]
    engine = ScriptedEngine()
    engine.may_start.clear()
    server.stop()
    server = serve(engine=engine, ready=False)
    assert [job["status"] for job in server.http.get("/v1/videos?order=asc").json()["data"]][1:] == ["queued"] * 2
    engine.may_start.set()
    while server.http.get("/health").status_code != 200:
        pass
    new = post(server)
    jobs = [server.wait_for(identity, "completed", "failed") for identity in (*waiting, new)]
    assert [job["status"] for job in jobs] == ["completed"] * 3
    assert [request.prompt for request in engine.requests] == ["a cat", "a dog", "a cat"]
    for found, request in zip(engine.requests, asked, strict=False):
        assert dataclasses.replace(found, images=()) == dataclasses.replace(request, images=())
        assert [image.tolist() for image in found.images] == [image.tolist() for image in request.images]


def test_a_waiting_job_can_be_deleted_before_the_model_is_loaded(serve: Serve) -> None:
    server = serve()
    server.engine.may_finish.clear()
    server.wait_for(post(server), "in_progress")
    waiting = [post(server) for _ in range(2)]
    engine = ScriptedEngine()
    engine.may_start.clear()
    server.stop()
    server = serve(engine=engine, ready=False)
    assert server.http.delete(f"/v1/videos/{waiting[0]}").status_code == 200
    engine.may_start.set()
    server.wait_for(waiting[1], "completed")
    assert len(engine.requests) == 1


@pytest.mark.parametrize(
    ("card", "settings", "code"),
    [
        (dataclasses.replace(CARD, pipeline_class="OtherPipeline"), {}, "model_changed"),
        (CARD, {"served_model_name": ("other",)}, "model_changed"),
        (dataclasses.replace(CARD, spatial_multiple=32), {}, "unsupported_size"),
    ],
)
def test_another_model_does_not_run_what_waited(serve: Serve, card: Any, settings: dict[str, Any], code: str) -> None:
    server = serve()
    server.engine.may_finish.clear()
    server.wait_for(post(server), "in_progress")
    waiting = post(server)
    server.stop()
    server = serve(engine=ScriptedEngine(card=card), **settings)
    job = server.wait_for(waiting, "failed", "completed")
    assert (job["status"], job["error"]["code"]) == ("failed", code)
    if code == "model_changed":
        assert MODEL in job["error"]["message"] and CARD.pipeline_class in job["error"]["message"]
    assert server.engine.requests == []


def test_what_waits_survives_an_engine_that_gives_up(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    server.engine.may_finish.clear()
    server.wait_for(post(server), "in_progress")
    waiting = post(server)
    runner_fails = EngineError("rank 1 died again", code="worker_died")
    server.engine.state = Health(False, "rank 1 died again")
    item = server.engine._items.get()
    assert item is not None
    item.future.set_exception(runner_fails)
    server = again(serve, server)
    assert server.wait_for(waiting, "completed", "failed")["status"] == "completed"


def test_a_job_that_the_engine_refuses_alone_fails(serve: Serve) -> None:
    server = serve()
    server.engine.may_finish.clear()
    server.wait_for(post(server), "in_progress")
    waiting = post(server)
    item = server.engine._items.get()
    assert item is not None
    item.future.set_exception(EngineError("the request cannot be sent", code="invalid_request"))
    assert server.wait_for(waiting, "failed")["error"]["code"] == "invalid_request"
    server.engine.may_finish.set()


def test_a_full_queue_of_an_earlier_server_runs_and_takes_no_more(serve: Serve) -> None:
    server = serve()
    server.engine.may_finish.clear()
    server.wait_for(post(server), "in_progress")
    waiting = [post(server) for _ in range(3)]
    engine = ScriptedEngine()
    engine.may_finish.clear()
    server.stop()
    server = serve(engine=engine, max_queued_jobs=1)
    server.wait_for(waiting[0], "in_progress")
    assert error_of(server.http.post("/v1/videos", json={"prompt": "a cat"}))[2] == "queue_full"
    engine.may_finish.set()
    assert [server.wait_for(each, "completed")["status"] for each in waiting] == ["completed"] * 3
