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

FULL_SIZE: Mapping[str, Mapping[str, Any]] = {
    "wan2.1": _WAN_2_1,
    "wan2.2-a14b": _WAN_2_1,
    "wan2.2-ti2v-5b": _WAN_2_2_TI2V_5B,
}
"""Family name to the ``config.json`` of its autoencoder, as far as that decides shapes."""
