# SPDX-License-Identifier: Apache-2.0
"""Tiny diffusion decoders of LTX-2 with random weights, and what one rank makes with a given seed."""

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import LTX2VideoDiffusionDecoderModel

from vllm_omni_vae.tiny.common import randomize

LAYERS: Mapping[str, Any] = {
    "latent_channels": 4,
    "patch_size": 2,
    "decoder_head_dim": 8,
    "decoder_stage_channels": (16, 8, 8, 8, 8),
    "decoder_stage_depths": (1, 1, 1, 1, 1),
    "decoder_stage_kernels": ((3, 3, 3), (3, 3, 3), (3, 3, 3), (3, 3, 3)),
    "decoder_upsample_strides": ((1, 2, 2), (2, 1, 1), (2, 1, 1), (2, 1, 1)),
    "decoder_upsample_channel_reductions": (2, 1, 1, 1),
    "decoder_stage5_kernel": (1, 3, 3),
    "decoder_t_emb_dim": 8,
    "spatial_compression_ratio": 4,
    "temporal_compression_ratio": 8,
}
"""Four stages as released. A cell is 2 frames of 2x2 pixels, and 4 of 2x2 cells make a latent."""

TILE = (16, 16, 16, 12, 12, 8)
"""Height, width and frames of a tile, and their strides: 8x8x8 cells every 6x6x4."""


def tiny_decoder(dtype: torch.dtype = torch.float32, *, tiled: bool = True, **layers: Any) -> Any:
    """A decoder with the same random weights in every process."""
    made = LTX2VideoDiffusionDecoderModel(**{**LAYERS, **layers})
    made = randomize(made, torch.Generator().manual_seed(0))
    torch.nn.Module.to(made, dtype)  # diffusers' own `to` writes a line for every cast
    if tiled:
        made.enable_tiling(*TILE)
    return made


def seeded(seed: int = 5) -> torch.Generator:
    """A generator of one call's noise."""
    return torch.Generator().manual_seed(seed)
