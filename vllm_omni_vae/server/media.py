# SPDX-License-Identifier: Apache-2.0
"""A finished clip as files: video with its sound, a still, a sheet of stills. It blocks; run it in a thread."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from enum import StrEnum
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.audio.stream import AudioStream
from av.packet import Packet
from av.video.reformatter import ColorRange, Colorspace, VideoReformatter
from av.video.stream import VideoStream
from PIL import Image

from ..errors import VaeParallelError
from ..pipelines.request import Audio, Frames, Samples
from .png import to_png

# x264's macroblock tree reads memory that it never wrote unless the width is a multiple of 256: now and then the same
# frames became other bytes. It saves some 3 % of a file.
X264_OPTIONS = {"crf": "18", "preset": "veryfast", "x264-params": "mbtree=0"}
# The bytes depend on the number of threads, so it is not that of the machine.
X264_THREADS = 4
SHEET_SIDE = 5
SHEET_CELL = 256
THUMBNAIL_SIDE = 1280
_BT709 = 1
AAC_FRAME = 1024
_LAYOUTS = {1: "mono", 2: "stereo"}
REFERENCE = "reference.png"


class Variant(StrEnum):
    """The files of one clip that a client can ask for."""

    VIDEO = "video"
    THUMBNAIL = "thumbnail"
    SPRITESHEET = "spritesheet"

    @property
    def filename(self) -> str:
        """Name of the file in the clip's folder."""
        return {"video": "video.mp4", "thumbnail": "thumbnail.webp", "spritesheet": "spritesheet.jpg"}[self.value]

    @property
    def media_type(self) -> str:
        """Its Content-Type."""
        return {"video": "video/mp4", "thumbnail": "image/webp", "spritesheet": "image/jpeg"}[self.value]


class MediaError(VaeParallelError):
    """What the model returned, or what the encoder wrote, is not the clip that was asked for."""


def export_clip(
    frames: Frames,
    *,
    fps: int,
    size: tuple[int, int],
    num_frames: int,
    folder: Path,
    audio: Audio | None = None,
    reference: Frames | None = None,
    on_frame: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write every `Variant` of a clip below ``folder``, which appears complete or not at all.

    The same frames and sound give the same bytes.

    Args:
        frames: ``(T, H, W, 3)`` uint8 RGB.
        fps: Frames per second.
        size: Width and height that were asked for, pixels.
        num_frames: Frames that were asked for.
        folder: Where to; must not exist.
        audio: The clip's sound, if it has any; the file's is exactly as long as its frames.
        reference: The clip's reference image, ``(H, W, 3)`` uint8; kept beside the clip without loss.
        on_frame: Called after each frame with the frames done and all frames; an exception from it stops the export.

    Raises:
        MediaError: ``frames`` are not as asked for, the size is odd, the sound is none, or the written file does not
            check out.
    """
    check_frames(frames, size=size, num_frames=num_frames)
    if audio is not None:
        check_audio(audio)
    part = folder.with_name(folder.name + ".part")
    part.mkdir(parents=True)
    try:
        encode_video(frames, part / Variant.VIDEO.filename, fps=fps, audio=audio, on_frame=on_frame)
        thumbnail(frames).save(part / Variant.THUMBNAIL.filename, "WEBP", quality=85)
        spritesheet(frames).save(part / Variant.SPRITESHEET.filename, "JPEG", quality=80)
        if reference is not None:
            (part / REFERENCE).write_bytes(to_png(reference))
        os.replace(part, folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def check_frames(frames: Frames, *, size: tuple[int, int], num_frames: int) -> None:
    """Raise `MediaError` unless ``frames`` are ``num_frames`` uint8 RGB pictures of ``size`` (width, height)."""
    wanted = (num_frames, size[1], size[0], 3)
    if num_frames < 1 or frames.shape != wanted or frames.dtype != np.uint8:
        raise MediaError(
            f"the model returned {frames.dtype} frames of shape {frames.shape} instead of uint8 {wanted} (T, H, W, RGB)"
        )
    if size[0] % 2 or size[1] % 2:
        raise MediaError(f"H.264 yuv420p needs an even width and height; the clip is {size[0]}x{size[1]} pixels")


def check_audio(audio: Audio) -> None:
    """Raise `MediaError` unless ``audio`` is finite float32 sound of one or two channels."""
    samples = audio.samples
    if samples.ndim != 2 or samples.shape[0] not in _LAYOUTS or samples.dtype != np.float32 or audio.rate < 1:
        raise MediaError(
            f"the model returned {samples.dtype} sound of shape {samples.shape} at {audio.rate} Hz instead of float32 "
            "(channels, n) with one or two channels"
        )
    if not np.isfinite(samples).all():
        raise MediaError("the model returned sound with values that are not finite")


def fit_audio(audio: Audio, seconds: Fraction) -> Samples:
    """Return the samples that ``seconds`` take, to the nearest sample: cut, or with silence at the end."""
    wanted = round(seconds * audio.rate)
    samples = audio.samples[:, :wanted]
    return np.pad(samples, ((0, 0), (0, wanted - samples.shape[1])))


def encode_video(
    frames: Frames,
    path: Path,
    *,
    fps: int,
    audio: Audio | None = None,
    on_frame: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Encode ``frames`` ``(T, H, W, 3)`` as an H.264 yuv420p BT.709 mp4 that plays while it loads (``+faststart``).

    With ``audio`` there is an AAC track besides, as long as the frames to the nearest sample.

    Raises:
        MediaError: the file does not hold exactly these frames, or sound of another length.
    """
    total, height, width = frames.shape[:3]
    rate = Fraction(fps)
    reformatter = VideoReformatter()
    # The default of 1000 rounds the clip's length to milliseconds.
    options = {"movflags": "+faststart", "movie_timescale": str(1000 * fps)}
    with av.open(str(path), "w", format="mp4", options=options) as container:
        stream = container.add_stream("libx264", rate=rate, options=X264_OPTIONS)
        assert isinstance(stream, VideoStream)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.time_base = 1 / rate
        context = stream.codec_context
        context.thread_count = X264_THREADS
        context.color_range = ColorRange.MPEG
        context.colorspace = context.color_primaries = context.color_trc = _BT709
        sound = None if audio is None else _Sound(container, audio, Fraction(total, fps))
        for index in range(total):
            if sound is not None:
                container.mux(list(sound.until(Fraction(index + 1, fps))))
            rgb = av.VideoFrame.from_ndarray(np.ascontiguousarray(frames[index]), format="rgb24")
            frame = reformatter.reformat(
                rgb, format="yuv420p", dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG
            )
            frame.pts, frame.time_base = index, 1 / rate
            container.mux(stream.encode(frame))
            on_frame(index + 1, total)
        container.mux(stream.encode(None))
        if sound is not None:
            container.mux(list(sound.rest()))
    _check_file(path, total, width, height)
    if sound is not None:
        _check_sound(path, sound.length, sound.rate)


class _Sound:
    """The AAC track of one file, handed out along with the frames so that the file plays while it loads.

    Args:
        container: The file, before its first packet.
        audio: The sound.
        seconds: How long the file is.
    """

    def __init__(self, container: av.container.OutputContainer, audio: Audio, seconds: Fraction) -> None:
        self._samples = fit_audio(audio, seconds)
        self._layout = _LAYOUTS[self._samples.shape[0]]
        self.rate, self.length = audio.rate, self._samples.shape[1]
        stream = container.add_stream("aac", rate=audio.rate, layout=self._layout)
        assert isinstance(stream, AudioStream)
        stream.time_base = Fraction(1, audio.rate)
        self._stream = stream
        self._done = 0

    def until(self, seconds: Fraction) -> Iterator[Packet]:
        """The packets of the AAC frames that begin before ``seconds``."""
        while self._done < min(self.length, seconds * self.rate):
            block = np.ascontiguousarray(self._samples[:, self._done : self._done + AAC_FRAME])
            frame = av.AudioFrame.from_ndarray(block, format="fltp", layout=self._layout)
            frame.sample_rate, frame.pts, frame.time_base = self.rate, self._done, Fraction(1, self.rate)
            self._done += block.shape[1]
            yield from self._stream.encode(frame)

    def rest(self) -> Iterator[Packet]:
        """What the encoder still holds."""
        yield from self._stream.encode(None)


def _check_file(path: Path, total: int, width: int, height: int) -> None:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        found = (stream.frames, stream.width, stream.height)
    if found != (total, width, height):
        raise MediaError(
            f"the encoder wrote frames, width, height {found} instead of {(total, width, height)}; is the disk full?"
        )


def _check_sound(path: Path, length: int, rate: int) -> None:
    with av.open(str(path)) as container:
        stream = container.streams.audio[0]
        seconds = (stream.duration or 0) * (stream.time_base or Fraction(0))
        found = (Fraction(stream.rate), seconds * stream.rate)
    if found != (Fraction(rate), Fraction(length)):
        raise MediaError(f"the encoder wrote {found[1]} samples at {found[0]} Hz instead of {length} at {rate}")


def thumbnail(frames: Frames) -> Image.Image:
    """Return the middle frame, at most `THUMBNAIL_SIDE` pixels on its longer side."""
    image = Image.fromarray(frames[len(frames) // 2])
    image.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.LANCZOS)
    return image


def spritesheet(frames: Frames) -> Image.Image:
    """Return 5x5 stills, evenly spread over the clip in reading order, each 256 pixels on its longer side.

    A clip of fewer frames than stills shows frames more than once.
    """
    height, width = frames.shape[1:3]
    scale = SHEET_CELL / max(height, width)
    cell = (max(1, round(width * scale)), max(1, round(height * scale)))
    sheet = Image.new("RGB", (cell[0] * SHEET_SIDE, cell[1] * SHEET_SIDE))
    picks = np.linspace(0, len(frames) - 1, SHEET_SIDE**2).round().astype(int)
    for place, index in enumerate(picks):
        still = Image.fromarray(frames[index]).resize(cell, Image.Resampling.BILINEAR)
        sheet.paste(still, (place % SHEET_SIDE * cell[0], place // SHEET_SIDE * cell[1]))
    return sheet
