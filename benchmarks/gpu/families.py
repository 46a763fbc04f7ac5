# SPDX-License-Identifier: Apache-2.0
"""Which autoencoders run: each that ``bench`` knows by name, in full size and, where that does not fit, narrow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_omni_vae.cli.full_size import FULL_SIZE

_VIDEO, _PICTURE = (9, 480, 832), (1, 1536, 1536)

SIZES: Mapping[str, tuple[int, int, int]] = {
    "flux.1": _PICTURE,
    "flux.2": _PICTURE,
    "ltx-2": (9, 768, 1024),
    "qwen-image": _PICTURE,
    "sdxl": _PICTURE,
    "wan2.1": _VIDEO,
    "wan2.2-ti2v-5b": _VIDEO,
}
"""Frames, height and width in pixels that are timed in full size: several of the family's own tiles, few seconds."""

NARROW_FRAMES: Mapping[str, int] = {"AutoencoderKLLTX2Video": 9, "AutoencoderKLQwenImage": 5, "AutoencoderKLWan": 5}
"""By diffusers class, frames of two latent frames; a class that is not named is for pictures."""

_CAUSAL: Mapping[str, Any] = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
_PICTURES: Mapping[str, Any] = {"block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 2}

_NARROW: Mapping[str, Mapping[str, Any]] = {
    "AutoencoderKL": _PICTURES,
    "AutoencoderKLFlux2": {**_PICTURES, "latent_channels": 4},
    "AutoencoderKLLTX2Video": {
        "block_out_channels": (8, 8, 8, 8),
        "decoder_block_out_channels": (8, 16, 32),
        "latent_channels": 8,
        "layers_per_block": (1, 1, 1, 1, 1),
        "decoder_layers_per_block": (1, 1, 1, 1),
        "patch_size": 1,
        "spatial_compression_ratio": 8,
    },
    "AutoencoderKLQwenImage": {**_CAUSAL, "input_channels": 3},
    "AutoencoderKLWan": _CAUSAL,
}
"""By diffusers class, what of a configuration is replaced by something small with the same structure."""

_WITHOUT = {"decoder_base_dim"}


def families() -> tuple[str, ...]:
    """Names that stand for unlike autoencoders: of those with one configuration, the first."""
    unlike: dict[str, str] = {}
    for name, config in FULL_SIZE.items():
        unlike.setdefault(repr(sorted(config.items())), name)
    return tuple(sorted(unlike.values()))


def config_of(family: str, *, narrow: bool) -> dict[str, Any]:
    """The ``config.json`` of a family's autoencoder, in full size or narrow."""
    config = dict(FULL_SIZE[family])
    if not narrow:
        return config
    kept = {name: value for name, value in config.items() if name not in _WITHOUT}
    return kept | dict(_NARROW[config["_class_name"]])
