# SPDX-License-Identifier: Apache-2.0
"""Reference images: every mode and type that Pillow can write, and everything that is none."""

import base64
import functools
import io
import random
import resource
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vllm_omni_vae.errors import RequestError
from vllm_omni_vae.server.decode import Upload
from vllm_omni_vae.server.mask import load_mask
from vllm_omni_vae.server.reference import ReferenceFit, fit_reference, load_reference

LIMIT = 100_000


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def load(source: bytes | str, *, transparency: bool = False) -> np.ndarray:
    return load_reference(Upload(source, "the_field"), max_pixels=LIMIT, transparency=transparency)


def refusal(source: bytes | str) -> RequestError:
    with pytest.raises(RequestError) as caught:
        load(source)
    assert caught.value.param == "the_field"
    return caught.value


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_types_are_judged_by_bytes(kind: str) -> None:
    got = load(saved(Image.new("RGB", (40, 24), (200, 40, 40)), kind))
    assert got.shape == (24, 40, 3) and got.dtype == np.uint8
    assert np.abs(got.astype(int) - (200, 40, 40)).max() <= 6


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF", "PPM"])
def test_other_types_are_refused(kind: str) -> None:
    error = refusal(saved(Image.new("RGB", (8, 8)), kind))
    assert (error.status, error.code) == (400, "invalid_image")


@pytest.mark.parametrize(
    ("mode", "kind", "colour", "expected"),
    [
        ("L", "PNG", 100, (100, 100, 100)),
        ("1", "PNG", 1, (255, 255, 255)),
        ("LA", "PNG", (0, 0), (255, 255, 255)),
        ("LA", "PNG", (40, 255), (40, 40, 40)),
        ("RGBA", "PNG", (0, 0, 0, 0), (255, 255, 255)),
        ("RGBA", "PNG", (10, 20, 30, 255), (10, 20, 30)),
        ("RGBA", "PNG", (0, 0, 0, 51), (204, 204, 204)),
        ("RGBA", "WEBP", (0, 0, 0, 0), (255, 255, 255)),
        ("CMYK", "JPEG", (0, 255, 255, 0), (255, 0, 0)),
        ("I;16", "PNG", 0x8000, (128, 128, 128)),
        ("I;16", "PNG", 0xFFFF, (255, 255, 255)),
    ],
)
def test_every_mode_becomes_rgb(mode: str, kind: str, colour: Any, expected: tuple[int, int, int]) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    got = load(saved(Image.new(mode, (16, 16), colour), kind, **options))
    assert got.shape == (16, 16, 3)
    assert np.abs(got.astype(int) - expected).max() <= 2


@pytest.mark.parametrize(
    ("mode", "kind", "colour", "expected"),
    [
        ("L", "PNG", 100, (100, 100, 100, 255)),
        ("1", "PNG", 1, (255, 255, 255, 255)),
        ("LA", "PNG", (40, 7), (40, 40, 40, 7)),
        ("RGBA", "PNG", (10, 20, 30, 0), (10, 20, 30, 0)),
        ("RGB", "PNG", (10, 20, 30), (10, 20, 30, 255)),
        ("RGBA", "WEBP", (10, 20, 30, 99), (10, 20, 30, 99)),
        ("CMYK", "JPEG", (0, 255, 255, 0), (255, 0, 0, 255)),
        ("I;16", "PNG", 0x8000, (128, 128, 128, 255)),
    ],
)
def test_a_model_of_transparency_gets_rgba(mode: str, kind: str, colour: Any, expected: tuple[int, ...]) -> None:
    options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    got = load(saved(Image.new(mode, (16, 12), colour), kind, **options), transparency=True)
    assert got.shape == (12, 16, 4) and got.dtype == np.uint8
    assert np.abs(got.astype(int) - expected).max() <= 2


def test_palettes_and_their_transparent_colour() -> None:
    image = Image.new("P", (16, 16), 0)
    image.putpalette([250, 0, 0, 0, 0, 250])
    assert (load(saved(image)) == (250, 0, 0)).all()
    assert (load(saved(image, transparency=0)) == 255).all()
    assert (load(saved(image, transparency=1)) == (250, 0, 0)).all()
    assert (load(saved(image), transparency=True) == (250, 0, 0, 255)).all()
    assert (load(saved(image, transparency=0), transparency=True) == (250, 0, 0, 0)).all()


def test_a_transparent_colour_of_an_rgb_image() -> None:
    assert (load(saved(Image.new("RGB", (8, 8), (1, 2, 3)), transparency=(1, 2, 3))) == 255).all()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_picture_stands_upright(kind: str) -> None:
    image = Image.new("RGB", (40, 20), "white")
    image.paste((0, 0, 0), (0, 0, 20, 20))  # dark on the left
    exif = Image.Exif()
    exif[0x0112] = 6  # shown after a quarter turn clockwise: what is left comes to the top
    got = load(saved(image, kind, exif=exif))
    assert got.shape == (40, 20, 3)
    assert got[:16].mean() < 20 and got[24:].mean() > 235


def test_an_animation_counts_as_its_first_frame() -> None:
    first, second = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "blue")
    got = load(saved(first, "WEBP", save_all=True, append_images=[second], lossless=True))
    assert (got == (255, 0, 0)).all()


def test_pixels_are_limited_before_they_are_decoded() -> None:
    error = refusal(saved(Image.new("1", (LIMIT, 2))))
    assert (error.status, error.code) == (413, "image_too_large")
    assert str(LIMIT) in str(error)


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims to be large."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(b"\0" * 64))]
    parts = [
        struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in [*chunks, (b"IEND", b"")]
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize("side", [1_000, 20_000, 2**31 - 1])
def test_a_decompression_bomb_is_413(side: int) -> None:
    assert refusal(bomb(side, side)).status == 413


def claiming(side: int) -> dict[str, bytes]:
    """Small files that claim to be ``side`` pixels wide and high, one of each type that is read."""
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    webp = bytearray(saved(frames[0], "WEBP", save_all=True, append_images=frames[1:]))
    assert webp[12:16] == b"VP8X"
    webp[24:30] = 2 * (side - 1).to_bytes(3, "little")
    jpeg = bytearray(saved(frames[0], "JPEG"))
    place = jpeg.index(b"\xff\xc0") + 5
    jpeg[place : place + 4] = 2 * side.to_bytes(2, "big")
    return {"PNG": bomb(side, side), "WEBP": bytes(webp), "JPEG": bytes(jpeg)}


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "JPEG"])
def test_what_a_file_claims_takes_no_memory(kind: str) -> None:
    data = claiming(16_000)[kind]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    error = refusal(data)
    assert (error.status, error.code) == (413, "image_too_large")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB; decoded it has 750,000


def test_text_and_profiles_that_grow_when_unpacked_take_no_memory() -> None:
    packer = zlib.compressobj()
    packed = b"a\0\0" + b"".join(packer.compress(bytes(2**20)) for _ in range(256)) + packer.flush()
    small = saved(Image.new("RGB", (8, 8), "red"))
    for name in (b"zTXt", b"iCCP"):
        chunk = struct.pack(">I", len(packed)) + name + packed + struct.pack(">I", zlib.crc32(name + packed))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            assert (load(small[:33] + chunk + small[33:]) == (255, 0, 0)).all()
        except RequestError as error:
            assert (error.status, error.code) == (400, "invalid_image")
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB; unpacked it has 262,144


def test_broken_files_are_400() -> None:
    whole = {kind: saved(Image.effect_noise((64, 48), 60).convert("RGB"), kind) for kind in ("PNG", "JPEG", "WEBP")}
    assert refusal(b"").code == "empty_image"
    for data in (b"x", b"\x89PNG\r\n\x1a\n", b"RIFF\0\0\0\0WEBP", b"\xff\xd8\xff", b"<svg/>", bomb(100, 100)):
        assert refusal(data).status == 400
    for data in whole.values():
        assert refusal(data[: len(data) // 2]).status == 400


READERS = (
    functools.partial(load_reference, max_pixels=LIMIT),
    functools.partial(load_reference, max_pixels=LIMIT, transparency=True),
    functools.partial(load_mask, size=(24, 16), max_pixels=LIMIT),
)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data", "ignore:Tag data larger than file")
def test_damaged_files_never_raise_anything_else() -> None:
    chance = random.Random(0)
    sources = [saved(Image.effect_noise((24, 16), 60), kind) for kind in ("PNG", "JPEG", "WEBP")]
    exif = Image.Exif()
    exif[0x0112] = 6
    sources.append(saved(Image.new("RGB", (24, 16)), "JPEG", exif=exif))
    sources.append(saved(Image.new("RGBA", (24, 16), (9, 9, 9, 9))))
    palette = Image.new("P", (24, 16), 1)
    palette.putpalette([250, 0, 0, 0, 0, 250])
    sources.append(saved(palette, transparency=0))
    for _ in range(400):
        data = bytearray(chance.choice(sources))
        for _ in range(chance.randint(1, 6)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        for read in READERS:
            try:
                got = read(Upload(bytes(data), "the_field"))
            except RequestError as error:
                assert error.status in (400, 413)
            else:
                assert got.dtype == np.uint8 and got.ndim in (2, 3)


def test_data_urls() -> None:
    data = saved(Image.new("RGB", (8, 8), "red"))
    text = base64.b64encode(data).decode()
    for head in ("data:image/png;base64,", "data:image/jpeg;base64,", "DATA:image/png;name=x;BASE64,"):
        assert (load(head + text) == (255, 0, 0)).all()
    for url in (
        text,
        "data:image/png," + text,
        "data:;base64," + text,
        "data:image/png;base64," + text[:-1],
        "data:image/png;base64," + text[:8] + "\n" + text[8:],
        "data:image/png;base64," + text[:8] + "!" + text[9:],
        "data:image/png;base64,é",
        "file:///etc/passwd",
    ):
        error = refusal(url)
        assert (error.status, error.code) == (400, "invalid_data_url")
    assert refusal("data:image/png;base64,").code == "empty_image"


@pytest.mark.parametrize("url", ["http://example.com/cat.png", "HTTPS://example.com/cat.png"])
def test_nothing_is_fetched(url: str) -> None:
    error = refusal(url)
    assert (error.status, error.code) == (400, "unsupported_url")


def bars(height: int, width: int) -> np.ndarray:
    """Left half red, right half blue, with a white border line at the top."""
    image = np.zeros((height, width, 3), np.uint8)
    image[:, : width // 2] = (255, 0, 0)
    image[:, width // 2 :] = (0, 0, 255)
    return image


def test_an_image_of_the_right_size_is_untouched() -> None:
    image = bars(48, 64)
    for how in ReferenceFit:
        assert fit_reference(image, 64, 48, how) is image


@pytest.mark.parametrize("shape", [(100, 50), (50, 100), (7, 301), (301, 7), (1, 1), (4000, 3)])
@pytest.mark.parametrize("size", [(64, 48), (48, 64), (16, 16)])
def test_the_size_is_exact_and_the_aspect_is_kept(shape: tuple[int, int], size: tuple[int, int]) -> None:
    image = np.full((*shape, 3), 200, np.uint8)
    cropped = fit_reference(image, *size, ReferenceFit.CROP)
    assert cropped.shape == (size[1], size[0], 3) and (cropped == 200).all()
    padded = fit_reference(image, *size, ReferenceFit.PAD)
    assert padded.shape == (size[1], size[0], 3)
    lit = padded[..., 0] > 100
    rows, columns = lit.any(1).sum(), lit.any(0).sum()
    scale = min(size[0] / shape[1], size[1] / shape[0])
    assert abs(rows - max(1, shape[0] * scale)) <= 1 and abs(columns - max(1, shape[1] * scale)) <= 1


def test_crop_takes_the_middle() -> None:
    got = fit_reference(bars(40, 80), 40, 40, ReferenceFit.CROP)
    assert (got[:, :18] == (255, 0, 0)).all() and (got[:, 22:] == (0, 0, 255)).all()


def test_pad_is_black_and_even() -> None:
    got = fit_reference(np.full((40, 80, 3), 255, np.uint8), 80, 60, ReferenceFit.PAD)
    assert (got[:10] == 0).all() and (got[50:] == 0).all() and (got[10:50] == 255).all()
