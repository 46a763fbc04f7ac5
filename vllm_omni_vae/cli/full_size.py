# SPDX-License-Identifier: Apache-2.0
"""Configurations of published autoencoders, to plan with before there is a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_WAN_2_1: Mapping[str, Any] = {"_class_name": "AutoencoderKLWan"}
"""Diffusers' defaults are the Wan 2.1 VAE; Wan 2.2 A14B has the same one."""

# `vae22_diffusers_config` in diffusers' scripts/convert_wan_to_diffusers.py, without the statistics of the latents.
_WAN_2_2_TI2V_5B: Mapping[str, Any] = {
    "_class_name": "AutoencoderKLWan",
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "scale_factor_temporal": 4,
}

_KL: Mapping[str, Any] = {
    "_class_name": "AutoencoderKL",
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "sample_size": 1024,
}
_SDXL: Mapping[str, Any] = {**_KL, "latent_channels": 4}
_FLUX_1: Mapping[str, Any] = {**_KL, "latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False}

# Diffusers' defaults but for what its conversion of the released weights gives: a decoder that looks both ways in time,
# and the ratios, which the defaults would count as 64 and 16.
_LTX_2: Mapping[str, Any] = {
    "_class_name": "AutoencoderKLLTX2Video",
    "decoder_causal": False,
    "spatial_compression_ratio": 32,
    "temporal_compression_ratio": 8,
}

FULL_SIZE: Mapping[str, Mapping[str, Any]] = {
    "flux.1": _FLUX_1,
    "flux.2": {"_class_name": "AutoencoderKLFlux2"},
    "ltx-2": _LTX_2,
    "qwen-image": {"_class_name": "AutoencoderKLQwenImage"},
    "sdxl": _SDXL,
    "wan2.1": _WAN_2_1,
    "wan2.2-a14b": _WAN_2_1,
    "wan2.2-ti2v-5b": _WAN_2_2_TI2V_5B,
    "z-image": _FLUX_1,
}
"""Family name to the ``config.json`` of its autoencoder, as far as that decides shapes."""
