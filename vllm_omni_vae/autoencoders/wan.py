# SPDX-License-Identifier: Apache-2.0
"""Wan 2.1, Wan 2.2 A14B and Wan 2.2 TI2V-5B (patchified, residual)."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

from .causal_cache import CausalCacheSpec
from .mixin import DistributedVaeMixin
from .spec import Operation, Vae


class WanSpec(CausalCacheSpec):
    """Units as in diffusers: decode tiles count latents; encode tiles count the patchified pixels of ``_encode``.

    Diffusers does not divide the encode tile by the patch size, so one encode tile of TI2V-5B spans twice the image
    pixels of one decode tile.
    """

    name = "AutoencoderKLWan"
    tells_first_chunk = True

    @property
    def base_class(self) -> type:
        return AutoencoderKLWan

    def patch(self, vae: Vae) -> int:
        return int(vae.config.patch_size or 1)

    def unit(self, vae: Vae) -> int:
        return int(vae.spatial_compression_ratio if vae.config.is_residual else self.patch(vae))

    def public_shape(self, vae: Vae, operation: Operation, seen: tuple[int, ...]) -> tuple[int, ...]:
        return self.finished_shape(vae, seen) if operation is Operation.ENCODE else seen

    def channels(self, vae: Vae, operation: Operation) -> int:
        return int(2 * vae.config.z_dim if operation is Operation.ENCODE else vae.config.out_channels)

    def finish_decode(self, vae: Vae, merged: torch.Tensor) -> torch.Tensor:
        if vae.config.patch_size is not None:
            merged = unpatchify(merged, patch_size=vae.config.patch_size)
        return super().finish_decode(vae, merged)

    def finished_shape(self, vae: Vae, merged: tuple[int, ...]) -> tuple[int, ...]:
        batch, channels, time, height, width = merged
        patch = self.patch(vae)
        return batch, channels // patch**2, time, height * patch, width * patch


class DistributedAutoencoderKLWan(DistributedVaeMixin, AutoencoderKLWan):
    """`diffusers.AutoencoderKLWan` whose tiles are shared among ranks; weights and state-dict keys are the same."""

    spec = WanSpec()
