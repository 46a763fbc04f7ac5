# SPDX-License-Identifier: Apache-2.0
"""LTX-2 in two stages on two VAE ranks behind stock ``vllm serve``; one rank without a server says what is right."""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests.e2e.conftest import NO_ACCELERATOR, Checkpoint, Start
from tests.e2e.media import file_of, photo, read_clip, read_sound
from tests.helpers.server import Server
from vllm_omni_vae import Omni
from vllm_omni_vae.pipelines.request import Stage
from vllm_omni_vae.server.media import export_clip

pytestmark = [pytest.mark.e2e, pytest.mark.vllm]

NAME = "LTX2ImageToVideoTwoStagesPipeline"
TILE, STRIDE = "96x96", "64x64"
WIDTH, HEIGHT, FRAMES, FPS = 256, 128, 9, 24
PHOTO = photo(WIDTH, HEIGHT)
FIELDS: dict[str, Any] = {"num_frames": FRAMES, "fps": FPS, "num_inference_steps": 2, "seed": 5}
PROMPT = "waves break on a pier while a gull cries"
REQUEST: dict[str, Any] = FIELDS | {
    "prompt": PROMPT,
    "size": f"{WIDTH}x{HEIGHT}",
    "input_reference": ("photo.png", file_of(PHOTO), "image/png"),
}


@pytest.fixture(scope="module")
def server(start: Start, checkpoint: Checkpoint) -> Server:
    tiles = ("--vae-use-tiling", "--vae-tile-size", TILE, "--vae-tile-stride", STRIDE)
    asked = ("--model-class-name", NAME, "--vae-patch-parallel-size", "2", *tiles)
    server = start("vllm", "serve", checkpoint("ltx2-two-stage"), *asked)
    server.wait_until_healthy()
    return server


@pytest.fixture(scope="module")
def one_rank(server: Server, checkpoint: Checkpoint, hardware: str) -> Iterator[Omni]:
    """The same checkpoint and geometry without a server; it loads once the server has."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in NO_ACCELERATOR.items() if hardware == "cpu" else ():
            patch.setenv(name, value)
        model = checkpoint("ltx2-two-stage")
        tiles = {"vae_use_tiling": True, "vae_tile_size": TILE, "vae_tile_stride": STRIDE}
        with Omni(model=model, model_class_name=NAME, **tiles) as omni:
            yield omni


def test_a_clip_of_a_picture_with_sound_is_the_one_that_one_rank_makes(
    server: Server, one_rank: Omni, tmp_path: Path
) -> None:
    job = server.generate(**REQUEST)
    video = server.content(job.id)
    clip, sound = read_clip(video), read_sound(video)
    assert (clip.codec, clip.pixel_format, clip.width, clip.height) == ("h264", "yuv420p", WIDTH, HEIGHT)
    assert (len(clip.pixels), clip.fps, clip.streams) == (FRAMES, FPS, 2)
    assert (sound.codec, sound.rate, len(sound.samples)) == ("aac", 24_000, 2)
    assert sound.seconds == Fraction(FRAMES, FPS), "as long as the frames"
    assert clip.pixels.std() > 5 and sound.samples.std() > 0.003, "a grey clip or silence would prove nothing"
    assert [(d["operation"], d["strategy"], d["grid"], d["tiles_per_rank"]) for d in job.vae] == [
        ("encode", "tile", [1, 2, 4], [4, 4]),
        ("encode", "tile", [1, 1, 2], [1, 1]),
        ("decode", "tile", [1, 2, 4], [4, 4]),
    ]
    assert len(job.peak_memory_mb) == len(server.ranks()) == 2

    alone = one_rank.generate(PROMPT, image=np.asarray(PHOTO), width=WIDTH, height=HEIGHT, **FIELDS)
    assert {tuple(d["tiles_per_rank"]) for d in alone.decisions} == {(8,), (2,)}
    folder = tmp_path / "clip"
    export_clip(alone.frames, audio=alone.audio, fps=FPS, size=(WIDTH, HEIGHT), num_frames=FRAMES, folder=folder)
    assert video == (folder / "video.mp4").read_bytes()


def test_progress_goes_through_the_stages_in_order_and_never_falls(server: Server) -> None:
    events = list(server.events(server.submit(**REQUEST)))
    order = [stage.value for stage in Stage]
    places = [order.index(event["stage"]) for event in events if event["stage"]]
    assert places == sorted(places) and order[places[-1]] == "export"
    progress = [event["progress"] for event in events]
    assert progress == sorted(progress) and progress[-1] == 100


def test_the_start_up_table_names_the_class_and_the_autoencoder(server: Server) -> None:
    lines = server.log_file.read_text().splitlines()
    assert any(f"{NAME} on 2 rank(s)" in line for line in lines)
    (row,) = [line.split() for line in lines if line.split()[:1] == ["vae"]]
    assert row[:7] == ["vae", "AutoencoderKLLTX2Video", "on", "tile", "on", "2", "ranks"]
    (row,) = [line.split() for line in lines if line.split()[:1] == ["upsample_pipeline.vae"]]
    assert row[1:] == ["AutoencoderKLLTX2Video", "on", "the", "same", "as", "vae"]


def test_a_size_that_half_of_cannot_be_made_is_refused_with_the_nearest(server: Server) -> None:
    for size, nearest in (("288x128", "nearest: 256 or 320"), ("256x96", "nearest: 128")):
        with pytest.raises(openai.UnprocessableEntityError, match=nearest):
            server.submit(**REQUEST | {"size": size})


@pytest.mark.parametrize(
    ("family", "name", "said"),
    [
        ("ltx2-t2v", NAME, f"{NAME} cannot be run as asked: --model-class-name: two stages need a latent upsampler"),
        ("ltx2-t2v", "LTX2TwoStagePipeline", "--model-class-name LTX2TwoStagePipeline: "),
        ("wan2.2-t2v", NAME, "is a WanPipeline checkpoint, which can be run as WanPipeline"),
    ],
    ids=["no upsampler", "unknown", "another model"],
)
def test_what_cannot_be_run_so_ends_the_start_with_the_reason(
    family: str, name: str, said: str, start: Start, checkpoint: Checkpoint
) -> None:
    server = start("vllm-omni-vae", "serve", checkpoint(family), "--model-class-name", name)
    assert server.wait_until_ended() == 2
    (error,) = [line for line in server.log.splitlines() if line.startswith("error: ")]
    assert said in error
