# SPDX-License-Identifier: Apache-2.0
"""LTX-2.5 with sound on two VAE ranks behind stock ``vllm serve``; one rank without a server says what is right."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.ltx2 import PROMPT, check_clip, one_rank
from tests.helpers.server import Server
from vllm_omni_vae import Omni

pytestmark = [pytest.mark.e2e, pytest.mark.vllm]

FAMILY = "ltx2.5-i2v"
TEXT: dict[str, Any] = {"width": 576, "height": 320, "frames": 17, "picture": False}
PICTURE: dict[str, Any] = {"width": 576, "height": 576, "frames": 9, "picture": True}


@pytest.fixture(scope="module")
def alone(server: Server, model: str, hardware: str) -> Iterator[Omni]:
    with one_rank(model, hardware) as omni:
        yield omni


@pytest.mark.parametrize("asked", [TEXT, PICTURE], ids=["text", "picture"])
def test_a_clip_with_sound_is_the_one_that_one_rank_makes(
    server: Server, alone: Omni, asked: dict[str, Any], tmp_path: Path
) -> None:
    check_clip(server, alone, tmp_path, **asked)


def test_steps_that_it_is_not_distilled_to_are_refused(server: Server) -> None:
    with pytest.raises(openai.UnprocessableEntityError, match="num_inference_steps is 30; this model is distilled"):
        server.submit(prompt=PROMPT, num_inference_steps=30)


def test_the_table_at_the_start_says_what_is_shared(server: Server) -> None:
    table = [line.split() for line in server.log_file.read_text().splitlines()]
    rows = {line[0]: line[1:3] for line in table if line[:1] and line[0] in ("vae", "audio_vae", "vocoder")}
    assert rows == {
        "vae": ["AutoencoderKLLTX2Video", "on"],
        "audio_vae": ["AutoencoderKLLTX2Audio", "off"],
        "vocoder": ["LTX2VocoderWithBWE", "off"],
    }
