# SPDX-License-Identifier: Apache-2.0
"""Autoencoders whose networks take a few frames at a time and keep what the next ones need in a cache."""

from __future__ import annotations

import torch

from ..config import VaeParallelMode
from ..errors import GeometryError
from ..geometry import AxisScale, AxisTiling
from .spec import PLAIN, CallOptions, FamilySpec, Operation, Vae


class CausalCacheSpec(FamilySpec):
    """The first frame goes through alone; the cache lies on the module and is dropped after each tile.

    Units as in diffusers: decode tiles count latents; encode tiles count pixels as the encoder sees them.

    Class attributes:
        tells_first_chunk: Whether the decoder is told which of its calls has the first frame.
    """

    modes = frozenset(VaeParallelMode)
    chunked = True
    tells_first_chunk: bool = False

    def patch(self, vae: Vae) -> int:
        """Pixels along an axis that are folded into channels before they reach the encoder."""
        return 1

    def unit(self, vae: Vae) -> int:
        """Heights and widths in pixels that can be encoded are multiples of this."""
        return 1

    def tiling(self, vae: Vae, operation: Operation) -> tuple[AxisTiling, AxisTiling, AxisTiling]:
        time = _time_ratio(vae)
        if operation is Operation.ENCODE:
            whole = AxisTiling(None, scale=AxisScale(down=time, causal=True))
        else:
            whole = AxisTiling(None, scale=AxisScale(up=time, causal=True))
        return whole, self._axis(vae, operation, "height"), self._axis(vae, operation, "width")

    def is_tiled(self, vae: Vae, operation: Operation, shape: tuple[int, ...]) -> bool:
        unit = vae.spatial_compression_ratio if operation is Operation.DECODE else 1
        height, width = shape[-2:]
        larger = height > vae.tile_sample_min_height // unit or width > vae.tile_sample_min_width // unit
        return bool(vae.use_tiling and larger)

    def check(self, vae: Vae, operation: Operation, shape: tuple[int, ...]) -> None:
        self.check_dims(operation, shape)
        if operation is Operation.DECODE:
            return
        frames, height, width = shape[-3:]
        step = _frame_step(vae)
        if (frames - 1) % step:
            below = (frames - 1) // step * step + 1
            raise GeometryError(
                f"{self.name} encodes 1 + {step}k frames and would ignore the rest of {frames}; "
                f"give {below} or {below + step}"
            )
        smallest = vae.spatial_compression_ratio
        unit = self.unit(vae)
        if min(height, width) < smallest or height % unit or width % unit:
            raise GeometryError(
                f"{self.name} cannot encode {height}x{width} pixels: both must be at least {smallest} "
                f"and multiples of {unit}"
            )

    def seen_extents(self, vae: Vae, operation: Operation, shape: tuple[int, ...]) -> tuple[int, int, int]:
        time, height, width = shape[-3:]
        patch = self.patch(vae) if operation is Operation.ENCODE else 1
        return time, height // patch, width // patch

    def network_calls(self, vae: Vae, operation: Operation, extents: tuple[int, int, int]) -> int:
        if operation is Operation.DECODE:
            return extents[0]
        return AxisScale(down=_frame_step(vae), causal=True).length(extents[0])

    def attends(self, vae: Vae) -> bool:
        return True

    def encode_tile(self, vae: Vae, x: torch.Tensor, options: CallOptions = PLAIN) -> torch.Tensor:
        vae.clear_cache()
        moments = []
        cuts = _cuts(x.shape[2], options.chunk * _frame_step(vae))
        for done, (start, stop) in enumerate(cuts):
            options.between(done, len(cuts))
            vae._enc_conv_idx = [0]
            features = vae.encoder(x[:, :, start:stop], feat_cache=vae._enc_feat_map, feat_idx=vae._enc_conv_idx)
            moments.append(vae.quant_conv(features))
        vae.clear_cache()
        return torch.cat(moments, dim=2)

    def decode_tile(self, vae: Vae, z: torch.Tensor, options: CallOptions = PLAIN) -> torch.Tensor:
        vae.clear_cache()
        frames = []
        cuts = _cuts(z.shape[2], options.chunk)
        for done, (start, stop) in enumerate(cuts):
            options.between(done, len(cuts))
            vae._conv_idx = [0]
            latent = vae.post_quant_conv(z[:, :, start:stop])
            told = {"first_chunk": start == 0} if self.tells_first_chunk else {}
            frames.append(vae.decoder(latent, feat_cache=vae._feat_map, feat_idx=vae._conv_idx, **told))
        vae.clear_cache()
        return torch.cat(frames, dim=2)

    def finish_decode(self, vae: Vae, merged: torch.Tensor) -> torch.Tensor:
        return torch.clamp(merged, min=-1.0, max=1.0)

    def reset(self, vae: Vae) -> None:
        vae.clear_cache()

    def _axis(self, vae: Vae, operation: Operation, axis: str) -> AxisTiling:
        size = getattr(vae, f"tile_sample_min_{axis}")
        stride = getattr(vae, f"tile_sample_stride_{axis}")
        ratio = vae.spatial_compression_ratio
        inner = ratio // self.patch(vae)
        if not (isinstance(size, int) and isinstance(stride, int)):
            raise GeometryError(f"tile {axis} size {size!r} and stride {stride!r} must be whole pixels")
        if operation is Operation.ENCODE:
            return AxisTiling(size, stride, AxisScale(down=inner), minimum=inner)
        for name, value in (("size", size), ("stride", stride)):
            if value % ratio or value < ratio:
                near = max(ratio, value // ratio * ratio)
                raise GeometryError(
                    f"tile {axis} {name} of {value} pixels is not a multiple of the compression ratio {ratio}, which "
                    f"would shift the picture; nearest: {near} or {near + ratio}"
                )
        return AxisTiling(size // ratio, stride // ratio, AxisScale(up=inner))


def _cuts(frames: int, step: int) -> list[tuple[int, int]]:
    """The first frame alone, then ``step`` at a time: the causal cache wants it so."""
    starts = [0, *range(1, frames, step)]
    return list(zip(starts, [*starts[1:], frames], strict=True))


def _time_ratio(vae: Vae) -> int:
    return int(2 ** sum(map(bool, vae.config.temperal_downsample)))


def _frame_step(vae: Vae) -> int:
    """Frames that diffusers encodes at a time after the first; what is left over it would drop."""
    return max(4, _time_ratio(vae))
