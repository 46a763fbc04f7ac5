# SPDX-License-Identifier: Apache-2.0
"""The autoencoder of SDXL, FLUX.1, Z-Image and many more for pictures, with and without convolutions of latents."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from diffusers import AutoencoderKL
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput

from ..config import TileExtent, VaeParallelMode
from ..errors import GeometryError
from ..geometry import AxisScale, AxisTiling
from .mixin import DistributedVaeMixin
from .spec import PLAIN, CallOptions, FamilySpec, Operation, Vae

_ROUNDING = 1e-9


class KlSpec(FamilySpec):
    """Square tiles; encode counts pixels and decode latents, of the same windows.

    Diffusers has a tile size in pixels, one in latents, and the share of a tile that neighbours have in common. It
    rounds that share by itself wherever it uses it, so that its windows and what it keeps of them fit together only
    where the overlap is a whole number of latents. Here the stride is a whole number of latents, rounded down: the same
    where diffusers' numbers fit together.
    """

    name = "AutoencoderKL"
    modes = frozenset(VaeParallelMode)
    has_time = False

    @property
    def base_class(self) -> type:
        return AutoencoderKL

    def tiling(self, vae: Vae, operation: Operation) -> tuple[AxisTiling, AxisTiling, AxisTiling]:
        ratio, latents, stride = _ratio(vae), vae.tile_latent_min_size, _stride(vae)
        if operation is Operation.ENCODE:
            axis = AxisTiling(latents * ratio, stride * ratio, AxisScale(down=ratio), minimum=ratio)
        else:
            axis = AxisTiling(latents, stride, AxisScale(up=ratio))
        return AxisTiling(None), axis, axis

    def set_tiling(self, vae: Vae, size: TileExtent | None, stride: TileExtent | None) -> None:
        self.refuse_frames(size, stride)
        if size or stride:
            ratio = _ratio(vae)
            pixels = _side("size", size) if size else vae.tile_latent_min_size * ratio
            kept = max(1, int(pixels // ratio * (1 - vae.tile_overlap_factor)))
            step = _side("stride", stride) if stride else min(pixels, kept * ratio)
            AxisTiling(pixels, step, AxisScale(down=ratio))
            vae.tile_sample_min_size, vae.tile_latent_min_size = pixels, pixels // ratio
            vae.tile_overlap_factor = Fraction(pixels - step, pixels)  # floats lose a pixel in diffusers' own products
        vae.enable_tiling()
        self.check_tiling(vae)

    def is_tiled(self, vae: Vae, operation: Operation, shape: tuple[int, ...]) -> bool:
        limit = _tile_pixels(vae) if operation is Operation.ENCODE else vae.tile_latent_min_size
        return bool(vae.use_tiling and max(shape[-2:]) > limit)

    def check(self, vae: Vae, operation: Operation, shape: tuple[int, ...]) -> None:
        self.check_dims(operation, shape)
        smallest = _ratio(vae) if operation is Operation.ENCODE else 1
        if min(shape[-2:]) < smallest:
            raise GeometryError(
                f"{self.name} cannot {operation} {shape[-2]}x{shape[-1]}: both must be at least {smallest}"
            )

    def channels(self, vae: Vae, operation: Operation) -> int:
        return int(2 * vae.config.latent_channels if operation is Operation.ENCODE else vae.config.out_channels)

    def attends(self, vae: Vae) -> bool:
        return bool(vae.attn_processors)

    def encode_tile(self, vae: Vae, x: torch.Tensor, options: CallOptions = PLAIN) -> torch.Tensor:
        options.between(0, 1)
        moments: torch.Tensor = vae.encoder(x)
        return moments if vae.quant_conv is None else vae.quant_conv(moments)

    def decode_tile(self, vae: Vae, z: torch.Tensor, options: CallOptions = PLAIN) -> torch.Tensor:
        options.between(0, 1)
        sample: torch.Tensor = vae.decoder(z if vae.post_quant_conv is None else vae.post_quant_conv(z))
        return sample


def _ratio(vae: Vae) -> int:
    """Pixels that make a latent, along each axis."""
    return int(2 ** (len(vae.config.block_out_channels) - 1))


def _tile_pixels(vae: Vae) -> int:
    """Height and width of an encode tile as it is set; of a pair its first, as diffusers does for the latent size."""
    size = vae.tile_sample_min_size
    return size[0] if isinstance(size, (list, tuple)) else size


def _stride(vae: Vae) -> int:
    """Latents between the starts of neighbouring tiles.

    Raises:
        GeometryError: the three numbers that are set do not make tiles.
    """
    pixels, latents, overlap, ratio = _tile_pixels(vae), vae.tile_latent_min_size, vae.tile_overlap_factor, _ratio(vae)
    if not (isinstance(pixels, int) and isinstance(latents, int) and isinstance(overlap, (int, float, Fraction))):
        raise GeometryError(
            f"tile sizes {pixels!r} and {latents!r} must be whole, tile_overlap_factor {overlap!r} a number"
        )
    if latents < 1 or pixels // ratio != latents:
        raise GeometryError(
            f"a tile of {pixels} pixels and one of {latents} latents are not the same: {ratio} pixels make a latent; "
            "set tile_sample_min_size and tile_latent_min_size together"
        )
    stride = int(latents * (1 - float(overlap)) + _ROUNDING) if 0 <= overlap < 1 else 0
    if not stride:
        raise GeometryError(
            f"tile_overlap_factor {overlap} of {latents} latents leaves no latent from one tile to the next, or a gap; "
            "it must be at least 0 and below 1"
        )
    return stride


def _side(name: str, extent: TileExtent) -> int:
    if extent.height != extent.width:
        raise GeometryError(
            f"--vae-tile-{name} {extent}: tiles of this autoencoder are square; give {name}s that are equal"
        )
    return extent.height


class DistributedKlMixin(DistributedVaeMixin):
    """What diffusers' autoencoders of pictures have besides: `_tiled_encode`, and a deprecated `tiled_encode`."""

    def _encode(self, x: torch.Tensor) -> torch.Tensor:
        """Not diffusers', which cannot compare with a ``sample_size`` that is a pair."""
        if self._vae_parallel is None:
            return super()._encode(x)  # type: ignore[misc]
        if self.spec.is_tiled(self, Operation.ENCODE, tuple(x.shape)):
            return self.encode_shared(x)
        return self.spec.encode_tile(self, x)

    def _tiled_encode(self, x: torch.Tensor) -> torch.Tensor:
        """Collective when distributed. Moments of pixels, whole on every rank."""
        if self._vae_parallel is None:
            return super()._tiled_encode(x)  # type: ignore[misc]
        return self.encode_shared(x)

    def tiled_encode(self, x: torch.Tensor, return_dict: bool = True) -> Any:
        """Collective when distributed. The distribution of latents, as diffusers has it here; whole on every rank."""
        if self._vae_parallel is None:
            return super(DistributedVaeMixin, self).tiled_encode(x, return_dict=return_dict)  # type: ignore[misc]
        posterior = DiagonalGaussianDistribution(self.encode_shared(x))
        return AutoencoderKLOutput(latent_dist=posterior) if return_dict else (posterior,)


class DistributedAutoencoderKL(DistributedKlMixin, AutoencoderKL):
    """`diffusers.AutoencoderKL` whose tiles are shared among ranks; weights and state-dict keys are the same."""

    spec = KlSpec()
