# SPDX-License-Identifier: Apache-2.0
"""The real `openai` client against a real socket."""

import base64
import io

import av
import numpy as np
import openai
import pytest
from PIL import Image

from vllm_omni_vae.errors import RankError

from .conftest import MODEL, Serve

FIELDS = {"seed": 3, "num_inference_steps": 2, "guidance_scale": 4.5, "negative_prompt": "", "num_frames": 9, "fps": 8}


def test_create_and_poll_then_download_every_variant(serve: Serve) -> None:
    server = serve()
    video = server.openai.videos.create_and_poll(prompt="a cat", model=MODEL, size="64x48", extra_body=FIELDS)
    assert (video.status, video.progress, video.size, video.seconds) == ("completed", 100, "64x48", "1.125")
    assert video.error is None and video.object == "video" and video.id.startswith("video_")
    assert video.completed_at and video.expires_at and video.expires_at == video.completed_at + 86_400
    extra = video.model_extra or {}
    assert (extra["fps"], extra["num_frames"], extra["seed"]) == (8, 9, 3)
    assert extra["peak_memory_mb"] == [12.5, 11.0] and extra["vae"][0]["strategy"] == "tile"
    assert set(extra["stage_durations"]) == {"denoise", "decode", "export"}

    request = server.engine.requests[0]
    assert (request.guidance_scale, request.num_inference_steps, request.negative_prompt) == (4.5, 2, "")

    mp4 = server.openai.videos.download_content(video.id).read()
    with av.open(io.BytesIO(mp4)) as container:
        stream = container.streams.video[0]
        assert (stream.frames, stream.width, stream.height, stream.average_rate) == (9, 64, 48, 8)
    still = server.openai.videos.download_content(video.id, variant="thumbnail")
    assert still.response.headers["content-type"] == "image/webp"
    assert Image.open(io.BytesIO(still.read())).size == (64, 48)
    sheet = server.openai.videos.download_content(video.id, variant="spritesheet")
    assert sheet.response.headers["content-type"] == "image/jpeg"
    assert Image.open(io.BytesIO(sheet.read())).size == (5 * 256, 5 * 192)


def test_the_same_seed_gives_the_same_bytes_through_the_client_and_through_json(serve: Serve) -> None:
    server = serve()
    mine = server.openai.videos.create_and_poll(prompt="a cat", seconds="4", size="64x48", extra_body={"seed": 5})
    body = {"prompt": "a cat", "seconds": 4, "width": 64, "height": 48, "seed": 5}
    other = server.http.post("/v1/videos", json=body).json()
    server.wait_for(other["id"], "completed")
    first, second = (server.openai.videos.download_content(i).read() for i in (mine.id, other["id"]))
    assert first == second
    assert (mine.seconds, other["seconds"]) == ("4", "4")
    assert [request.num_frames for request in server.engine.requests] == [65, 65]


def test_a_failed_job_is_an_answer_and_not_an_exception(serve: Serve) -> None:
    server = serve()
    server.engine.fault = RankError(1, "MemoryError: no")
    video = server.openai.videos.create_and_poll(prompt="a cat")
    assert video.status == "failed" and video.error is not None
    assert (video.error.code, video.error.message) == ("rank_failed", "rank 1 failed: MemoryError: no")
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        server.openai.videos.download_content(video.id)
    assert refused.value.code == "rank_failed"
    assert not server.clips()
    assert server.openai.videos.create_and_poll(prompt="a cat").status == "completed"


def test_list_turns_pages(serve: Serve) -> None:
    server = serve()
    made = [server.openai.videos.create(prompt=f"cat {n}").id for n in range(5)]
    assert [video.id for video in server.openai.videos.list(limit=2)] == made[::-1]
    assert [video.id for video in server.openai.videos.list(limit=2, order="asc")] == made
    page = server.openai.videos.list(limit=2, order="asc", after=made[2])
    assert [video.id for video in page.data] == made[3:] and not page.has_more


def test_delete(serve: Serve) -> None:
    server = serve()
    video = server.openai.videos.create_and_poll(prompt="a cat")
    assert [path.name for path in server.clips()] == [video.id]
    gone = server.openai.videos.delete(video.id)
    assert (gone.id, gone.deleted, gone.object) == (video.id, True, "video.deleted")
    assert not server.clips()
    with pytest.raises(openai.NotFoundError):
        server.openai.videos.retrieve(video.id)
    with pytest.raises(openai.NotFoundError):
        server.openai.videos.delete(video.id)
    assert server.openai.videos.list().data == []


def test_an_uploaded_reference_is_brought_to_the_clip_s_size(serve: Serve, png: bytes) -> None:
    server = serve()
    bare = server.openai.videos.create_and_poll(prompt="a cat", input_reference=png, size="64x48")
    named = server.openai.videos.create_and_poll(
        prompt="a cat", input_reference=("lies.txt", io.BytesIO(png), "text/plain"), size="64x48"
    )
    assert bare.status == named.status == "completed"
    for request in server.engine.requests:
        (image,) = request.images
        assert image.shape == (48, 64, 3) and (image == (255, 0, 0)).all()


def test_a_reference_and_nested_parameters_through_extra_body(serve: Serve, png: bytes) -> None:
    server = serve()
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    extra = {"input_reference": {"image_url": url}, "extra_params": {"reference_fit": "pad", "shift": 2, "on": True}}
    server.openai.videos.create_and_poll(prompt="a cat", size="64x64", extra_body=extra)
    (request,) = server.engine.requests
    assert request.extra_params == {"reference_fit": "pad", "shift": 2, "on": True}
    (image,) = request.images
    assert (image[0] == 0).all() and (image[-1] == 0).all() and (image[32] == (255, 0, 0)).all()


def test_remix_keeps_settings_seed_and_reference(serve: Serve, png: bytes) -> None:
    server = serve()
    source = server.openai.videos.create_and_poll(prompt="a cat", input_reference=png, extra_body={"seed": 9})
    remix = server.openai.videos.remix(source.id, prompt="a dog")
    assert (remix.prompt, remix.remixed_from_video_id, remix.seconds) == ("a dog", source.id, source.seconds)
    server.wait_for(remix.id, "completed")
    first, second = server.engine.requests
    assert np.array_equal(first.images[0], second.images[0])
    assert (second.prompt, second.seed) == ("a dog", 9)


def test_models(serve: Serve) -> None:
    server = serve(served_model_name=("one", "two"))
    assert [model.id for model in server.openai.models.list()] == ["one", "two"]
    assert server.openai.videos.create(prompt="a cat", model="two").model == "two"
    with pytest.raises(openai.BadRequestError) as refused:
        server.openai.videos.create(prompt="a cat", model="sora-2")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


def test_what_no_model_can_do_is_501_and_not_retried(serve: Serve, png: bytes) -> None:
    server = serve()
    client = server.openai.with_options(max_retries=2)
    calls = [
        lambda: client.videos.edit(prompt="a cat", video=png),
        lambda: client.videos.extend(prompt="a cat", seconds="4", video=png),
        lambda: client.videos.create_character(name="cat", video=png),
        lambda: client.videos.get_character("cat"),
    ]
    for call in calls:
        with pytest.raises(openai.InternalServerError) as refused:
            call()
        assert (refused.value.status_code, refused.value.code) == (501, "not_implemented")
        assert refused.value.response.headers["x-should-retry"] == "false"
