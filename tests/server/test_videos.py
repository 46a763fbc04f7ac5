# SPDX-License-Identifier: Apache-2.0
"""What the video routes answer, case by case."""

import base64
import json
from typing import Any

import httpx
import numpy as np
import pytest

from vllm_omni_vae.errors import EngineError, RequestError

from .conftest import Running, Serve


def create(server: Running, **fields: Any) -> str:
    answer = server.http.post("/v1/videos", json={"prompt": "a cat", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def error_of(answer: httpx.Response) -> tuple[int, str | None, str]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return answer.status_code, error["param"], error["code"]


REFUSALS: list[tuple[dict[str, Any], tuple[int, str, str]]] = [
    ({"width": 60}, (422, "width", "unsupported_size")),
    ({"size": "853x480"}, (422, "width", "unsupported_size")),
    ({"num_frames": 6}, (422, "num_frames", "unsupported_frames")),
    ({"steps": 3}, (422, "steps", "unknown_parameter")),
    ({"num_inference_steps": 201}, (422, "num_inference_steps", "invalid_value")),
    ({"model": "sora-2"}, (400, "model", "model_not_found")),
    ({"size": "64x48", "height": 64}, (400, "size", "conflicting_parameters")),
    ({"seconds": "4", "num_frames": 61}, (400, "seconds", "conflicting_parameters")),
    ({"width": 1024, "height": 1024}, (422, "width", "too_large")),
    ({"size": "1024x1024"}, (422, "size", "too_large")),
    ({"num_frames": 129}, (422, "num_frames", "too_long")),
    ({"seconds": "100"}, (422, "seconds", "too_long")),
    ({"input_reference": "data:x"}, (400, "input_reference", "invalid_data_url")),
    ({"input_reference": "https://a.example/x"}, (400, "input_reference", "unsupported_url")),
    ({"video_reference": "x"}, (400, "video_reference", "unsupported_parameter")),
    ({"extra_params": {"zoom": 1}}, (422, "extra_params", "unknown_parameter")),
]


def test_what_is_refused_names_the_field(serve: Serve) -> None:
    server = serve(max_pixels=512 * 512, max_frames=125)
    for fields, expected in REFUSALS:
        for path in ("/v1/videos", "/v1/videos/sync"):
            assert error_of(server.http.post(path, json={"prompt": "a cat", **fields})) == expected
    assert server.engine.requests == [] and server.http.get("/v1/videos").json()["data"] == []


def test_seconds_and_the_frames_that_they_are(serve: Serve) -> None:
    server = serve()
    for fields, seconds, frames in (
        ({"seconds": "5"}, "5", 81),
        ({"seconds": 5, "num_frames": 81}, "5", 81),
        ({"seconds": "2.5", "fps": 24}, "2.5", 61),
        ({"num_frames": 81}, "5.0625", 81),
        ({}, "0.3125", 5),
    ):
        job = server.http.get(f"/v1/videos/{create(server, **fields)}").json()
        assert (job["seconds"], job["num_frames"]) == (seconds, frames)


def test_errors_outside_of_the_videos_are_shaped_alike(serve: Serve) -> None:
    server = serve()
    assert error_of(server.http.get("/v1/nowhere")) == (404, None, "not_found")
    assert error_of(server.http.put("/v1/videos")) == (405, None, "method_not_allowed")
    assert error_of(server.http.get("/v1/videos?limit=0")) == (422, "limit", "invalid_value")
    assert error_of(server.http.get("/v1/videos?limit=101")) == (422, "limit", "invalid_value")
    assert error_of(server.http.get("/v1/videos?order=up")) == (422, "order", "invalid_value")
    assert error_of(server.http.get("/v1/videos?after=video_x"))[:2] == (404, "after")
    for head in ("multipart/form-data", "multipart/form-data; boundary=b"):
        bad = server.http.post("/v1/videos", content=b"no part", headers={"Content-Type": head})
        assert error_of(bad) == (400, None, "bad_request")


def test_text_that_utf_8_cannot_carry_is_refused(serve: Serve) -> None:
    server = serve()
    for body, param in ((rb'{"prompt": "\ud800"}', "prompt"), (rb'{"prompt": "x", "\ud800": 1}', "?")):
        answer = server.http.post("/v1/videos", content=body, headers={"Content-Type": "application/json"})
        assert error_of(answer)[:2] == (422, param)


def test_a_bug_is_500_without_its_traceback(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    monkeypatch.setattr(server.engine, "resolve", lambda request: 1 / 0)
    answer = server.http.post("/v1/videos", json={"prompt": "a cat"})
    assert error_of(answer) == (500, None, "internal_error")
    assert answer.json()["error"]["type"] == "server_error"
    assert "division" not in answer.text and "Traceback" not in answer.text


def test_an_engine_that_takes_no_job(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()

    def refuse(request: Any, **more: Any) -> None:
        raise EngineError("it has given up", code="engine_stopped")

    monkeypatch.setattr(server.engine, "submit", refuse)
    answer = server.http.post("/v1/videos", json={"prompt": "a cat"})
    assert error_of(answer) == (503, None, "engine_stopped") and answer.headers["retry-after"]
    assert server.http.get("/v1/videos").json()["data"] == []


def test_states_and_the_polling_header(serve: Serve) -> None:
    server = serve()
    server.engine.may_finish.clear()
    first, second = create(server), create(server)
    running = server.wait_for(first, "in_progress")
    assert running["status"] == "in_progress" and 0 < running["progress"] < 100
    waiting = server.http.get(f"/v1/videos/{second}")
    assert (waiting.json()["status"], waiting.json()["progress"]) == ("queued", 0)
    assert int(waiting.headers["openai-poll-after-ms"]) > 0
    server.engine.may_finish.set()
    assert server.wait_for(second, "completed")["progress"] == 100
    assert "openai-poll-after-ms" not in server.http.get(f"/v1/videos/{second}").headers


def test_content_of_what_is_not_there_has_four_answers(serve: Serve) -> None:
    server = serve(media_ttl=1000)
    server.engine.fault = RequestError("no", code="odd")
    failed = create(server)
    server.wait_for(failed, "failed")
    deleted = create(server)
    server.wait_for(deleted, "completed")
    server.http.delete(f"/v1/videos/{deleted}")
    server.engine.may_finish.clear()
    running, queued = create(server), create(server)
    server.wait_for(running, "in_progress")
    for identity, expected in (
        (failed, (422, None, "odd")),
        (deleted, (410, "video_id", "video_deleted")),
        (running, (409, "video_id", "video_not_ready")),
        (queued, (409, "video_id", "video_not_ready")),
        ("video_never", (404, "video_id", "video_not_found")),
    ):
        for variant in ("video", "thumbnail", "spritesheet"):
            assert error_of(server.http.get(f"/v1/videos/{identity}/content?variant={variant}")) == expected
        assert error_of(server.http.post(f"/v1/videos/{identity}/remix", json={"prompt": "x"})) == expected
    assert error_of(server.http.get(f"/v1/videos/{deleted}")) == (404, "video_id", "video_not_found")
    assert error_of(server.http.get(f"/v1/videos/{deleted}/events"))[0] == 404
    assert error_of(server.http.get(f"/v1/videos/{failed}/content?variant=gif")) == (422, "variant", "invalid_value")


def test_an_expired_video_is_gone_with_its_files(serve: Serve) -> None:
    server = serve(media_ttl=0.5)
    identity = create(server)
    with server.http.stream("GET", f"/v1/videos/{identity}/events") as events:
        for line in events.iter_lines():
            if line == "event: deleted":
                break
            if '"completed"' in line:
                break
    while (answer := server.http.get(f"/v1/videos/{identity}/content")).status_code == 200:
        pass
    assert error_of(answer) == (410, "video_id", "video_expired")
    assert error_of(server.http.get(f"/v1/videos/{identity}"))[0] == 404
    assert not server.clips()


def test_ranges(serve: Serve) -> None:
    server = serve()
    identity = create(server)
    server.wait_for(identity, "completed")
    url = f"/v1/videos/{identity}/content"
    whole = server.http.get(url)
    data, size = whole.content, len(whole.content)
    assert whole.headers["accept-ranges"] == "bytes" and whole.headers["content-type"] == "video/mp4"
    for header, part in (("bytes=0-99", data[:100]), ("bytes=100-", data[100:]), ("bytes=-10", data[-10:])):
        answer = server.http.get(url, headers={"Range": header})
        assert answer.status_code == 206 and answer.content == part
        assert answer.headers["content-range"].endswith(f"/{size}")
        assert int(answer.headers["content-length"]) == len(part)
    assert server.http.get(url, headers={"Range": "bytes=0-0, 5-9"}).status_code == 206
    for header in (f"bytes={size}-", f"bytes={size + 5}-{size + 9}", "bytes=-0", f"bytes=0-1,{size}-"):
        answer = server.http.get(url, headers={"Range": header})
        assert error_of(answer)[0] == 416 and answer.headers["content-range"] == f"bytes */{size}"
    for header in ("bytes=9-5", "bytes=a-b", "lines=1-2", "bytes", "bytes=", "bytes=--5"):
        answer = server.http.get(url, headers={"Range": header})
        assert answer.status_code == 200 and answer.content == data
    etag = whole.headers["etag"]
    part = server.http.get(url, headers={"Range": "bytes=0-9", "If-Range": etag})
    assert part.status_code == 206
    assert server.http.get(url, headers={"Range": "bytes=0-9", "If-Range": '"other"'}).content == data


def test_output_that_is_not_the_clip_fails_the_job(serve: Serve) -> None:
    server = serve()
    for output in (np.zeros((0, 48, 64, 3), np.uint8), np.zeros((4, 48, 64, 3), np.uint8)):
        server.engine.output = output
        job = server.wait_for(create(server), "failed", "completed")
        assert (job["status"], job["error"]["code"]) == ("failed", "invalid_output")
        assert job["progress"] < 100 and not server.clips()


def test_two_bad_requests_beside_a_good_one(serve: Serve) -> None:
    server = serve()
    server.engine.may_finish.clear()
    good = create(server, seed=1)
    server.wait_for(good, "in_progress")
    assert server.http.post("/v1/videos", json={"prompt": "a cat", "width": 50}).status_code == 422
    assert server.http.post("/v1/videos", content=b"{", headers={"Content-Type": "application/json"}).status_code == 400
    server.engine.may_finish.set()
    assert server.wait_for(good, "completed")["status"] == "completed"
    alone = create(server, seed=1)
    server.wait_for(alone, "completed")
    first, second = (server.http.get(f"/v1/videos/{i}/content").content for i in (good, alone))
    assert first == second


def test_a_multipart_upload_and_a_data_url_are_the_same_image(serve: Serve, png: bytes) -> None:
    server = serve()
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    text = {"prompt": "a cat", "size": "64x48"}
    sent = [
        server.http.post("/v1/videos", data=text, files={"input_reference": png}),
        server.http.post("/v1/videos", json={**text, "input_reference": {"image_url": url}}),
        server.http.post("/v1/videos", data={**text, "input_reference[image_url]": url}),
        server.http.post("/v1/videos", data={**text, "image_reference": json.dumps({"image_url": url})}),
    ]
    assert [answer.status_code for answer in sent] == [200] * 4
    images = [request.images[0] for request in server.engine.requests]
    assert all(np.array_equal(image, images[0]) for image in images)


def test_the_docs_tell_the_fields(serve: Serve) -> None:
    server = serve()
    schema = server.http.get("/openapi.json").json()
    content = schema["paths"]["/v1/videos"]["post"]["requestBody"]["content"]
    assert set(content) == {"multipart/form-data", "application/json"}
    assert "nearest" in content["application/json"]["schema"]["description"]
    assert {"prompt", "seconds", "flow_shift"} <= set(content["multipart/form-data"]["schema"]["properties"])
    assert server.http.get("/docs").status_code == 200


def test_the_docs_can_be_switched_off(serve: Serve) -> None:
    server = serve(disable_fastapi_docs=True)
    assert [server.http.get(path).status_code for path in ("/docs", "/openapi.json", "/redoc")] == [404] * 3
