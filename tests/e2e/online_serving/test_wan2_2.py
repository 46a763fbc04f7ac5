# SPDX-License-Identifier: Apache-2.0
"""Wan 2.2 image to video on two VAE ranks behind stock ``vllm serve``; one rank says what is right."""

import base64
import io
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image, ImageOps

from tests.e2e.conftest import Checkpoint, Start
from tests.e2e.media import PHOTO, Clip, file_of, max_difference, photo, read_clip
from tests.helpers.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.vllm]

SOON = 10.0
TILES = ("--vae-use-tiling", "--vae-tile-size", "64x64", "--vae-tile-stride", "48x48")
# Six tiles each way, half a second; and two clips that take long, to be stopped on the way.
QUICK: dict[str, Any] = {
    "prompt": "the admiral turns to the camera and smiles",
    "input_reference": PHOTO,
    "size": "96x128",
    "num_frames": 5,
    "fps": 8,
    "num_inference_steps": 1,
    "seed": 5,
}
LONG_DECODE = QUICK | {"size": "256x256", "num_frames": 49}
LONG_ENCODE = QUICK | {"size": "512x384", "num_frames": 33}


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the server with two ranks keeps its files."""
    return tmp_path_factory.mktemp("media")


@pytest.fixture(scope="module")
def both(start: Start, checkpoint: Checkpoint, hardware: str, media: Path) -> tuple[Server, Server]:
    """Servers with two ranks and with one; they load at the same time, on different GPUs."""
    model = checkpoint("wan2.2-i2v")
    last_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").rpartition(",")[2]
    elsewhere = {} if hardware == "cpu" else {"CUDA_VISIBLE_DEVICES": last_gpu}
    ranks, mode = ("--vae-patch-parallel-size", "2"), ("--vae-parallel-mode", "tile")
    two = start("vllm", "serve", model, *ranks, *mode, *TILES, "--media-storage-path", str(media))
    one = start("vllm-omni-vae", "serve", model, *TILES, environment=elsewhere)
    for server in (two, one):
        server.wait_until_healthy()
    return two, one


@pytest.fixture(scope="module")
def server(both: tuple[Server, Server]) -> Server:
    return both[0]


@pytest.fixture(scope="module")
def one_rank(both: tuple[Server, Server]) -> Server:
    return both[1]


@pytest.fixture(scope="module")
def right(one_rank: Server) -> bytes:
    """The clip `QUICK` as one rank makes it."""
    return one_rank.clip(**QUICK)


def test_a_photograph_becomes_the_clip_that_one_rank_makes(server: Server, one_rank: Server) -> None:
    request = QUICK | {"size": "160x128", "num_frames": 17, "num_inference_steps": 3}
    job = server.generate(**request)
    video = server.content(job.id)
    clip = read_clip(video)
    assert (clip.codec, clip.pixel_format, clip.width, clip.height) == ("h264", "yuv420p", 160, 128)
    assert (len(clip.pixels), clip.fps, clip.seconds, clip.streams) == (17, 8, Fraction(17, 8), 1)
    assert clip.pixels.std() > 10, "a grey clip would prove nothing"
    assert (job.size, job.seconds, job.progress, job.seed) == ("160x128", "2.125", 100, 5)
    assert set(job.stage_durations) == {"encode", "denoise", "decode", "export"}
    assert [decision["operation"] for decision in job.vae] == ["encode", "decode"]
    for decision in job.vae:
        assert (decision["strategy"], decision["grid"], decision["tiles_per_rank"]) == ("tile", [1, 3, 4], [6, 6])
    assert len(job.peak_memory_mb) == len(server.ranks()) == 2
    table = [line.split() for line in server.log_file.read_text().splitlines()]
    assert ["vae", "AutoencoderKLWan", "on", "tile", "on", "2", "ranks", "2", "checks,", "bit-equal"] in table

    alone = one_rank.generate(**request)
    expected = one_rank.content(alone.id)
    assert [(d["strategy"], d["grid"], d["tiles_per_rank"]) for d in alone.vae] == [("tile", [1, 3, 4], [12])] * 2
    assert len(one_rank.ranks()) == 1
    assert max_difference(clip.pixels, read_clip(expected).pixels) == 0
    assert video == expected

    check_stills(server, job.id, clip)


def check_stills(server: Server, video_id: str, clip: Clip) -> None:
    thumbnail = Image.open(io.BytesIO(server.content(video_id, "thumbnail")))
    assert (thumbnail.format, thumbnail.size) == ("WEBP", (160, 128))
    sheet = Image.open(io.BytesIO(server.content(video_id, "spritesheet")))
    assert (sheet.format, sheet.size) == ("JPEG", (5 * 256, 5 * 205))
    middle = Image.fromarray(clip.pixels[8])
    for still in (thumbnail, sheet.crop((2 * 256, 2 * 205, 3 * 256, 3 * 205))):
        one, other = (image.convert("L").resize((20, 16), Image.Resampling.BOX) for image in (still, middle))
        assert max(abs(a - b) for a, b in zip(one.tobytes(), other.tobytes(), strict=True)) < 16


def test_a_json_body_gives_the_bytes_that_the_client_gets(server: Server, right: bytes) -> None:
    url = "data:image/jpeg;base64," + base64.b64encode(PHOTO.read_bytes()).decode()
    body = QUICK | {"input_reference": {"image_url": url}}
    answer = server.http.post("/v1/videos", json=body)
    assert (answer.status_code, answer.json()["status"]) == (200, "queued")
    *_, last = server.events(answer.json()["id"])
    assert last["status"] == "completed"
    assert server.content(answer.json()["id"]) == server.clip(**QUICK) == right


def test_another_seed_gives_another_clip(server: Server, right: bytes) -> None:
    assert server.clip(**QUICK | {"seed": 6}) != right


def test_the_sync_route_answers_with_the_same_file_and_keeps_none(server: Server, media: Path, right: bytes) -> None:
    before = {path.name for path in media.iterdir()}
    fields = {name: str(value) for name, value in QUICK.items() if name != "input_reference"}
    answer = server.http.post(
        "/v1/videos/sync",
        data=fields,
        files={"input_reference": PHOTO.read_bytes()},
        timeout=60,
    )
    assert (answer.status_code, answer.headers["content-type"]) == (200, "video/mp4")
    assert answer.content == right
    assert server.http.get(f"/v1/videos/{answer.headers['x-request-id']}").status_code == 404
    assert {path.name for path in media.iterdir()} == before


def rgba() -> tuple[bytes, Image.Image]:
    image = photo(96, 128)
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    white = Image.new("RGBA", image.size, "white")
    return file_of(image), Image.alpha_composite(white, image).convert("RGB")


def grey() -> tuple[bytes, Image.Image]:
    image = photo(96, 128).convert("L")
    return file_of(image), image.convert("RGB")


def palette() -> tuple[bytes, Image.Image]:
    image = photo(96, 128).quantize(32)
    return file_of(image), image.convert("RGB")


def rotated() -> tuple[bytes, Image.Image]:
    exif = Image.Exif()
    exif[0x0112] = 6  # its top is to the right
    data = file_of(photo(128, 96), "JPEG", exif=exif, quality=95)
    return data, ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")


@pytest.mark.parametrize("form", [rgba, grey, palette, rotated])
def test_every_form_of_a_picture_is_its_rgb_equivalent(
    server: Server, right: bytes, form: Callable[[], tuple[bytes, Image.Image]]
) -> None:
    data, equivalent = form()
    assert equivalent.size == (96, 128)
    made = server.clip(**QUICK | {"input_reference": data})
    assert made == server.clip(**QUICK | {"input_reference": file_of(equivalent)})
    assert made != right


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [
        ({"size": "97x128"}, "nearest: 96 or 112"),
        ({"size": "96x540"}, "nearest: 528 or 544"),
        ({"num_frames": 6}, "nearest: 5 or 9"),
        ({"num_frames": 4}, "nearest: 1 or 5"),
    ],
    ids=["odd width", "height", "6 frames", "4 frames"],
)
def test_what_cannot_be_made_exactly_is_refused_with_the_nearest(
    server: Server, right: bytes, asked: dict[str, Any], nearest: str
) -> None:
    jobs = server.http.get("/v1/videos").json()["first_id"]
    with pytest.raises(openai.UnprocessableEntityError, match=nearest) as refused:
        server.submit(**QUICK | asked)
    assert refused.value.body["type"] == "invalid_request_error"
    assert server.http.get("/v1/videos").json()["first_id"] == jobs
    assert server.clip(**QUICK) == right


def test_pages_of_the_list(server: Server) -> None:
    made = [server.generate(**QUICK | {"seed": seed}).id for seed in (1, 2, 3)]
    assert [video.id for _, video in zip(made, server.openai.videos.list(limit=1), strict=False)] == made[::-1]
    page = server.openai.videos.list(limit=1, after=made[0], order="asc")
    assert ([video.id for video in page.data], page.has_more) == ([made[1]], True)
    page = server.openai.videos.list(after=made[1], order="asc")
    assert ([video.id for video in page.data], page.has_more) == ([made[2]], False)


def test_a_job_tells_each_stage_while_health_answers(server: Server) -> None:
    video_id = server.submit(**QUICK | {"size": "160x128", "num_frames": 17, "num_inference_steps": 6})
    told = []
    for event in server.events(video_id):
        told.append(event)
        assert server.http.get("/health", timeout=SOON).json() == {"status": "healthy"}
    running = [event for event in told if event["status"] == "in_progress"]
    assert list(dict.fromkeys(event["stage"] for event in running if event["stage"])) == [
        "encode",
        "denoise",
        "decode",
        "export",
    ]
    progress = [event["progress"] for event in told]
    assert progress == sorted(progress)
    assert max(event["progress"] for event in running) < 100
    for stage in ("encode", "decode"):
        assert len({event["progress"] for event in running if event["stage"] == stage}) > 2, "it must move in the VAE"
    assert (told[-1]["event"], told[-1]["status"], told[-1]["progress"]) == ("status", "completed", 100)


@pytest.mark.parametrize("stage", ["encode", "decode"])
def test_deleting_a_running_job_frees_the_ranks_at_once(server: Server, media: Path, right: bytes, stage: str) -> None:
    ranks = server.ranks()
    video_id = server.submit(**LONG_ENCODE if stage == "encode" else LONG_DECODE)
    server.wait_for_stage(video_id, stage)
    before = server.cpu_seconds()
    assert server.openai.videos.delete(video_id).deleted
    assert server.clip(**QUICK) == right
    assert server.ranks() == ranks
    # Each rank would compute five seconds more or longer before it is done with the stage that was stopped.
    assert max(after - start for after, start in zip(server.cpu_seconds(), before, strict=True)) < 3
    assert not [path for path in media.iterdir() if path.name.startswith(video_id)]
    assert server.http.get(f"/v1/videos/{video_id}").status_code == 404
    assert server.http.get(f"/v1/videos/{video_id}/content").status_code == 410


def test_good_requests_beside_bad_ones_are_right(server: Server, one_rank: Server, right: bytes) -> None:
    other = QUICK | {"input_reference": file_of(photo(96, 128).transpose(Image.Transpose.ROTATE_180)), "seed": 8}
    bad = [QUICK | {"num_frames": 7}, QUICK | {"input_reference": PHOTO.read_bytes()[:2000]}]
    with ThreadPoolExecutor(4) as threads:
        good = [threads.submit(server.clip, **request) for request in (QUICK, other)]
        refused = [threads.submit(server.submit, **request) for request in bad]
    assert isinstance(refused[0].exception(), openai.UnprocessableEntityError)
    assert isinstance(refused[1].exception(), openai.BadRequestError)
    assert [clip.result() for clip in good] == [right, one_rank.clip(**other)]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_fails_its_job_and_no_other(server: Server, media: Path, right: bytes, victim: int) -> None:
    ranks = server.ranks()
    video_id = server.submit(**QUICK | {"size": "192x192", "num_frames": 25})
    server.wait_for_stage(video_id, "decode")
    os.kill(ranks[victim], signal.SIGKILL)
    killed = time.monotonic()
    *_, last = server.events(video_id)
    assert time.monotonic() - killed < SOON
    assert (last["status"], last["error"]["code"]) == ("failed", "worker_died")
    assert f"rank {victim} died by signal 9" in last["error"]["message"]
    assert server.http.get(f"/v1/videos/{video_id}").status_code == 200
    assert server.http.get(f"/v1/videos/{video_id}/content").status_code == 422
    assert not (media / video_id).exists()
    health = server.http.get("/health")
    assert health.status_code == 503 and f"rank {victim} died" in health.json()["error"]["message"]

    assert server.clip(**QUICK) == right
    assert server.http.get("/health").status_code == 200
    assert len(server.ranks()) == 2 and not set(server.ranks()) & set(ranks)
