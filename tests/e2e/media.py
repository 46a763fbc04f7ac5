# SPDX-License-Identifier: Apache-2.0
"""What is in the files that a server hands out, and pictures to send to it."""

import dataclasses
import io
from fractions import Fraction
from pathlib import Path

import av
import matplotlib
import numpy as np
from PIL import Image

PHOTO = Path(matplotlib.get_data_path(), "sample_data", "grace_hopper.jpg")


@dataclasses.dataclass(frozen=True)
class Clip:
    """An mp4 file as a player sees it; ``seconds`` is what the container says, ``pixels`` are (T, H, W, 3) uint8."""

    codec: str
    pixel_format: str
    width: int
    height: int
    fps: Fraction
    seconds: Fraction
    streams: int
    pixels: np.ndarray


def read_clip(data: bytes) -> Clip:
    """Decode every frame of an mp4 file."""
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        assert stream.frames == len(frames)
        return Clip(
            codec=stream.codec_context.name,
            pixel_format=stream.pix_fmt,
            width=stream.width,
            height=stream.height,
            fps=stream.average_rate,
            seconds=Fraction(container.duration, av.time_base),
            streams=len(container.streams),
            pixels=np.stack(frames),
        )


@dataclasses.dataclass(frozen=True)
class Sound:
    """The sound track of an mp4 file; ``seconds`` is what the file says, ``samples`` are (channels, n) float."""

    codec: str
    rate: int
    seconds: Fraction
    samples: np.ndarray


def read_sound(data: bytes) -> Sound:
    """Decode the sound of an mp4 file to its end; the last frame of a decoder may go beyond it."""
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.audio[0]
        blocks = [frame.to_ndarray() for frame in container.decode(stream)]
        seconds = stream.duration * stream.time_base
        samples = np.concatenate(blocks, 1)[:, : round(seconds * stream.rate)]
        return Sound(stream.codec_context.name, stream.rate, seconds, samples)


def max_difference(one: np.ndarray, other: np.ndarray) -> int:
    """The largest difference of two clips of one shape, in steps of 8 bits."""
    assert one.shape == other.shape
    return int(np.abs(one.astype(int) - other).max())


def photo(width: int, height: int) -> Image.Image:
    """The photograph in this size, as RGB."""
    return Image.open(PHOTO).convert("RGB").resize((width, height), Image.Resampling.LANCZOS)


def file_of(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    """The bytes of a picture's file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()
