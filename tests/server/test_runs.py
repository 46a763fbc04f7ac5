# SPDX-License-Identifier: Apache-2.0
"""Jobs under way: deletion, time limits, a full queue, events, and clients that wait or go away."""

import dataclasses
import io
import json
import threading
from typing import Any

import av
import httpx
import pytest

from vllm_omni_vae.config import DiffusionParallelConfig
from vllm_omni_vae.errors import EngineError, RequestError
from vllm_omni_vae.server import runner

from .conftest import Running, Serve
from .scripted_engine import ScriptedEngine
from .test_videos import create, error_of


def sync(server: Running, **fields: Any) -> httpx.Response:
    return server.http.post("/v1/videos/sync", json={"prompt": "a cat", **fields})


def gone(server: Running) -> bool:
    return server.http.get("/v1/videos").json()["data"] == [] and not server.clips()


def test_deleting_a_running_job_stops_the_engine(serve: Serve) -> None:
    server = serve()
    server.engine.may_finish.clear()
    running = create(server)
    server.wait_for(running, "in_progress")
    assert server.engine.running.wait(5)
    assert server.http.delete(f"/v1/videos/{running}").json()["deleted"] is True
    assert server.engine.cancels == [running] and not server.engine.running.is_set()
    assert gone(server)


def test_deleting_a_waiting_job(serve: Serve) -> None:
    server = serve()
    server.engine.may_finish.clear()
    running, waiting = create(server), create(server)
    server.wait_for(running, "in_progress")
    thread = threading.Thread(target=server.http.delete, args=(f"/v1/videos/{waiting}",))
    thread.start()
    while server.http.get(f"/v1/videos/{waiting}").status_code == 200:
        pass
    server.engine.may_finish.set()
    thread.join(10)
    assert server.wait_for(running, "completed")["status"] == "completed"
    assert [path.name for path in server.clips()] == [running]


def test_deleting_while_the_files_are_written(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    writing, go_on = threading.Event(), threading.Event()
    export = runner.export_clip

    def slow(*args: Any, on_frame: Any, **more: Any) -> None:
        def pause(done: int, total: int) -> None:
            writing.set()
            assert go_on.wait(10)
            on_frame(done, total)

        export(*args, on_frame=pause, **more)

    monkeypatch.setattr(runner, "export_clip", slow)
    identity = create(server)
    assert writing.wait(10)
    assert server.http.get("/health").status_code == 200
    assert [path.name for path in server.clips()] == [f"{identity}.part"]
    deletion = threading.Thread(target=server.http.delete, args=(f"/v1/videos/{identity}",))
    deletion.start()
    while server.http.get(f"/v1/videos/{identity}").status_code == 200:
        pass
    go_on.set()
    deletion.join(10)
    assert gone(server)


def test_finish_and_delete_racing(serve: Serve) -> None:
    server = serve()
    for _ in range(12):
        identity = create(server, num_inference_steps=1)
        assert server.http.delete(f"/v1/videos/{identity}").status_code == 200
        assert server.http.get(f"/v1/videos/{identity}").status_code == 404
        assert gone(server)


def test_a_job_that_takes_too_long_fails(serve: Serve) -> None:
    server = serve(job_timeout=0.2)
    server.engine.may_finish.clear()
    job = server.wait_for(create(server), "failed")
    assert job["error"] == {"code": "timeout", "message": "the job ran longer than 0.2 s, the most that one may"}
    server.engine.may_finish.set()
    assert server.wait_for(create(server), "completed")["status"] == "completed"
    assert len(server.engine.cancels) == 1


def test_waiting_does_not_count_as_running(serve: Serve) -> None:
    server = serve(job_timeout=5)
    server.engine.may_finish.clear()
    first, second = create(server), create(server)
    server.wait_for(first, "in_progress")
    server.engine.may_finish.set()
    assert server.wait_for(second, "completed")["error"] is None


def test_a_full_queue_is_429(serve: Serve) -> None:
    server = serve(max_queued_jobs=2)
    server.engine.may_finish.clear()
    jobs = [create(server) for _ in range(3)]
    for path in ("/v1/videos", "/v1/videos/sync"):
        answer = server.http.post(path, json={"prompt": "a cat"})
        assert error_of(answer) == (429, None, "queue_full")
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert 0 < int(answer.headers["retry-after"]) <= 60
    assert len(server.http.get("/v1/videos").json()["data"]) == 3
    server.wait_for(jobs[0], "in_progress")
    server.http.delete(f"/v1/videos/{jobs[0]}")
    create(server)
    server.engine.may_finish.set()


def test_as_many_may_wait_as_the_limit_says_besides_one_on_each_replica(serve: Serve, engine: ScriptedEngine) -> None:
    engine.config = dataclasses.replace(engine.config, parallel=DiffusionParallelConfig(data_parallel_size=2))
    server = serve(max_queued_jobs=1)
    engine.may_finish.clear()
    jobs = [create(server) for _ in range(3)]
    assert error_of(server.http.post("/v1/videos", json={"prompt": "a cat"}))[0] == 429
    engine.may_finish.set()
    for identity in jobs:
        server.wait_for(identity, "completed")


def test_events_tell_the_whole_way(serve: Serve, png: bytes) -> None:
    server = serve()
    server.engine.may_finish.clear()
    data = {"prompt": "a cat", "num_inference_steps": "8"}
    identity = server.http.post("/v1/videos", data=data, files={"input_reference": png}).json()["id"]
    server.wait_for(identity, "in_progress")
    seen = []
    with server.http.stream("GET", f"/v1/videos/{identity}/events") as events:
        assert events.headers["content-type"].startswith("text/event-stream")
        lines = events.iter_lines()
        for line in lines:
            name = line.removeprefix("event: ")
            body = json.loads(next(lines).removeprefix("data: "))
            assert next(lines) == ""
            seen.append((name, body))
            server.engine.may_finish.set()
    assert seen[0][0] == "status" and seen[0][1]["status"] == "in_progress"
    assert seen[-1] == (
        "status",
        {"id": identity, "status": "completed", "stage": "export", "progress": 100, "error": None},
    )
    assert all(name == "progress" for name, _ in seen[1:-1])
    progress = [body["progress"] for _, body in seen]
    assert progress == sorted(progress) and progress[-2] < 100
    stages = [body["stage"] for _, body in seen]
    assert {"denoise", "export"} <= set(stages)


def test_events_of_a_deleted_job_end(serve: Serve) -> None:
    server = serve()
    server.engine.may_finish.clear()
    identity = create(server)
    with server.http.stream("GET", f"/v1/videos/{identity}/events") as events:
        lines = events.iter_lines()
        assert next(lines) == "event: status"
        server.http.delete(f"/v1/videos/{identity}")
        rest = list(lines)
    assert rest[-3] == "event: deleted"


def test_events_of_a_finished_job_are_one(serve: Serve) -> None:
    server = serve()
    server.engine.fault = EngineError("rank 1 died", code="worker_died")
    identity = create(server)
    server.wait_for(identity, "failed")
    text = server.http.get(f"/v1/videos/{identity}/events").text
    assert text.count("event: ") == 1
    assert json.loads(text.splitlines()[1].removeprefix("data: "))["error"]["code"] == "worker_died"


def test_sync_returns_the_video_and_keeps_nothing(serve: Serve) -> None:
    server = serve(served_model_name=("one", "häuser 猫"))
    answer = sync(server, model="häuser 猫", num_frames=9)
    assert answer.status_code == 200 and answer.headers["content-type"] == "video/mp4"
    with av.open(io.BytesIO(answer.content)) as container:
        assert container.streams.video[0].frames == 9
    assert answer.headers["x-request-id"].startswith("video_")
    assert answer.headers["x-model"] == "h?user ?"
    assert float(answer.headers["x-inference-time-s"]) >= 0
    assert set(json.loads(answer.headers["x-stage-durations"])) == {"denoise", "decode", "export"}
    assert float(answer.headers["x-peak-memory-mb"]) == 12.5
    assert gone(server)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (EngineError("rank 1 died", code="worker_died"), (500, None, "worker_died")),
        (RequestError("too many tokens", param="prompt", code="too_long"), (422, None, "too_long")),
        (ZeroDivisionError(), (500, None, "internal_error")),
    ],
)
def test_sync_failures(serve: Serve, fault: Exception, expected: tuple[int, str | None, str]) -> None:
    server = serve()
    server.engine.fault = fault
    answer = sync(server)
    assert error_of(answer) == expected
    assert answer.headers.get("x-should-retry") == ("false" if expected[0] == 500 else None)
    assert gone(server)


def test_sync_times_out(serve: Serve) -> None:
    server = serve(job_timeout=0.2)
    server.engine.may_finish.clear()
    answer = sync(server)
    assert error_of(answer) == (504, None, "timeout")
    assert answer.headers["x-should-retry"] == "false"
    assert gone(server)


def test_a_client_that_goes_away_cancels_its_job(serve: Serve) -> None:
    server = serve()
    server.engine.may_finish.clear()
    with httpx.Client(base_url=server.url) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/videos/sync", json={"prompt": "a cat"}, timeout=httpx.Timeout(5, read=0.3))
    while not gone(server):
        pass
    assert len(server.engine.cancels) == 1
    server.engine.may_finish.set()
    assert server.wait_for(create(server), "completed")["status"] == "completed"


def test_somebody_else_deletes_what_a_client_waits_for(serve: Serve) -> None:
    server = serve()
    server.engine.may_finish.clear()
    answers: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: answers.append(sync(server)))
    waiting.start()
    while not (jobs := server.http.get("/v1/videos").json()["data"]):
        pass
    server.http.delete(f"/v1/videos/{jobs[0]['id']}")
    waiting.join(10)
    assert error_of(answers[0]) == (410, "video_id", "video_deleted")
