# SPDX-License-Identifier: Apache-2.0
"""The video autoencoder of LTX-2.0 (its decoder pads by reflection), LTX-2.3 and LTX-2.5 (zeros)."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKLLTX2Video
from diffusers.models.autoencoders.vae import DecoderOutput
from diffusers.utils.accelerate_utils import apply_forward_hook

from ..config import VaeParallelMode
from ..errors import GeometryError, UnsupportedError
from ..geometry import AxisScale, AxisTiling
from .mixin import DistributedVaeMixin
from .policy import Decision, Strategy
from .spec import PLAIN, CallOptions, FamilySpec, Operation, Vae
from .state import ParallelState


class Ltx2Spec(FamilySpec):
    """Decode tiles count latents, encode tiles pixels; one network call takes all frames of a tile.

    Time is not cut. Diffusers cuts it where ``use_framewise_decoding`` is on, at encode too, and comes out one frame
    late; so a shard takes all frames instead, and tiles refuse such a clip (`check_tiles`).
    """

    name = "AutoencoderKLLTX2Video"
    modes = frozenset(VaeParallelMode)

    @property
    def base_class(self) -> type:
        return AutoencoderKLLTX2Video

    def tiling(self, vae: Vae, operation: Operation) -> tuple[AxisTiling, AxisTiling, AxisTiling]:
        space, time = _ratios(vae, operation)
        thinnest = _thinnest(vae, operation)
        height, width = (_axis(vae, operation, axis, space, thinnest) for axis in ("height", "width"))
        return _time_axis(operation, time), height, width

    def is_tiled(self, vae: Vae, operation: Operation, shape: tuple[int, ...]) -> bool:
        unit = vae.spatial_compression_ratio if operation is Operation.DECODE else 1
        height, width = shape[-2:]
        larger = height > vae.tile_sample_min_height // unit or width > vae.tile_sample_min_width // unit
        return bool(vae.use_tiling and larger) or self.is_framewise(vae, operation, shape[-3])

    def is_framewise(self, vae: Vae, operation: Operation, frames: int) -> bool:
        """Whether diffusers would cut ``frames`` in time; it reads the flag of decoding for both operations."""
        unit = vae.temporal_compression_ratio if operation is Operation.DECODE else 1
        return bool(vae.use_framewise_decoding and frames > vae.tile_sample_min_num_frames // unit)

    def check(self, vae: Vae, operation: Operation, shape: tuple[int, ...]) -> None:
        self.check_dims(operation, shape)
        space, time = _ratios(vae, operation)
        thinnest = _thinnest(vae, operation)
        frames, height, width = shape[-3:]
        if operation is Operation.DECODE:
            if min(height, width) < thinnest:
                raise GeometryError(
                    f"{self.name} cannot decode {height}x{width} latents: its padding needs at least {thinnest} "
                    f"along both axes, {thinnest * space} pixels"
                )
            return
        if (frames - 1) % time:
            below = max(1, (frames - 1) // time * time + 1)
            raise GeometryError(f"{self.name} encodes 1 + {time}k frames, not {frames}; give {below} or {below + time}")
        if min(height, width) < thinnest * space or height % space or width % space:
            raise GeometryError(
                f"{self.name} cannot encode {height}x{width} pixels: both must be at least {thinnest * space} "
                f"and multiples of {space}"
            )

    def check_tiles(self, vae: Vae, operation: Operation, frames: int) -> None:
        """Refuse what tiles on several ranks cannot do as one rank does.

        Raises:
            UnsupportedError: says what can.
        """
        shard = "or take a spatial shard (vae_parallel_mode spatial_shard_height, _width or _grid)"
        if self.is_framewise(vae, operation, frames):
            raise UnsupportedError(
                f"{self.name} would {operation} this clip in several stretches of time, which ranks do not share; "
                f"set use_framewise_decoding to False, {shard}"
            )
        if self.draws(vae, operation):
            raise UnsupportedError(
                f"the decoder of {self.name} injects noise (decoder_inject_noise), which tiles draw one after the "
                f"other: ranks would draw other noise than one rank; decode on one rank, {shard}"
            )

    def leave_whole(self, vae: Vae) -> None:
        vae.use_tiling = vae.use_framewise_encoding = vae.use_framewise_decoding = False

    def draws(self, vae: Vae, operation: Operation) -> bool:
        blocks = vae.decoder.modules() if operation is Operation.DECODE else ()
        return any(getattr(block, "per_channel_scale1", None) is not None for block in blocks)

    def stand_ins(self, vae: Vae, operation: Operation, x: torch.Tensor) -> dict[str, Any]:
        timed = operation is Operation.DECODE and vae.config.timestep_conditioning
        return {"temb": x.new_empty(x.shape[0])} if timed else {}

    def channels(self, vae: Vae, operation: Operation) -> int:
        return int(2 * vae.config.latent_channels if operation is Operation.ENCODE else vae.config.out_channels)

    def encode_tile(self, vae: Vae, x: torch.Tensor, options: CallOptions = PLAIN) -> torch.Tensor:
        options.between(0, 1)
        moments: torch.Tensor = vae.encoder(x, **options.arguments)
        return moments

    def decode_tile(self, vae: Vae, z: torch.Tensor, options: CallOptions = PLAIN) -> torch.Tensor:
        options.between(0, 1)
        sample: torch.Tensor = vae.decoder(z, **options.arguments)
        return sample


def _ratios(vae: Vae, operation: Operation) -> tuple[int, int]:
    """Pixels and frames that make a latent, from the strides of the network's own blocks.

    Raises:
        GeometryError: the ratios that diffusers counts with are others, so that it would cut and merge in wrong places.
    """
    encode = operation is Operation.ENCODE
    network = vae.encoder if encode else vae.decoder
    if network.patch_size_t != 1:
        raise GeometryError(f"patch_size_t is {network.patch_size_t}, but the networks have channels for 1 alone")
    space, time = network.patch_size, 1
    for block in network.down_blocks if encode else network.up_blocks:
        for scaler in (block.downsamplers if encode else block.upsamplers) or ():
            frames, rows, _ = scaler.stride if hasattr(scaler, "stride") else scaler.conv.stride
            space, time = space * rows, time * frames
    counted = vae.spatial_compression_ratio, vae.temporal_compression_ratio
    if counted != (space, time):
        raise GeometryError(
            f"the {'encoder' if encode else 'decoder'} makes a latent of {space} pixels and {time} frames, but the "
            f"configuration counts with {counted[0]} and {counted[1]}; if that is wrong, give "
            f"spatial_compression_ratio={space} and temporal_compression_ratio={time}"
        )
    return space, time


def _thinnest(vae: Vae, operation: Operation) -> int:
    """Latents that the padding needs along an axis: reflection cannot pad one row by one, deepest of all at latents."""
    network = vae.encoder if operation is Operation.ENCODE else vae.decoder
    return 2 if network.conv_in.conv.padding_mode == "reflect" else 1


def _time_axis(operation: Operation, ratio: int) -> AxisTiling:
    """All frames in one stretch."""
    if operation is Operation.ENCODE:
        return AxisTiling(None, scale=AxisScale(down=ratio, causal=True))
    return AxisTiling(None, scale=AxisScale(up=ratio, causal=True))


def _axis(vae: Vae, operation: Operation, axis: str, ratio: int, thinnest: int) -> AxisTiling:
    size = getattr(vae, f"tile_sample_min_{axis}")
    stride = getattr(vae, f"tile_sample_stride_{axis}")
    for name, value, least in (("size", size, thinnest * ratio), ("stride", stride, ratio)):
        if not isinstance(value, int) or value % ratio or value < least:
            near = max(least, int(value) // ratio * ratio)
            raise GeometryError(
                f"tile {axis} {name} of {value!r} pixels must be a multiple of the compression ratio {ratio}, at least "
                f"{least}; nearest: {near} or {near + ratio}"
            )
    if operation is Operation.ENCODE:
        return AxisTiling(size, stride, AxisScale(down=ratio), minimum=thinnest * ratio)
    return AxisTiling(size // ratio, stride // ratio, AxisScale(up=ratio), minimum=thinnest)


class DistributedAutoencoderKLLTX2Video(DistributedVaeMixin, AutoencoderKLLTX2Video):
    """`diffusers.AutoencoderKLLTX2Video` whose work is shared among ranks; weights and state-dict keys are the same."""

    spec = Ltx2Spec()

    def decode(
        self, z: torch.Tensor, temb: torch.Tensor | None = None, causal: bool | None = None, return_dict: bool = True
    ) -> Any:
        """Collective when distributed. As diffusers, and slices of a batch get their own timestep, which it mixes up.

        Raises:
            GeometryError: slices are on and ``temb`` is not one timestep for each of the batch.
        """
        if temb is None or self._vae_parallel is None or not self.use_slicing or z.shape[0] == 1:
            return super().decode(z, temb, causal=causal, return_dict=return_dict)
        with self._one_call(Operation.DECODE, z, (temb, causal)):
            sample = self._decode_slices(z, temb, causal)
        return DecoderOutput(sample=sample) if return_dict else (sample,)

    @apply_forward_hook
    def _decode_slices(self, z: torch.Tensor, temb: torch.Tensor, causal: bool | None) -> torch.Tensor:
        if temb.shape[:1] != z.shape[:1]:
            raise GeometryError(f"{len(z)} latents need a timestep each, but temb has the shape {tuple(temb.shape)}")
        pairs = zip(z.split(1), temb.split(1), strict=True)
        return torch.cat([self._decode(one, timestep, causal=causal).sample for one, timestep in pairs])

    def tiled_encode(self, x: torch.Tensor, causal: bool | None = None) -> torch.Tensor:
        """Collective when distributed. See `DistributedVaeMixin.tiled_encode`."""
        if self._vae_parallel is None:
            moments: torch.Tensor = AutoencoderKLLTX2Video.tiled_encode(self, x, causal=causal)
            return moments
        return self.encode_shared(x, causal=causal)

    def tiled_decode(  # type: ignore[override]
        self, z: torch.Tensor, temb: torch.Tensor | None = None, causal: bool | None = None, return_dict: bool = True
    ) -> Any:
        """Collective when distributed. See `DistributedVaeMixin.tiled_decode`."""
        if self._vae_parallel is None:
            return AutoencoderKLLTX2Video.tiled_decode(self, z, temb, causal=causal, return_dict=return_dict)
        sample = self.decode_shared(z, temb=temb, causal=causal)
        return DecoderOutput(sample=sample) if return_dict else (sample,)

    def decide(
        self, state: ParallelState, operation: Operation, seen: tuple[int, int, int] | None, batch: int = 1
    ) -> Decision:
        decision = super().decide(state, operation, seen, batch)
        if seen is not None and decision.strategy is Strategy.TILE:
            self.spec.check_tiles(self, operation, seen[0])
        return decision

    def _temporal_tiled_encode(self, x: torch.Tensor, causal: bool | None = None) -> Any:
        if self._vae_parallel is None:
            return super()._temporal_tiled_encode(x, causal=causal)
        return self.tiled_encode(x, causal=causal)

    def _temporal_tiled_decode(
        self, z: torch.Tensor, temb: torch.Tensor | None, causal: bool | None = None, return_dict: bool = True
    ) -> Any:
        if self._vae_parallel is None:
            return super()._temporal_tiled_decode(z, temb, causal=causal, return_dict=return_dict)
        return self.tiled_decode(z, temb, causal=causal, return_dict=return_dict)
