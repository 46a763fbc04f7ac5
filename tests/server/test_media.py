# SPDX-License-Identifier: Apache-2.0
"""Clips as files: probed back with PyAV, the same bytes each time, and no file where something went wrong."""

import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from vllm_omni_vae.pipelines.request import Audio
from vllm_omni_vae.server import media
from vllm_omni_vae.server.media import MediaError, Variant, encode_video, export_clip, spritesheet, thumbnail

ROOT = Path(__file__).resolve().parents[2]


def clip(frames: int, height: int = 48, width: int = 64) -> np.ndarray:
    """A picture with structure that moves down a line a frame."""
    rows, columns = np.mgrid[0:height, 0:width]
    picture = np.stack([rows * 4 % 256, columns * 3 % 256, (rows + columns) * 2 % 256], -1).astype(np.uint8)
    return np.stack([np.roll(picture, index, 0) for index in range(frames)])


def export(frames: np.ndarray, folder: Path, fps: int = 16) -> Path:
    count, height, width = frames.shape[:3]
    export_clip(frames, fps=fps, size=(width, height), num_frames=count, folder=folder)
    return folder


def atoms(data: bytes) -> list[bytes]:
    """Names of the top-level boxes of an mp4 file."""
    names, at = [], 0
    while at < len(data):
        names.append(data[at + 4 : at + 8])
        at += int.from_bytes(data[at : at + 4], "big")
    return names


@pytest.mark.parametrize(("count", "fps"), [(1, 16), (2, 24), (9, 8), (81, 16), (33, 30)])
def test_the_video_is_exactly_the_clip(tmp_path: Path, count: int, fps: int) -> None:
    frames = clip(count)
    path = export(frames, tmp_path / "clip", fps) / Variant.VIDEO.filename
    assert atoms(path.read_bytes()) == [b"ftyp", b"moov", b"free", b"mdat"]
    with av.open(str(path)) as container:
        assert [stream.type for stream in container.streams] == ["video"]
        stream = container.streams.video[0]
        context = stream.codec_context
        assert (context.name, context.pix_fmt, stream.width, stream.height) == ("h264", "yuv420p", 64, 48)
        assert (context.color_range, context.colorspace, context.color_primaries, context.color_trc) == (1, 1, 1, 1)
        assert (stream.frames, stream.average_rate, stream.start_time) == (count, fps, 0)
        assert stream.duration is not None and stream.duration * stream.time_base == Fraction(count, fps)
        decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
    assert len(decoded) == count
    error = np.abs(np.stack(decoded).astype(int) - frames).mean()
    assert error < 6


def tone(seconds: float, rate: int, channels: int = 2) -> Audio:
    """440 Hz, in the second channel 660 Hz."""
    at = np.arange(round(seconds * rate)) / rate
    waves = [np.sin(2 * np.pi * pitch * at) for pitch in (440, 660)[:channels]]
    return Audio((0.5 * np.stack(waves)).astype(np.float32), rate)


@pytest.mark.parametrize(("count", "fps"), [(1, 24), (9, 24), (33, 30), (17, 7)])
@pytest.mark.parametrize(("rate", "channels"), [(24_000, 2), (48_000, 2), (16_000, 1)])
@pytest.mark.parametrize("seconds", [0.02, 0.3, 5.0], ids=["too short", "some", "too long"])
def test_the_sound_is_as_long_as_the_frames(
    tmp_path: Path, count: int, fps: int, rate: int, channels: int, seconds: float
) -> None:
    frames, audio = clip(count), tone(seconds, rate, channels)
    encode_video(frames, tmp_path / "a.mp4", fps=fps, audio=audio)
    assert atoms((tmp_path / "a.mp4").read_bytes()) == [b"ftyp", b"moov", b"free", b"mdat"]
    wanted = round(Fraction(count * rate, fps))
    with av.open(str(tmp_path / "a.mp4")) as container:
        assert [stream.type for stream in container.streams] == ["video", "audio"]
        video, sound = container.streams
        assert video.duration * video.time_base == Fraction(count, fps)
        assert (sound.codec_context.name, sound.rate, sound.channels) == ("aac", rate, channels)
        assert (sound.start_time, sound.duration * sound.time_base * rate) == (0, wanted)
        blocks = [frame.to_ndarray() for frame in container.decode(sound)]
    heard = np.concatenate(blocks, 1)
    assert 0 <= heard.shape[1] - wanted < 1024, "only the last frame goes beyond the end"
    expected = np.zeros((channels, wanted), np.float32)
    given = audio.samples[:, :wanted]
    expected[:, : given.shape[1]] = given
    assert np.sqrt(np.mean((heard[:, :wanted] - expected) ** 2)) < 0.06


def test_sound_goes_along_with_the_frames_in_the_file(tmp_path: Path) -> None:
    encode_video(clip(48), tmp_path / "a.mp4", fps=24, audio=tone(2, 24_000))
    with av.open(str(tmp_path / "a.mp4")) as container:
        found = [(p.stream.type, float(p.pts * p.time_base)) for p in container.demux() if p.size]
    for at, (kind, seconds) in enumerate(found):
        before = [then for other, then in found[:at] if other != kind]
        assert seconds - max(before, default=0) < 0.3, "neither stream is far ahead of the other"


def test_the_same_frames_and_sound_give_the_same_bytes(tmp_path: Path) -> None:
    frames, audio = clip(9), tone(0.4, 24_000)
    files = []
    for turn in range(3):
        folder = tmp_path / str(turn)
        export_clip(frames, fps=24, size=(64, 48), num_frames=9, folder=folder, audio=audio)
        files.append((folder / "video.mp4").read_bytes())
    assert len(set(files)) == 1
    export_clip(frames, fps=24, size=(64, 48), num_frames=9, folder=tmp_path / "other", audio=tone(0.4, 24_000, 1))
    assert (tmp_path / "other" / "video.mp4").read_bytes() != files[0]


@pytest.mark.parametrize(
    ("audio", "said"),
    [
        (Audio(np.full((2, 900), np.nan, np.float32), 24_000), "values that are not finite"),
        (Audio(np.full((2, 900), np.inf, np.float32), 24_000), "values that are not finite"),
        (Audio(np.zeros((3, 900), np.float32), 24_000), r"sound of shape \(3, 900\)"),
        (Audio(np.zeros((900,), np.float32), 24_000), r"sound of shape \(900,\)"),
        (Audio(np.zeros((2, 900), np.int16), 24_000), "int16 sound"),  # type: ignore[arg-type]
        (Audio(np.zeros((2, 900), np.float32), 0), "at 0 Hz"),
    ],
)
def test_what_is_no_sound_leaves_no_file(tmp_path: Path, audio: Audio, said: str) -> None:
    with pytest.raises(MediaError, match=said):
        export_clip(clip(1), fps=24, size=(64, 48), num_frames=1, folder=tmp_path / "clip", audio=audio)
    assert not list(tmp_path.iterdir())


def test_sound_of_another_length_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = media._check_sound
    monkeypatch.setattr(media, "_check_sound", lambda path, length, rate: whole(path, length + 1, rate))
    with pytest.raises(MediaError, match="9000 samples at 24000 Hz instead of 9001 at 24000"):
        encode_video(clip(9), tmp_path / "a.mp4", fps=24, audio=tone(1, 24_000))


def test_colours_come_back(tmp_path: Path) -> None:
    frames = np.full((3, 64, 64, 3), (200, 30, 60), np.uint8)
    with av.open(str(export(frames, tmp_path / "clip") / "video.mp4")) as container:
        for frame in container.decode(video=0):
            assert np.abs(frame.to_ndarray(format="rgb24").astype(int) - (200, 30, 60)).max() <= 3


def test_the_same_frames_give_the_same_bytes(tmp_path: Path) -> None:
    frames = clip(17, 144, 144)
    folders = [export(frames, tmp_path / str(turn)) for turn in range(4)]
    for variant in Variant:
        assert len({(folder / variant.filename).read_bytes() for folder in folders}) == 1


def test_the_bytes_do_not_depend_on_what_was_in_memory_before(tmp_path: Path) -> None:
    code = "import sys; from tests.server.test_media import *; export(clip(17, 144, 144), Path(sys.argv[1]))"
    for fill in ("1", "85", "254"):
        environment = {**os.environ, "MALLOC_PERTURB_": fill}
        subprocess.run([sys.executable, "-c", code, str(tmp_path / fill)], cwd=ROOT, env=environment, check=True)
    assert len({(folder / Variant.VIDEO.filename).read_bytes() for folder in tmp_path.iterdir()}) == 1


def test_frames_that_are_a_view_are_fine(tmp_path: Path) -> None:
    frames = clip(5)
    there = export(frames, tmp_path / "one") / "video.mp4"
    transposed = np.ascontiguousarray(frames.transpose(3, 0, 1, 2)).transpose(1, 2, 3, 0)
    assert not transposed.flags.c_contiguous
    assert (export(transposed, tmp_path / "two") / "video.mp4").read_bytes() == there.read_bytes()


def test_stills(tmp_path: Path) -> None:
    folder = export(clip(9), tmp_path / "clip")
    with Image.open(folder / Variant.THUMBNAIL.filename) as still:
        assert (still.format, still.size) == ("WEBP", (64, 48))
    with Image.open(folder / Variant.SPRITESHEET.filename) as sheet:
        assert (sheet.format, sheet.size) == ("JPEG", (1280, 960))


def test_the_sheet_runs_from_the_first_frame_to_the_last() -> None:
    greys = np.stack([np.full((48, 64, 3), 5 * index, np.uint8) for index in range(49)])
    sheet = np.asarray(spritesheet(greys))
    shown = [int(sheet[192 * row + 90, 256 * column + 120, 0]) for row in range(5) for column in range(5)]
    assert shown == [10 * index for index in range(25)]
    one = np.asarray(spritesheet(greys[:1] + 9))
    assert one.shape == (960, 1280, 3) and (one == 9).all()


@pytest.mark.parametrize(("height", "width", "cell"), [(1280, 720, (256, 144)), (16, 4096, (1, 256))])
def test_cells_have_256_pixels_on_the_longer_side(height: int, width: int, cell: tuple[int, int]) -> None:
    sheet = spritesheet(np.zeros((2, height, width, 3), np.uint8))
    assert sheet.size == (5 * cell[1], 5 * cell[0])


def test_a_thumbnail_is_the_middle_frame_and_not_too_large() -> None:
    frames = np.zeros((3, 32, 2560, 3), np.uint8)
    frames[1] = 200
    still = thumbnail(frames)
    assert still.size == (1280, 16) and np.asarray(still).min() == 200


def test_the_reference_is_kept_without_loss(tmp_path: Path) -> None:
    reference = np.random.default_rng(1).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    export_clip(clip(1), fps=16, size=(64, 48), num_frames=1, folder=tmp_path / "clip", reference=reference)
    with Image.open(tmp_path / "clip" / media.REFERENCE) as image:
        assert np.array_equal(np.asarray(image), reference)


@pytest.mark.parametrize(
    ("frames", "size", "count", "said"),
    [
        (clip(1)[:0], (64, 48), 0, r"shape \(0, 48, 64, 3\)"),
        (clip(5), (64, 48), 9, r"shape \(5, 48, 64, 3\) instead of uint8 \(9, 48, 64, 3\)"),
        (clip(5), (48, 64), 5, "instead of uint8"),
        (clip(5).astype(np.float32), (64, 48), 5, "float32 frames"),
        (clip(5)[..., :1], (64, 48), 5, "instead of uint8"),
        (clip(2, 47, 64), (64, 47), 2, "even width and height; the clip is 64x47"),
        (clip(2, 48, 63), (63, 48), 2, "even width and height; the clip is 63x48"),
    ],
)
def test_what_was_not_asked_for_is_no_clip(
    tmp_path: Path, frames: np.ndarray, size: tuple[int, int], count: int, said: str
) -> None:
    with pytest.raises(MediaError, match=said):
        export_clip(frames, fps=16, size=size, num_frames=count, folder=tmp_path / "clip")
    assert not list(tmp_path.iterdir())


def test_an_export_that_is_stopped_leaves_no_file(tmp_path: Path) -> None:
    seen = []

    def stop(done: int, total: int) -> None:
        seen.append((done, total))
        if done == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        export_clip(clip(9), fps=16, size=(64, 48), num_frames=9, folder=tmp_path / "clip", on_frame=stop)
    assert seen == [(1, 9), (2, 9), (3, 9)]
    assert not list(tmp_path.iterdir())


def test_a_file_that_does_not_hold_the_clip_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = media.encode_video
    monkeypatch.setattr(media, "encode_video", lambda frames, path, **more: whole(frames[:-1], path, **more))
    whole_check = media._check_file
    monkeypatch.setattr(media, "_check_file", lambda path, total, *size: whole_check(path, 5, *size))
    with pytest.raises(MediaError, match=r"\(4, 64, 48\) instead of \(5, 64, 48\)"):
        export(clip(5), tmp_path / "clip")
    assert not list(tmp_path.iterdir())


def test_a_still_that_cannot_be_written_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(frames: np.ndarray) -> Image.Image:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(media, "spritesheet", full)
    with pytest.raises(OSError, match="No space left"):
        export(clip(5), tmp_path / "clip")
    assert not list(tmp_path.iterdir())
