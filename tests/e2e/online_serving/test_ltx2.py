# SPDX-License-Identifier: Apache-2.0
"""LTX-2 with sound on two VAE ranks behind stock ``vllm serve``; one rank says what is right."""

import os
from fractions import Fraction
from typing import Any

import openai
import pytest

from tests.e2e.conftest import Checkpoint, Start
from tests.e2e.media import PHOTO, max_difference, read_clip, read_sound
from tests.helpers.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.vllm]

TILES = ("--vae-use-tiling", "--vae-tile-size", "96x96", "--vae-tile-stride", "64x64")
TEXT: dict[str, Any] = {
    "prompt": "waves break on a pier while a gull cries",
    "size": "192x128",
    "num_frames": 17,
    "fps": 24,
    "num_inference_steps": 2,
    "seed": 5,
}
PICTURE = TEXT | {"input_reference": PHOTO}


@pytest.fixture(scope="module")
def both(start: Start, checkpoint: Checkpoint, hardware: str) -> tuple[Server, Server]:
    """Servers with two ranks and with one; they load at the same time, on different GPUs."""
    model = checkpoint("ltx2-t2v")
    last_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").rpartition(",")[2]
    elsewhere = {} if hardware == "cpu" else {"CUDA_VISIBLE_DEVICES": last_gpu}
    two = start("vllm", "serve", model, "--vae-patch-parallel-size", "2", *TILES)
    one = start("vllm-omni-vae", "serve", model, *TILES, environment=elsewhere)
    for server in (two, one):
        server.wait_until_healthy()
    return two, one


@pytest.mark.parametrize("request_of", [TEXT, PICTURE], ids=["text", "picture"])
def test_a_clip_with_sound_is_the_one_that_one_rank_makes(
    both: tuple[Server, Server], request_of: dict[str, Any]
) -> None:
    server, one_rank = both
    job = server.generate(**request_of)
    video = server.content(job.id)
    clip = read_clip(video)
    assert (clip.codec, clip.pixel_format, clip.width, clip.height) == ("h264", "yuv420p", 192, 128)
    assert (len(clip.pixels), clip.fps, clip.streams) == (17, 24, 2)
    assert clip.pixels.std() > 5, "a grey clip would prove nothing"
    sound = read_sound(video)
    assert (sound.codec, sound.rate, len(sound.samples)) == ("aac", 24_000, 2)
    assert sound.seconds == Fraction(17, 24), "as long as the frames"
    assert sound.samples.std() > 0.003, "silence would prove nothing"
    operations = ["decode"] if request_of is TEXT else ["encode", "decode"]
    found = [(d["operation"], d["strategy"], d["grid"], d["tiles_per_rank"]) for d in job.vae]
    assert found == [(operation, "tile", [1, 2, 3], [3, 3]) for operation in operations]
    assert len(job.peak_memory_mb) == len(server.ranks()) == 2
    table = [line.split() for line in server.log_file.read_text().splitlines()]
    (row,) = [line for line in table if line[:1] == ["vae"]]
    assert row[:7] == ["vae", "AutoencoderKLLTX2Video", "on", "tile", "on", "2", "ranks"]
    assert sum(line[:1] in (["audio_vae"], ["vocoder"]) and line[2] == "off" for line in table) == 2

    alone = one_rank.generate(**request_of)
    expected = one_rank.content(alone.id)
    assert max_difference(clip.pixels, read_clip(expected).pixels) == 0
    assert video == expected


def test_what_cannot_be_made_exactly_is_refused_with_the_nearest(both: tuple[Server, Server]) -> None:
    for asked, nearest in (
        ({"size": "200x128"}, "nearest: 192 or 224"),
        ({"size": "32x128"}, "nearest: 64"),
        ({"num_frames": 16}, "nearest: 9 or 17"),
    ):
        with pytest.raises(openai.UnprocessableEntityError, match=nearest):
            both[0].submit(**TEXT | asked)


def test_what_it_cannot_be_run_with_ends_the_start_with_the_reason(start: Start, checkpoint: Checkpoint) -> None:
    server = start("vllm-omni-vae", "serve", checkpoint("ltx2.3-t2v"), "--ring-degree", "2")
    assert server.wait_until_ended() == 2
    (error,) = [line for line in server.log.splitlines() if line.startswith("error: ")]
    assert "--ring-degree: not available for LTX-2; use --ulysses-degree" in error
