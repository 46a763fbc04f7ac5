# SPDX-License-Identifier: Apache-2.0
"""Images under way: streams, a full queue, time limits, the end of the server, and clients that go away."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from vllm_omni_vae.errors import RankError
from vllm_omni_vae.pipelines.request import GenerationRequest, Medium
from vllm_omni_vae.server import app
from vllm_omni_vae.server.image_answers import image_events
from vllm_omni_vae.server.job import JobError, Outcome
from vllm_omni_vae.server.jobs import JobStore
from vllm_omni_vae.server.pictures import Encoding

from .conftest import Running, Serve
from .scripted_engine import IMAGES, ScriptedEngine
from .test_images import GENERATIONS, edit, generate
from .test_videos import error_of


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(card=IMAGES)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> list[JobStore]:
    """The store of the server that is started next."""
    stores: list[JobStore] = []

    def make(*args: Any, **more: Any) -> JobStore:
        stores.append(JobStore(*args, **more))
        return stores[-1]

    monkeypatch.setattr(app, "JobStore", make)
    return stores


def forgets(store: list[JobStore]) -> None:
    """Wait until the server has no job any more: a stream's goes after its last event."""
    while store[0]._jobs:
        pass


def stream(server: Running, **fields: Any) -> httpx.Response:
    return generate(server, stream=True, **fields)


def events_of(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        yield name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def test_a_stream_has_an_event_for_each_image(serve: Serve, store: list[JobStore], png: bytes) -> None:
    server = serve()
    plain = generate(server, n=3, seed=5).json()
    answer = stream(server, n=3, seed=5, partial_images=2)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache" and answer.headers["x-request-id"].startswith("image_")
    events = list(events_of(answer.text))
    assert [name for name, _ in events] == ["image_generation.completed"] * 3
    for (name, data), item in zip(events, plain["data"], strict=True):
        assert data.pop("created_at") >= plain["created"]
        assert data == {
            "type": name,
            "b64_json": item["b64_json"],
            "seed": item["seed"],
            "size": "64x48",
            "output_format": "png",
            "background": "opaque",
            "quality": "auto",
            "usage": plain["usage"],
        }
    edits = list(events_of(edit(server, ("image", png), stream="true").text))
    assert [(name, data["type"]) for name, data in edits] == [("image_edit.completed", "image_edit.completed")]
    forgets(store)
    assert not server.clips()


def test_what_is_refused_at_once_is_no_stream(serve: Serve) -> None:
    server = serve()
    assert error_of(stream(server, n=0)) == (422, "n", "invalid_value")
    assert server.engine.requests == []


def test_a_failure_in_a_stream_is_an_event(serve: Serve, store: list[JobStore]) -> None:
    server = serve()
    server.engine.fault = RankError(1, "MemoryError: no")
    answer = stream(server)
    assert answer.status_code == 200
    ((name, data),) = events_of(answer.text)
    assert (name, data["type"]) == ("error", "error")
    assert data["error"] == {
        "message": "rank 1 failed: MemoryError: no",
        "type": "server_error",
        "param": None,
        "code": "rank_failed",
    }
    forgets(store)
    assert stream(server).text.startswith("event: image_generation.completed\n")


def test_a_full_queue_is_429(serve: Serve, store: list[JobStore]) -> None:
    server = serve(max_queued_jobs=1)
    server.engine.may_finish.clear()
    answers: list[httpx.Response] = []
    waiting = [threading.Thread(target=lambda ask=ask: answers.append(ask(server))) for ask in (generate, stream)]
    for thread in waiting:
        thread.start()
    while len(server.engine.requests) < 2:
        pass
    for ask in (generate, stream):
        answer = ask(server)
        assert error_of(answer) == (429, None, "queue_full") and int(answer.headers["retry-after"]) > 0
    assert server.http.get("/v1/videos").json()["data"] == []
    (first, second) = store[0]._jobs
    for identity in (first, second):
        assert error_of(server.http.get(f"/v1/videos/{identity}")) == (404, "video_id", "video_not_found")
        assert error_of(server.http.delete(f"/v1/videos/{identity}")) == (404, "video_id", "video_not_found")
        assert error_of(server.http.get(f"/v1/videos/{identity}/content")) == (404, "video_id", "video_not_found")
        assert error_of(server.http.get(f"/v1/videos?after={identity}"))[:2] == (404, "after")
    server.engine.may_finish.set()
    for thread in waiting:
        thread.join(10)
    assert [answer.status_code for answer in answers] == [200, 200]
    forgets(store)
    assert store[0].gone(first) is store[0].gone(second) is None


def test_a_job_that_takes_too_long_fails(serve: Serve) -> None:
    server = serve(job_timeout=0.2)
    server.engine.may_finish.clear()
    assert error_of(generate(server)) == (504, None, "timeout")
    ((name, data),) = events_of(stream(server).text)
    assert (name, data["error"]["code"]) == ("error", "timeout")
    server.engine.may_finish.set()
    assert generate(server).status_code == 200


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_goes_away_cancels_its_job(serve: Serve, store: list[JobStore], streams: bool) -> None:
    server = serve()
    server.engine.may_finish.clear()
    body = {"prompt": "a cat", "stream": streams}
    with httpx.Client(base_url=server.url) as client, pytest.raises(httpx.ReadTimeout):
        client.post(GENERATIONS, json=body, timeout=httpx.Timeout(5, read=0.3))
    forgets(store)
    assert len(server.engine.cancels) == 1
    server.engine.may_finish.set()
    assert generate(server).status_code == 200


def test_a_client_that_goes_away_from_the_queue(serve: Serve, store: list[JobStore]) -> None:
    server = serve()
    server.engine.may_finish.clear()
    answers: list[httpx.Response] = []
    running = threading.Thread(target=lambda: answers.append(generate(server)))
    running.start()
    assert server.engine.running.wait(5)
    body = {"prompt": "a cat", "stream": True}
    with httpx.Client(base_url=server.url) as client, pytest.raises(httpx.ReadTimeout):
        client.post(GENERATIONS, json=body, timeout=httpx.Timeout(5, read=0.3))
    while len(server.engine.cancels) < 1:
        pass
    server.engine.may_finish.set()
    running.join(10)
    assert answers[0].status_code == 200
    forgets(store)


def test_two_bad_requests_beside_a_good_one(serve: Serve, png: bytes) -> None:
    server = serve()
    alone = generate(server, seed=1).json()["data"]
    server.engine.may_finish.clear()
    answers: list[httpx.Response] = []
    good = threading.Thread(target=lambda: answers.append(generate(server, seed=1)))
    good.start()
    assert server.engine.running.wait(5)
    assert generate(server, width=50).status_code == 422
    assert edit(server, ("image", png[:40])).status_code == 400
    server.engine.may_finish.set()
    good.join(10)
    assert answers[0].json()["data"] == alone


def test_a_body_above_the_limit(serve: Serve, png: bytes) -> None:
    server = serve(max_upload_bytes=1024)
    answer = edit(server, ("image", png + b"x" * 2048))
    assert error_of(answer) == (413, None, "body_too_large") and server.engine.requests == []


class _Runner:
    """Waits as `JobRunner` does."""

    async def wait(self, job: Any) -> None:
        while job.live:
            await job.changed.wait()


def test_comments_keep_a_stream_open_until_the_job_is_over(tmp_path: Path) -> None:
    async def follow(fails: bool) -> list[str]:
        store = JobStore(str(tmp_path), 10)
        request = GenerationRequest(prompt="a cat", medium=Medium.IMAGE, width=64, height=48, seed=3)
        job = await store.create(request, model="m", encoding=Encoding())
        events = image_events(job, _Runner(), kind="image_edit", quality="max", keep_alive=0.01)  # type: ignore[arg-type]
        seen = [await anext(events)]
        if fails:
            store.fail(job, JobError("server_shutdown", "the server was shut down", 503))
        else:
            await store.complete(
                job, Outcome(stage_durations={}, inference_s=0, peak_memory_mb=(), vae=(), pictures=(b"x",))
            )
        return seen + [event async for event in events]

    comment, event = asyncio.run(follow(False))
    assert comment == ": keep-alive\n\n" and event.startswith("event: image_edit.completed\ndata: ")
    ((_, data),) = events_of(event)
    assert (data["b64_json"], data["quality"], data["seed"]) == ("eA==", "max", 3)
    comment, event = asyncio.run(follow(True))
    ((name, data),) = events_of(event)
    assert name == "error" and data["error"]["code"] == "server_shutdown"
