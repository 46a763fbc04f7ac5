# SPDX-License-Identifier: Apache-2.0
"""The video autoencoder of LTX-2.0 (its decoder pads by reflection), LTX-2.3 and LTX-2.5 (zeros)."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from diffusers import AutoencoderKLLTX2Video
from diffusers.models.autoencoders.vae import DecoderOutput
from diffusers.utils.accelerate_utils import apply_forward_hook

from ..config import TileExtent, VaeParallelMode
from ..errors import GeometryError, UnsupportedError
from ..geometry import AxisScale, AxisTiling, TileGrid
from .mixin import DistributedVaeMixin
from .policy import Decision, Strategy
from .spec import PLAIN, CallOptions, FamilySpec, Operation, Vae
from .state import ParallelState


class Ltx2Spec(FamilySpec):
    """Decode tiles count latents and encode tiles pixels and frames; one network call takes all frames of a tile.

    Time is cut too where diffusers would cut it (`is_framewise`), and all tiles are then one pool; a shard takes all
    frames at once. Windows are diffusers': a later one reads the latent, or frame, before its own as well, because the
    network makes one frame, or latent, of the first that it sees. That one is dropped. Diffusers does so at encode, so
    that these tiles are equal to its own. At decode it drops the last frame instead, which leaves all that it keeps of
    later windows one frame late; these tiles keep the frames that an un-tiled decode has there.
    """

    name = "AutoencoderKLLTX2Video"
    modes = frozenset(VaeParallelMode)
    mends_tiles = True

    @property
    def base_class(self) -> type:
        return AutoencoderKLLTX2Video

    def tiling(self, vae: Vae, operation: Operation) -> tuple[AxisTiling, AxisTiling, AxisTiling]:
        space, time = _ratios(vae, operation)
        thinnest = _thinnest(vae, operation)
        height, width = (_axis(vae, operation, axis, space, thinnest) for axis in ("height", "width"))
        if not vae.use_framewise_decoding:
            return AxisTiling(None, scale=_time_scale(operation, time)), height, width
        size, stride = vae.tile_sample_min_num_frames, vae.tile_sample_stride_num_frames
        return _time_axis(operation, time, size, stride), height, width

    def grid(self, vae: Vae, operation: Operation, extents: tuple[int, int, int]) -> TileGrid:
        """As `tiling`, but whole along time, or along height and width of a clip cut in time, if diffusers cuts not."""
        time, height, width = self.tiling(vae, operation)
        if not self.is_framewise(vae, operation, extents[0]):
            time = dataclasses.replace(time, size=None)
        elif not self._is_cut_in_space(vae, operation, extents[1:]):
            height, width = (dataclasses.replace(axis, size=None) for axis in (height, width))
        return TileGrid((time, height, width), extents)

    def is_tiled(self, vae: Vae, operation: Operation, shape: tuple[int, ...]) -> bool:
        in_space = self._is_cut_in_space(vae, operation, shape[-2:])
        return in_space or self.is_framewise(vae, operation, shape[-3])

    def _is_cut_in_space(self, vae: Vae, operation: Operation, extents: tuple[int, ...]) -> bool:
        unit = vae.spatial_compression_ratio if operation is Operation.DECODE else 1
        height, width = extents
        larger = height > vae.tile_sample_min_height // unit or width > vae.tile_sample_min_width // unit
        return bool(vae.use_tiling and larger)

    def is_framewise(self, vae: Vae, operation: Operation, frames: int) -> bool:
        """Whether diffusers would cut ``frames`` in time.

        It goes by ``use_framewise_decoding`` at encode too, and so do tiles: one rank and several must cut alike, and
        encode as decode. ``use_framewise_encoding`` changes nothing.
        """
        unit = vae.temporal_compression_ratio if operation is Operation.DECODE else 1
        return bool(vae.use_framewise_decoding and frames > vae.tile_sample_min_num_frames // unit)

    def tiles_as_diffusers(self, vae: Vae, operation: Operation, shape: tuple[int, ...]) -> bool:
        """Not where diffusers is a frame late, nor where its last tile is too thin for the padding and it fails."""
        late = operation is Operation.DECODE and self.is_framewise(vae, operation, shape[-3])
        return not late and not self._leaves_too_thin(vae, operation, shape[-2:])

    def _leaves_too_thin(self, vae: Vae, operation: Operation, extents: tuple[int, ...]) -> bool:
        if not self._is_cut_in_space(vae, operation, extents):
            return False
        axes = zip(self.tiling(vae, operation)[1:], extents, strict=True)
        return any((extent - 1) % axis.stride + 1 < axis.minimum for axis, extent in axes)

    def set_tiling(self, vae: Vae, size: TileExtent | None, stride: TileExtent | None) -> None:
        """As every family; and lengths in frames, of either or both, switch the cutting of time on.

        Raises:
            GeometryError: they cannot be used.
        """
        frames, step = (given.frames if given else None for given in (size, stride))
        self.check_frames(vae, frames, step)
        size, stride = (given and dataclasses.replace(given, frames=None) for given in (size, stride))
        super().set_tiling(vae, size, stride)
        if frames or step:
            vae.tile_sample_min_num_frames = frames or vae.tile_sample_min_num_frames
            vae.tile_sample_stride_num_frames = step or vae.tile_sample_stride_num_frames
            vae.use_framewise_encoding = vae.use_framewise_decoding = True

    def check_frames(self, vae: Vae, size: int | None, stride: int | None) -> None:
        """Refuse lengths in frames with which time cannot be cut; None or 0 is what ``vae`` has, and of both no matter.

        Raises:
            GeometryError: with the nearest that can be used.
        """
        if size or stride:
            size, stride = size or vae.tile_sample_min_num_frames, stride or vae.tile_sample_stride_num_frames
            for operation in Operation:
                _time_axis(operation, _ratios(vae, operation)[1], size, stride)

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

    def check_tiles(self, vae: Vae, operation: Operation) -> None:
        """Refuse what tiles, or pieces, on several ranks cannot do as one rank does.

        Raises:
            UnsupportedError: says what can.
        """
        if self.draws(vae, operation):
            raise UnsupportedError(
                f"the decoder of {self.name} injects noise (decoder_inject_noise), which tiles draw one after the "
                "other: ranks would draw other noise than one rank; decode on one rank, or take a spatial shard "
                "(vae_parallel_mode spatial_shard_height, _width or _grid)"
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


def _time_scale(operation: Operation, ratio: int) -> AxisScale:
    up, down = (1, ratio) if operation is Operation.ENCODE else (ratio, 1)
    return AxisScale(up, down, causal=True)


def _time_axis(operation: Operation, ratio: int, size: Any, stride: Any) -> AxisTiling:
    """Windows of ``size`` frames; the frame that stands alone, or its latent, comes on top."""
    for name, value in (("size", size), ("stride", stride)):
        _check_length(f"tile time {name}", value, "frames", ratio, ratio)
    if stride > size:
        raise GeometryError(
            f"tile time stride of {stride} frames is larger than the tile time size of {size}, which would leave out "
            f"frames; give a stride of {size} or less, or a size of {stride} or more"
        )
    unit = 1 if operation is Operation.ENCODE else ratio
    return AxisTiling(size // unit, stride // unit, _time_scale(operation, ratio), lead=1)


def _check_length(what: str, value: Any, unit: str, ratio: int, least: int) -> None:
    if not isinstance(value, int) or value % ratio or value < least:
        near = max(least, int(value) // ratio * ratio)
        raise GeometryError(
            f"{what} of {value!r} {unit} must be a multiple of the compression ratio {ratio}, at least {least}; "
            f"nearest: {near} or {near + ratio}"
        )


def _axis(vae: Vae, operation: Operation, axis: str, ratio: int, thinnest: int) -> AxisTiling:
    size = getattr(vae, f"tile_sample_min_{axis}")
    stride = getattr(vae, f"tile_sample_stride_{axis}")
    for name, value, least in (("size", size, thinnest * ratio), ("stride", stride, ratio)):
        _check_length(f"tile {axis} {name}", value, "pixels", ratio, least)
    if operation is Operation.ENCODE:
        return AxisTiling(size, stride, AxisScale(down=ratio), minimum=thinnest * ratio)
    return AxisTiling(size // ratio, stride // ratio, AxisScale(up=ratio), minimum=thinnest)


class DistributedAutoencoderKLLTX2Video(DistributedVaeMixin, AutoencoderKLLTX2Video):
    """`diffusers.AutoencoderKLLTX2Video` whose work is shared among ranks; weights and state-dict keys are the same."""

    spec = Ltx2Spec()

    def enable_tiling(
        self,
        tile_sample_min_height: int | None = None,
        tile_sample_min_width: int | None = None,
        tile_sample_min_num_frames: int | None = None,
        tile_sample_stride_height: int | None = None,
        tile_sample_stride_width: int | None = None,
        tile_sample_stride_num_frames: int | None = None,
    ) -> None:
        """See `DistributedVaeMixin.enable_tiling`. As in diffusers, time is cut if ``use_framewise_decoding`` is set.

        Raises:
            GeometryError: what is wrong with the size and stride.
        """
        self.spec.check_frames(self, tile_sample_min_num_frames, tile_sample_stride_num_frames)
        super().enable_tiling(
            tile_sample_min_height,
            tile_sample_min_width,
            tile_sample_min_num_frames,
            tile_sample_stride_height,
            tile_sample_stride_width,
            tile_sample_stride_num_frames,
        )

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
        """Collective when distributed. See `DistributedVaeMixin.tiled_encode`; a long clip is cut in time too."""
        if self._vae_parallel is not None:
            return self.encode_shared(x, causal=causal)
        if self.mends(Operation.ENCODE, x):
            return self.run_tiles_alone(Operation.ENCODE, x, causal=causal)
        moments: torch.Tensor = AutoencoderKLLTX2Video.tiled_encode(self, x, causal=causal)
        return moments

    def tiled_decode(  # type: ignore[override]
        self, z: torch.Tensor, temb: torch.Tensor | None = None, causal: bool | None = None, return_dict: bool = True
    ) -> Any:
        """Collective when distributed. See `DistributedVaeMixin.tiled_decode`; a long clip is cut in time too."""
        if self._vae_parallel is not None:
            sample = self.decode_shared(z, temb=temb, causal=causal)
        elif self.mends(Operation.DECODE, z):
            sample = self.run_tiles_alone(Operation.DECODE, z, temb=temb, causal=causal)
        else:
            return AutoencoderKLLTX2Video.tiled_decode(self, z, temb, causal=causal, return_dict=return_dict)
        return DecoderOutput(sample=sample) if return_dict else (sample,)

    def decide(
        self,
        state: ParallelState,
        operation: Operation,
        seen: tuple[int, int, int] | None,
        batch: int = 1,
        mode: VaeParallelMode | None = None,
    ) -> Decision:
        decision = super().decide(state, operation, seen, batch, mode)
        if decision.strategy in (Strategy.TILE, Strategy.RANK_SPLIT):
            self.spec.check_tiles(self, operation)
        return decision

    def _temporal_tiled_encode(self, x: torch.Tensor, causal: bool | None = None) -> Any:
        if self._vae_parallel is None and not self.mends(Operation.ENCODE, x):
            return super()._temporal_tiled_encode(x, causal=causal)
        return self.tiled_encode(x, causal=causal)

    def _temporal_tiled_decode(
        self, z: torch.Tensor, temb: torch.Tensor | None, causal: bool | None = None, return_dict: bool = True
    ) -> Any:
        if self._vae_parallel is None and not self.mends(Operation.DECODE, z):
            return super()._temporal_tiled_decode(z, temb, causal=causal, return_dict=return_dict)
        return self.tiled_decode(z, temb, causal=causal, return_dict=return_dict)
