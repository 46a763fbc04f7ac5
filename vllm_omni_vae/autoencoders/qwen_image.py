# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image (also with an alpha channel, for layers) and Qwen-Image 2.1."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLQwenImage21

from ..errors import GeometryError
from .causal_cache import CausalCacheSpec
from .mixin import DistributedVaeMixin
from .spec import Operation, Vae
from .wan import WanSpec


class QwenImageSpec(CausalCacheSpec):
    """Pictures are videos of one frame. Merged tiles are clamped, as diffusers clamps only un-tiled samples."""

    name = "AutoencoderKLQwenImage"

    @property
    def base_class(self) -> type:
        return AutoencoderKLQwenImage

    def channels(self, vae: Vae, operation: Operation) -> int:
        return int(2 * vae.config.z_dim if operation is Operation.ENCODE else vae.config.input_channels)

    def finish_tiles(self, vae: Vae, sample: torch.Tensor) -> torch.Tensor:
        return torch.clamp(sample, min=-1.0, max=1.0)


class QwenImage21Spec(WanSpec):
    """Wan's residual network with convolutions that see one frame: it has no video."""

    name = "AutoencoderKLQwenImage21"

    @property
    def base_class(self) -> type:
        return AutoencoderKLQwenImage21

    def check(self, vae: Vae, operation: Operation, shape: tuple[int, ...]) -> None:
        self.check_dims(operation, shape)
        if shape[2] != 1:
            raise GeometryError(f"{self.name} {operation}s single frames; this input has {shape[2]}")
        super().check(vae, operation, shape)


class DistributedAutoencoderKLQwenImage(DistributedVaeMixin, AutoencoderKLQwenImage):
    """`diffusers.AutoencoderKLQwenImage` shared among ranks; weights and state-dict keys are the same."""

    spec = QwenImageSpec()


class DistributedAutoencoderKLQwenImage21(DistributedVaeMixin, AutoencoderKLQwenImage21):
    """`diffusers.AutoencoderKLQwenImage21` shared among ranks; weights and state-dict keys are the same."""

    spec = QwenImage21Spec()
