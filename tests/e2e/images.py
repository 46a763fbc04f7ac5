# SPDX-License-Identifier: Apache-2.0
"""Images that a server answers with, and those that diffusers makes in this process."""

import base64
import io
from collections.abc import Mapping
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image

from tests.helpers.server import Server

IMAGE_SECONDS = 240.0
"""Bound of a wait for images on a busy machine."""


def pictures(answer: Any) -> list[np.ndarray]:
    """The images of an answer of the `openai` client, ``(H, W, channels)`` uint8, in their order."""
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(item.b64_json)))) for item in answer.data]


def images_client(server: Server) -> Any:
    """The images API of the `openai` client of ``server``, with patience."""
    return server.openai.with_options(timeout=IMAGE_SECONDS).images


def diffusers_alone(
    folder: str, seed: int, *, kind: str | None = None, tile: tuple[int, int] | None = None, **asked: Any
) -> np.ndarray:
    """The image ``(H, W, 3)`` that diffusers makes of ``asked`` in its own tiles, on one thread as a rank of two.

    Args:
        kind: Class of the pipeline, if it is not that of the checkpoint.
        tile: Tile size and stride in pixels; None for a VAE whose checkpoint says it.
    """
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    if kind is not None:
        settings: Mapping[str, Any] = {"is_distilled": True} if kind.startswith("Flux2Klein") else {}
        pipeline = getattr(diffusers, kind)(**pipeline.components, **settings)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.vae.enable_tiling(*(() if tile is None else (tile[0], tile[0], tile[1], tile[1])))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    try:
        (made,) = pipeline(output_type="pt", generator=torch.Generator("cpu").manual_seed(seed), **asked).images
    finally:
        torch.set_num_threads(threads)
    return (made * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()


def vae_row(server: Server) -> list[str]:
    """The words of the start-up table's line about the autoencoder ``vae``."""
    (row,) = [line.split() for line in server.log_file.read_text().splitlines() if line.split()[:1] == ["vae"]]
    return row
