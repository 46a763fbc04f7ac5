# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image-Edit on two VAE ranks behind stock ``vllm serve``: a photograph as people send it, in any usual file.

Diffusers in this process says what is right. Each request encodes the picture at about a megapixel.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

from tests.e2e.conftest import CPU, Checkpoint, Start
from tests.e2e.images import diffusers_alone, images_client, pictures, vae_row
from tests.e2e.media import file_of, photo
from tests.helpers.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.slow]

SEED = 5
PROMPT = "the admiral smiles"
TILE, STRIDE = 256, 224
ASKED: dict[str, Any] = {"prompt": PROMPT, "size": "272x64", "extra_body": {"seed": SEED, "num_inference_steps": 2}}
ROTATED_BY_EXIF = 6


@pytest.fixture(scope="module", params=[CPU])
def hardware(request: pytest.FixtureRequest) -> str:
    """The CPU alone: images are compared with what this process computes."""
    return request.param


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> str:
    return checkpoint("qwen-image-edit")


@pytest.fixture(scope="module")
def server(start: Start, model: str) -> Server:
    tiles = ("--vae-tile-size", f"{TILE}x{TILE}", "--vae-tile-stride", f"{STRIDE}x{STRIDE}")
    server = start("vllm", "serve", model, "--vae-patch-parallel-size", "2", *tiles)
    server.wait_until_healthy()
    return server


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    """The photograph in few colours, so that every lossless file can hold it, with a white corner."""
    picture = photo(96, 64).quantize(60).convert("RGB")
    picture.paste("white", (0, 0, 24, 16))
    return picture


@pytest.fixture(scope="module")
def right(server: Server, picture: Image.Image) -> str:
    """The answer to the plain file."""
    return sent(server, file_of(picture))


def sent(server: Server, file: bytes) -> str:
    return str(images_client(server).edit(image=file, **ASKED).data[0].b64_json)


def same_picture(picture: Image.Image) -> Mapping[str, bytes]:
    """Other files that show ``picture``."""
    clear = picture.convert("RGBA")
    clear.paste((0, 0, 0, 0), (0, 0, 24, 16))
    turned = picture.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = ROTATED_BY_EXIF
    return {
        "transparent where it was white": file_of(clear),
        "turned, and its EXIF data say so": file_of(turned, exif=exif),
        "a palette": file_of(picture.quantize(64)),
    }


def other_picture(picture: Image.Image) -> Mapping[str, bytes]:
    """Files that show something like it."""
    return {"grey": file_of(picture.convert("L")), "CMYK": file_of(picture.convert("CMYK"), "JPEG", quality=95)}


def test_an_edit_is_the_one_that_one_rank_makes(server: Server, model: str, picture: Image.Image, right: str) -> None:
    answer = images_client(server).edit(image=file_of(picture), **ASKED)
    (made,) = pictures(answer)
    assert (answer.size, made.shape) == ("272x64", (64, 272, 3))
    expected = diffusers_alone(
        model,
        SEED,
        tile=(TILE, STRIDE),
        prompt=PROMPT,
        negative_prompt=" ",
        image=picture,
        width=272,
        height=64,
        num_inference_steps=2,
    )
    assert expected.std() > 5, "a grey image would prove nothing"
    np.testing.assert_array_equal(made, expected)
    assert answer.data[0].b64_json == right, "the same request gives the same bytes"
    assert vae_row(server)[:7] == ["vae", "AutoencoderKLQwenImage", "on", "tile", "on", "2", "ranks"]
    assert "VAE encode: tile 1x4x6" in server.log_file.read_text()


@pytest.mark.parametrize("kind", same_picture(Image.new("RGB", (96, 64))))
def test_the_file_does_not_matter(kind: str, server: Server, picture: Image.Image, right: str) -> None:
    assert sent(server, same_picture(picture)[kind]) == right


@pytest.mark.parametrize("kind", other_picture(Image.new("RGB", (96, 64))))
def test_other_colours_are_read(kind: str, server: Server, picture: Image.Image, right: str) -> None:
    answer = images_client(server).edit(image=other_picture(picture)[kind], **ASKED)
    (made,) = pictures(answer)
    assert made.shape == (64, 272, 3) and made.std() > 5
    assert answer.data[0].b64_json != right


def test_what_cannot_be_made_is_refused(server: Server, picture: Image.Image) -> None:
    images = images_client(server)
    with pytest.raises(openai.BadRequestError, match="needs a reference image"):
        images.generate(**ASKED)
    with pytest.raises(openai.UnprocessableEntityError, match="looks at one"):
        images.edit(image=[file_of(picture)] * 2, **ASKED)
    with pytest.raises(openai.UnprocessableEntityError, match="the size follows from the image, here 1248x832"):
        images.edit(image=file_of(picture), mask=file_of(Image.new("L", picture.size, "white")), **ASKED)
