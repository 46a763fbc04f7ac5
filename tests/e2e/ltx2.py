# SPDX-License-Identifier: Apache-2.0
"""What LTX-2 with sound makes of one request on two VAE ranks behind a server and on one rank without a server."""

import contextlib
import os
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.conftest import NO_ACCELERATOR
from tests.e2e.media import file_of, max_difference, photo, read_clip, read_sound
from tests.helpers.server import Server
from vllm_omni_vae import Omni
from vllm_omni_vae.server.media import export_clip

PROMPT = "waves break on a pier while a gull cries"
FPS = 24


@contextlib.contextmanager
def one_rank(model: str, hardware: str) -> Iterator[Omni]:
    """The same checkpoint in tiles of the usual size on one rank, on the last GPU where there are GPUs."""
    last_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").rpartition(",")[2]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (NO_ACCELERATOR if hardware == "cpu" else {"CUDA_VISIBLE_DEVICES": last_gpu}).items():
            patch.setenv(name, value)
        with Omni(model=model, vae_use_tiling=True) as omni:
            yield omni


def check_clip(
    server: Server, alone: Omni, folder: Path, *, width: int, height: int, frames: int, picture: bool, **fields: Any
) -> None:
    """Assert that both make the same file: frames of this size in two ranks' tiles, and sound as long as they are.

    Args:
        server: With two VAE ranks.
        alone: One rank.
        folder: For temporary files.
        width, height, frames: Of the clip.
        picture: Whether it begins with a photograph, which is then encoded in tiles too.
        fields: Further fields of the request.
    """
    size, image = (width, height), photo(width, height)
    fields |= {"num_frames": frames, "fps": FPS, "seed": 5}
    upload = {"input_reference": ("photo.png", file_of(image), "image/png")} if picture else {}
    job = server.generate(prompt=PROMPT, size=f"{width}x{height}", **upload, **fields)
    video = server.content(job.id)
    clip, sound = read_clip(video), read_sound(video)
    assert (clip.codec, clip.pixel_format, clip.width, clip.height) == ("h264", "yuv420p", *size)
    assert (len(clip.pixels), clip.fps, clip.streams) == (frames, FPS, 2)
    assert clip.pixels.std() > 5, "a grey clip would prove nothing"
    assert (sound.codec, sound.rate, len(sound.samples)) == ("aac", 48_000, 2)
    assert sound.seconds == Fraction(frames, FPS), "as long as the frames"
    assert sound.samples.std() > 0.003, "silence would prove nothing"
    assert len(job.peak_memory_mb) == len(server.ranks()) == 2

    operations = ["encode", "decode"] if picture else ["decode"]
    grid, dealt = ([1, 2, 2], [1, 3]) if height > 512 else ([1, 1, 2], [1, 1])
    found = [(d["operation"], d["strategy"], d["grid"], sorted(d["tiles_per_rank"])) for d in job.vae]
    assert found == [(operation, "tile", grid, dealt) for operation in operations]

    given = {"image": np.asarray(image)} if picture else {}
    result = alone.generate(PROMPT, width=width, height=height, **given, **fields)
    assert [d["tiles_per_rank"] for d in result.decisions] == [(sum(dealt),)] * len(operations)
    export_clip(result.frames, audio=result.audio, fps=FPS, size=size, num_frames=frames, folder=folder / "clip")
    expected = (folder / "clip" / "video.mp4").read_bytes()
    assert max_difference(clip.pixels, read_clip(expected).pixels) == 0
    assert video == expected
