# SPDX-License-Identifier: Apache-2.0
"""FLUX.2 klein on two VAE ranks behind stock ``vllm serve``; diffusers in this process says what is right."""

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

FAMILY = "flux2-klein"
SEED = 5
PROMPT = "the admiral and a cat"
ASKED: dict[str, Any] = {"prompt": PROMPT, "extra_body": {"seed": SEED, "num_inference_steps": 2}}
TOLD: dict[str, Any] = {"prompt": PROMPT, "num_inference_steps": 2, "guidance_scale": 1.0}


@pytest.fixture(scope="module", params=[CPU])
def hardware(request: pytest.FixtureRequest) -> str:
    """The CPU alone: images are compared with what this process computes."""
    return request.param


def test_an_image_of_text_is_diffusers_own(server: Server, model: str) -> None:
    answer = images_client(server).generate(size="112x80", **ASKED)
    (made,) = pictures(answer)
    np.testing.assert_array_equal(made, diffusers_alone(model, SEED, width=112, height=80, **TOLD))
    assert made.std() > 5
    assert vae_row(server)[:7] == ["vae", "AutoencoderKLFlux2", "on", "tile", "on", "2", "ranks"]


def test_references_of_several_sizes_make_an_image_of_the_first_one_s(server: Server, model: str) -> None:
    first, second = photo(130, 90), photo(70, 100)
    answer = images_client(server).edit(image=[file_of(first), file_of(second)], **ASKED)
    assert answer.size == "128x80"
    expected = diffusers_alone(model, SEED, image=[first, second], **TOLD)
    np.testing.assert_array_equal(pictures(answer)[0], expected)


def test_a_part_is_filled_in_as_diffusers_does(server: Server, model: str) -> None:
    picture, mask = photo(112, 80), Image.new("L", (112, 80))
    mask.paste(255, (48, 0, 112, 80))
    answer = images_client(server).edit(image=file_of(picture), mask=file_of(mask), **ASKED)
    expected = diffusers_alone(
        model, SEED, kind="Flux2KleinInpaintPipeline", image=picture, mask_image=mask, strength=1.0, **TOLD
    )
    np.testing.assert_array_equal(pictures(answer)[0], expected)


def test_what_cannot_be_made_is_refused(server: Server) -> None:
    images = images_client(server)
    with pytest.raises(openai.UnprocessableEntityError, match="from 64 pixels on"):
        images.edit(image=file_of(photo(60, 80)), **ASKED)
    with pytest.raises(openai.UnprocessableEntityError, match="4 at most"):
        images.edit(image=[file_of(photo(64, 64))] * 5, **ASKED)
    with pytest.raises(openai.BadRequestError, match="guided by it"):
        images.generate(prompt=PROMPT, extra_body={"guidance_scale": 2})
