# SPDX-License-Identifier: Apache-2.0
"""LTX-2.3 with sound on two VAE ranks behind stock ``vllm serve``; one rank without a server says what is right."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.ltx2 import PROMPT, check_clip, one_rank
from tests.helpers.server import Server
from vllm_omni_vae import Omni

pytestmark = [pytest.mark.e2e, pytest.mark.vllm]

FAMILY = "ltx2.3-i2v"
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
    check_clip(server, alone, tmp_path, **asked, num_inference_steps=2)


def test_what_cannot_be_made_exactly_is_refused_with_the_nearest(server: Server) -> None:
    for asked, nearest in (({"size": "200x128"}, "nearest: 192 or 224"), ({"num_frames": 16}, "nearest: 9 or 17")):
        with pytest.raises(openai.UnprocessableEntityError, match=nearest):
            server.submit(prompt=PROMPT, **asked)
