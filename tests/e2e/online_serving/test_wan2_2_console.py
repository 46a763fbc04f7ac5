# SPDX-License-Identifier: Apache-2.0
"""``vllm-omni-vae serve``, the server without vLLM: both tasks of TI2V-5B against plain diffusers, the default tiles of
text to video, and command lines that cannot work."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline

from tests.e2e.conftest import CPU, Checkpoint, Start, left_media
from tests.e2e.media import file_of, photo, read_clip
from tests.helpers.broken_halo import ENVIRONMENT as BROKEN_HALO
from tests.helpers.server import Server
from vllm_omni_vae import VaeParallelMode
from vllm_omni_vae.server.media import encode_video

pytestmark = pytest.mark.e2e

PROMPT = "a boat leaves the harbour"
TWO_RANKS = ("--vae-patch-parallel-size", "2")
TI2V: Mapping[str, Any] = {
    "prompt": PROMPT,
    "size": "160x192",
    "num_frames": 9,
    "fps": 12,
    "num_inference_steps": 2,
    "seed": 3,
    "guidance_scale": 4,
}
TILES = ("--vae-tile-size", "64x64", "--vae-tile-stride", "48x48")
SHARD = VaeParallelMode.SPATIAL_SHARD_WIDTH


@pytest.fixture(scope="module", params=[CPU])
def hardware(request: pytest.FixtureRequest) -> str:
    """The CPU alone: clips are compared with what this process computes."""
    return request.param


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> str:
    return checkpoint("wan2.2-ti2v-5b")


@pytest.fixture(scope="module")
def ti2v(start: Start, model: str) -> Server:
    """TI2V-5B on two ranks, in tiles of four latents."""
    server = start("vllm-omni-vae", "serve", model, *TWO_RANKS, *TILES)
    server.wait_until_healthy()
    return server


def diffusers_alone(pipeline: Any, *, tiled: bool = True, **arguments: Any) -> np.ndarray:
    """The clip `TI2V` as diffusers makes it in this process, with its own sequential tiles; (T, H, W, 3) uint8."""
    pipeline.set_progress_bar_config(disable=True)
    if tiled:
        pipeline.vae.enable_tiling(64, 64, 48, 48)
    width, height = map(int, TI2V["size"].split("x"))
    frames = pipeline(
        **{name: TI2V[name] for name in ("prompt", "num_frames", "num_inference_steps", "guidance_scale")},
        width=width,
        height=height,
        generator=torch.Generator().manual_seed(TI2V["seed"]),
        output_type="pt",
        **arguments,
    ).frames[0]
    return (frames * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()


def mp4(frames: np.ndarray, path: Path) -> bytes:
    encode_video(frames, path, fps=TI2V["fps"])
    return path.read_bytes()


def test_ti2v_makes_a_clip_of_a_text_as_diffusers_does(ti2v: Server, model: str, tmp_path: Path) -> None:
    job = ti2v.generate(**TI2V)
    (decode,) = job.vae
    assert (decode["operation"], decode["strategy"]) == ("decode", "tile")
    assert (decode["grid"], decode["tiles_per_rank"]) == ([1, 4, 4], [8, 8])
    frames = diffusers_alone(WanPipeline.from_pretrained(model))
    assert frames.std() > 10, "a grey clip would prove nothing"
    assert ti2v.content(job.id) == mp4(frames, tmp_path / "alone.mp4")


def test_ti2v_makes_a_clip_of_a_picture_as_diffusers_does(ti2v: Server, model: str, tmp_path: Path) -> None:
    picture = photo(160, 192)
    job = ti2v.generate(**TI2V, input_reference=file_of(picture))
    encode, decode = job.vae
    assert [(d["operation"], d["strategy"]) for d in job.vae] == [("encode", "tile"), ("decode", "tile")]
    assert (encode["grid"], encode["tiles_per_rank"]) == ([1, 2, 2], [2, 2])
    assert (decode["grid"], decode["tiles_per_rank"]) == ([1, 4, 4], [8, 8])
    text = WanPipeline.from_pretrained(model)
    parts = {name: part for name, part in text.components.items() if part is not None}
    frames = diffusers_alone(WanImageToVideoPipeline(**parts, expand_timesteps=True), image=picture)
    assert ti2v.content(job.id) == mp4(frames, tmp_path / "alone.mp4")


def test_one_feature_map_spread_over_two_ranks_is_the_untiled_clip(start: Start, model: str, tmp_path: Path) -> None:
    server = start("vllm-omni-vae", "serve", model, *TWO_RANKS, *TILES, "--vae-parallel-mode", SHARD)
    server.wait_until_healthy()
    job = server.generate(**TI2V)
    assert [(d["operation"], d["strategy"], d["rank_grid"], d["fallback"]) for d in job.vae] == [
        ("decode", SHARD, [1, 2], False)
    ]
    frames = diffusers_alone(WanPipeline.from_pretrained(model), tiled=False)
    expected = read_clip(mp4(frames, tmp_path / "alone.mp4")).pixels
    # A few pixels are rounded to the next step, for which the encoder changes some blocks. Tiles would differ by 27.
    assert np.abs(read_clip(server.content(job.id)).pixels.astype(int) - expected).mean() < 0.5


def test_default_tiles_and_sigterm_in_the_middle_of_a_job(start: Start, checkpoint: Checkpoint) -> None:
    server = start("vllm-omni-vae", "serve", checkpoint("wan2.2-t2v"), *TWO_RANKS)
    server.wait_until_healthy()
    request = {"prompt": PROMPT, "size": "272x272", "num_frames": 5, "num_inference_steps": 1, "seed": 3}
    job = server.generate(**request)
    assert [(d["operation"], d["strategy"], d["grid"]) for d in job.vae] == [("decode", "tile", [1, 2, 2])]
    assert sum(job.vae[0]["tiles_per_rank"]) == 4 and min(job.vae[0]["tiles_per_rank"]) > 0
    assert server.content(job.id)[4:8] == b"ftyp"

    server.wait_for_stage(server.submit(**request), "decode")
    assert left_media(server)
    assert server.stop() == 0, server.log
    assert not left_media(server)
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            (*TWO_RANKS, "--no-vae-use-tiling"),
            "vae_parallel_mode tile on 2 ranks works in tiles, but VAE tiling was switched off",
        ),
        ((*TWO_RANKS, "--vae-tile-size", "64x64"), "tile stride 192 is larger than the tile size 64"),
    ],
    ids=["no tiling", "stride"],
)
def test_what_cannot_work_ends_the_start_with_the_reason(
    start: Start, model: str, flags: tuple[str, ...], reason: str
) -> None:
    server = start("vllm-omni-vae", "serve", model, *flags)
    assert server.wait_until_ended() == 2
    (error,) = [line for line in server.log.splitlines() if line.startswith("error: ")]
    assert reason in error


def test_a_broken_halo_ends_the_start_with_the_reason(start: Start, model: str) -> None:
    flags = (*TWO_RANKS, "--vae-parallel-mode", SHARD)
    server = start("vllm-omni-vae", "serve", model, *flags, environment=BROKEN_HALO)
    assert server.wait_until_ended() == 2
    (error,) = [line for line in server.log.splitlines() if line.startswith("error: ")]
    assert f"self-test of vae: decode with {SHARD} is off by " in error
