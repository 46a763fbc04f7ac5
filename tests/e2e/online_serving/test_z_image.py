# SPDX-License-Identifier: Apache-2.0
"""Z-Image on two VAE ranks behind stock ``vllm serve``; diffusers in this process says what is right."""

from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

from tests.e2e.conftest import CPU
from tests.e2e.images import diffusers_alone, images_client, pictures, vae_row
from tests.e2e.media import file_of, photo
from tests.helpers.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.vllm]

FAMILY = "z-image"
SEED = 5
PROMPT = "the admiral before a window"
ASKED: dict[str, Any] = {"prompt": PROMPT, "size": "112x80", "extra_body": {"seed": SEED, "num_inference_steps": 2}}
TOLD: dict[str, Any] = {"prompt": PROMPT, "width": 112, "height": 80, "num_inference_steps": 2, "guidance_scale": 0.0}


@pytest.fixture(scope="module", params=[CPU])
def hardware(request: pytest.FixtureRequest) -> str:
    """The CPU alone: images are compared with what this process computes."""
    return request.param


def test_images_of_text_are_diffusers_own(server: Server, model: str) -> None:
    answer = images_client(server).generate(n=2, **ASKED)
    first, second = pictures(answer)
    assert (answer.size, answer.output_format, first.shape) == ("112x80", "png", (80, 112, 3))
    np.testing.assert_array_equal(first, diffusers_alone(model, SEED, **TOLD))
    np.testing.assert_array_equal(second, diffusers_alone(model, SEED + 1, **TOLD))
    assert first.std() > 5 and (first != second).any()
    assert vae_row(server)[:7] == ["vae", "AutoencoderKL", "on", "tile", "on", "2", "ranks"]
    assert len(server.ranks()) == 2
    again = images_client(server).generate(n=2, **ASKED)
    assert [item.b64_json for item in again.data] == [item.b64_json for item in answer.data]


def test_a_photograph_painted_anew_is_diffusers_own(server: Server, model: str) -> None:
    picture = photo(112, 80)
    answer = images_client(server).edit(image=file_of(picture), **ASKED)
    expected = diffusers_alone(model, SEED, kind="ZImageImg2ImgPipeline", image=picture, **TOLD)
    np.testing.assert_array_equal(pictures(answer)[0], expected)


def test_a_part_of_it_is_filled_in_as_diffusers_does(server: Server, model: str) -> None:
    picture, mask = photo(112, 80), Image.new("L", (112, 80))
    mask.paste(255, (48, 0, 112, 80))
    clear = Image.new("RGBA", (112, 80), "black")
    clear.paste((0, 0, 0, 0), (48, 0, 112, 80))
    expected = diffusers_alone(
        model, SEED, kind="ZImageInpaintPipeline", image=picture, mask_image=mask, strength=1.0, **TOLD
    )
    for form in (mask, clear):
        answer = images_client(server).edit(image=file_of(picture), mask=file_of(form), **ASKED)
        np.testing.assert_array_equal(pictures(answer)[0], expected)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"size": "100x80"}, "nearest: 96 or 112"),
        ({"extra_body": {"true_cfg_scale": 2}}, "besides their guidance_scale"),
        ({"extra_body": {"extra_params": {"resolution": 640}}}, "resolution mean nothing"),
    ],
)
def test_what_cannot_be_made_exactly_is_refused(changed: dict[str, Any], said: str, server: Server) -> None:
    with pytest.raises((openai.UnprocessableEntityError, openai.BadRequestError), match=said):
        images_client(server).generate(**ASKED | changed)
