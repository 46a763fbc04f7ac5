# SPDX-License-Identifier: Apache-2.0
"""The diffusion decoder of LTX-2.5, which makes pixels of the latents of the video autoencoder of LTX-2."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import torch
from diffusers import LTX2VideoDiffusionDecoderModel
from diffusers.utils.torch_utils import randn_tensor

from ..config import TileExtent, VaeParallelMode
from ..errors import GeometryError, UnsupportedError
from ..geometry import AxisScale, AxisTiling, TileGrid
from ..sharding import SpatialShard
from ..tiling import DistributedOperator, TileTask
from .attention_windows import windows_on
from .mixin import DistributedVaeMixin
from .spec import PLAIN, CallOptions, FamilySpec, Operation, Vae
from .tile_noise import NoiseOfItsOwn, NoiseOfOneCanvas, TileNoise

Triple = tuple[int, int, int]

_AXES = ("num_frames", "height", "width")
_WORDS = ("time", "height", "width")


class Ltx2DiffusionSpec(FamilySpec):
    """Tiles are cut where diffusers cuts them: not of the latents, but of what enters the last up-sampling stage.

    The stages before it see all latents, on every rank that has a tile. A cell of their output is a few pixels and
    frames; `tiling` and `grid` count cells. Time is always cut with height and width. The networks are told where a
    window lies in time, so windows need no lead.

    A shard is extended, for each attention, by what its windows reach of the neighbours' positions. So each piece holds
    at least one window of each stage, `least_latents`.

    There is no encoder. What is said of encode is arithmetic alone: how many latents a clip of so many pixels has.
    """

    name = "LTX2VideoDiffusionDecoderModel"
    modes = frozenset(VaeParallelMode)
    operations = (Operation.DECODE,)
    no_pieces = (
        "its first stages take all latents on every rank, and it denoises with noise and angles that belong to places "
        "of the whole picture"
    )

    @property
    def base_class(self) -> type:
        return LTX2VideoDiffusionDecoderModel

    def tiling(self, vae: Vae, operation: Operation) -> tuple[AxisTiling, AxisTiling, AxisTiling]:
        _, pixels = _cells(vae)
        if operation is Operation.ENCODE:
            time = AxisTiling(None, scale=AxisScale(down=vae.temporal_compression_ratio, causal=True))
            space = AxisTiling(None, scale=AxisScale(down=vae.spatial_compression_ratio))
            return time, space, space
        early, late, growth = _tile_kernels(vae)
        minimum = [max(before, -(-after // g)) for before, after, g in zip(early, late, growth, strict=True)]
        # The first window in time makes one frame of its first cell.
        least = [max(minimum[0], 1 - (1 - late[0]) // growth[0]), *minimum[1:]]
        time, height, width = (_axis(vae, axis, pixels[axis], least[axis], minimum[axis]) for axis in range(3))
        return time, height, width

    def grid(self, vae: Vae, operation: Operation, extents: Triple) -> TileGrid:
        """As `tiling`, over cells; an axis that is not longer than a tile is one window."""
        if operation is Operation.ENCODE:
            return super().grid(vae, operation, extents)
        (frames, rows, cols), _ = _cells(vae)
        cells = 1 + (extents[0] - 1) * frames, extents[1] * rows, extents[2] * cols
        time, height, width = (
            axis if axis.size is None or axis.size < extent else dataclasses.replace(axis, size=None, minimum=1)
            for axis, extent in zip(self.tiling(vae, operation), cells, strict=True)
        )
        return TileGrid((time, height, width), cells)

    def is_tiled(self, vae: Vae, operation: Operation, shape: tuple[int, ...]) -> bool:
        ratios = (vae.temporal_compression_ratio, *(vae.spatial_compression_ratio,) * 2)
        tile = (getattr(vae, f"tile_sample_min_{axis}") // ratio for axis, ratio in zip(_AXES, ratios, strict=True))
        return bool(vae.use_tiling and any(n > most for n, most in zip(shape[-3:], tile, strict=True)))

    def set_tiling(self, vae: Vae, size: TileExtent | None, stride: TileExtent | None) -> None:
        """As every family, and lengths in frames.

        Raises:
            GeometryError: they cannot be used.
        """
        chosen: dict[str, Any] = {}
        for what, extent in (("min", size), ("stride", stride)):
            if extent:
                lengths = (extent.frames, extent.height, extent.width)
                chosen |= {f"tile_sample_{what}_{axis}": n for axis, n in zip(_AXES, lengths, strict=True) if n}
        vae.enable_tiling(**chosen)
        self.check_tiling(vae)

    def check(self, vae: Vae, operation: Operation, shape: tuple[int, ...]) -> None:
        self.check_operation(operation)
        self.check_dims(operation, shape)
        least = self.least_latents(vae, operation)
        if any(n < most for n, most in zip(shape[-3:], least, strict=True)):
            given, taken = (f"{time} of {height}x{width}" for time, height, width in (shape[-3:], least))
            frames, height, width = self.whole_shape(vae, operation, (1, 1, *least))[-3:]
            raise GeometryError(
                f"{self.name} cannot decode {given} latents (frames of rows x columns): its attention takes at least "
                f"{taken}, which is a clip of {frames} frames of {height}x{width}"
            )

    def least_latents(self, vae: Vae, operation: Operation) -> Triple:
        config, pad = vae.config, vae.decoder.trailing_pad_latent_frames
        frames, rows, cols, growth = [1], [1], [1], (1, 1, 1)
        padded = [(kernel, pad) for kernel in config.decoder_stage_kernels] + [(config.decoder_stage5_kernel, 0)]
        for (kernel, more), stride in zip(padded, [*config.decoder_upsample_strides, (1, 1, 1)], strict=True):
            frames.append(1 - more - (1 - kernel[0]) // growth[0])
            rows.append(-(-kernel[1] // growth[1]))
            cols.append(-(-kernel[2] // growth[2]))
            growth = growth[0] * stride[0], growth[1] * stride[1], growth[2] * stride[2]
        return max(frames), max(rows), max(cols)

    def cut(self, x: torch.Tensor, cell: Any) -> torch.Tensor:
        """All of it: a tile reads what the stages before the last make of all latents."""
        return x

    def tile_unit(self, vae: Vae, operation: Operation) -> int:
        return _cells(vae)[0][1] if operation is Operation.DECODE else super().tile_unit(vae, operation)

    def draws(self, vae: Vae, operation: Operation) -> bool:
        return True

    def channels(self, vae: Vae, operation: Operation) -> int:
        return int(2 * vae.config.latent_channels if operation is Operation.ENCODE else vae.config.out_channels)

    def encode_tile(self, vae: Vae, x: torch.Tensor, options: CallOptions = PLAIN) -> torch.Tensor:
        raise UnsupportedError(f"{self.name} has no encoder")

    def decode_tile(self, vae: Vae, z: torch.Tensor, options: CallOptions = PLAIN) -> torch.Tensor:
        """Sample of one tile.

        Args:
            vae: The decoder.
            z: Cells of the tile, ``(B, T, H, W, C)``, and in the last stretch of time those that diffusers adds.
            options: With the arguments ``noise``, of the sample's shape, ``steps`` of denoising, and whether the tile
                is in the ``first`` and the ``last`` stretch of time.
        """
        options.between(0, 1)
        given = options.arguments
        context = vae.decoder.forward_stage_4(z, drop_leading_frame=given["first"], crop_trailing_ghost=given["last"])
        sample: torch.Tensor = vae.decoder.denoise(context, given["noise"], given["steps"])
        return sample

    def run_piece(
        self, vae: Vae, operation: Operation, shard: SpatialShard, x: torch.Tensor, options: CallOptions
    ) -> torch.Tensor:
        """See `FamilySpec.run_piece`; with the arguments ``noise`` of the whole sample, and ``num_inference_steps``.

        The context of the shard is not entered: besides attention, every position is computed by itself.
        """
        options.between(0, 1)
        noise = shard.layout.local(options.arguments["noise"], vae.spatial_compression_ratio)
        with windows_on(vae, shard.comm, shard.layout):
            context = vae.decoder.forward_stage_4(vae.decoder.forward_stages_1_to_3(x))
            sample: torch.Tensor = vae.decoder.denoise(context, noise, _steps(vae, options.arguments))
        return sample

    @contextlib.contextmanager
    def countable(self, vae: Vae) -> Iterator[None]:
        """Attention makes its result and nothing else, as the kernel does that is meant for it.

        Flex attention, which is the default, can neither be counted nor run without values.
        """
        before = vae.attn_processors
        vae.set_attn_processor(_NoAttention())
        try:
            yield
        finally:
            vae.set_attn_processor(before)


class _NoAttention:
    """Makes room for the result of attention; a processor, as diffusers calls it."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, block_mask: object = None) -> torch.Tensor:
        _, _, value = attn.project_qkv(hidden_states)
        attended: torch.Tensor = attn.to_out[0](torch.empty_like(value).flatten(-2))
        return attended


def _steps(vae: Vae, arguments: Mapping[str, Any]) -> int:
    return int(arguments["num_inference_steps"] or vae.decoder.default_num_inference_steps)


def _cells(vae: Vae) -> tuple[Triple, Triple]:
    """Cells of a latent, and frames and pixels of a cell, along time, height and width.

    Raises:
        GeometryError: the ratios that diffusers counts with are others, or time does not grow as it reckons.
    """
    *early, last = (up.stride for up in vae.decoder.upsamples)
    patch = (1, vae.decoder.patch_size, vae.decoder.patch_size)
    per_latent = prod(s[0] for s in early), prod(s[1] for s in early), prod(s[2] for s in early)
    pixels = last[0] * patch[0], last[1] * patch[1], last[2] * patch[2]
    made = tuple(n * p for n, p in zip(per_latent, pixels, strict=True))
    counted = (vae.temporal_compression_ratio, *(vae.spatial_compression_ratio,) * 2)
    if made != counted:
        raise GeometryError(
            f"the decoder makes {made[0]} frames of {made[1]}x{made[2]} pixels of a latent, but the configuration "
            f"counts with {counted[0]} of {counted[1]}x{counted[2]}; correct temporal_compression_ratio and "
            "spatial_compression_ratio"
        )
    if any(stride[0] not in (1, 2) for stride in (*early, last)):
        raise GeometryError(f"decoder_upsample_strides of {made[0]} frames must be made of steps of 1 and 2 in time")
    return per_latent, pixels


def _tile_kernels(vae: Vae) -> tuple[Triple, Triple, Triple]:
    """Attention windows of the last up-sampling stage and of the denoiser, and how far the map grows between them."""
    config = vae.config
    return config.decoder_stage_kernels[-1], config.decoder_stage5_kernel, vae.decoder.upsamples[-1].stride


def _axis(vae: Vae, axis: int, unit: int, least: int, minimum: int) -> AxisTiling:
    """Windows in cells of ``unit`` frames or pixels, of at least ``least``; a leftover below ``minimum`` is merged."""
    name, units = _WORDS[axis], "pixels" if axis else "frames"
    size, stride = (getattr(vae, f"tile_sample_{what}_{_AXES[axis]}") for what in ("min", "stride"))
    for what, value, most in (("size", size, least), ("stride", stride, 1)):
        if not isinstance(value, int) or value % unit or value < most * unit:
            near = max(most, int(value) // unit) * unit
            raise GeometryError(
                f"tile {name} {what} of {value!r} {units} must be a multiple of {unit}, at least {most * unit}; "
                f"nearest: {near} or {near + unit}"
            )
    if stride > size:
        raise GeometryError(
            f"tile {name} stride of {stride} {units} is larger than the tile size of {size}, which would leave gaps; "
            f"give a stride of {size} or less, or a size of {stride} or more"
        )
    return AxisTiling(size // unit, stride // unit, AxisScale(up=unit, causal=axis == 0), minimum, placed=axis == 0)


@dataclasses.dataclass(slots=True)
class _Decode:
    """One tiled decode on one rank.

    Attributes:
        grid: Its tiles.
        noise: What they begin with.
        steps: Steps of denoising.
        features: What enters the last up-sampling stage, once a tile has needed it.
    """

    grid: TileGrid
    noise: TileNoise
    steps: int
    features: torch.Tensor | None = None


class DistributedLTX2VideoDiffusionDecoderModel(DistributedVaeMixin, LTX2VideoDiffusionDecoderModel):
    """`diffusers.LTX2VideoDiffusionDecoderModel` whose work is shared among ranks; weights and state-dict keys are the
    same.

    It draws noise. Ranks must call with generators of equal state, or leave the default ones in equal state; otherwise
    all raise `DisagreementError`. Then every tile has the noise of diffusers' loop, however many ranks there are, and
    every rank's generator ends where one rank's would.
    """

    spec = Ltx2DiffusionSpec()

    def tiled_decode(  # type: ignore[override]
        self,
        z: torch.Tensor,
        generator: torch.Generator | list[torch.Generator] | None = None,
        num_inference_steps: int | None = None,
    ) -> torch.Tensor:
        """Collective when distributed. Bit-equal to diffusers' sequential tiles; the result is on the output rank."""
        if self._vae_parallel is None:
            alone: torch.Tensor = LTX2VideoDiffusionDecoderModel.tiled_decode(self, z, generator, num_inference_steps)
            return alone
        arguments: dict[str, Any] = {"generator": generator, "num_inference_steps": num_inference_steps}
        extents = self.spec.extents(z.shape)
        if self.decide(self._vae_parallel, Operation.DECODE, extents, z.shape[0]).sharded:
            # All of it on every rank that calls, so that the generators end where one rank's would.
            arguments["noise"] = _draw(z, generator)(self.spec.whole_shape(self, Operation.DECODE, tuple(z.shape)))
        return self.decode_shared(z, **arguments)

    def tile_exec(self, task: TileTask, *, decode: _Decode) -> torch.Tensor:  # type: ignore[override]
        """Decode one tile of ``decode``; this rank's tiles come in order."""
        if decode.features is None:
            decode.features = self.decoder.forward_stages_1_to_3(task.tensor)
        coord = task.grid_coord[0], task.grid_coord[1], task.grid_coord[2]
        time, height, width = decode.grid.cell(coord)
        last = time.stop == decode.grid.extents[0]
        frames = slice(time.start, None if last else time.stop)
        cells = decode.features[:, frames, height.start : height.stop, width.start : width.stop]
        arguments = {"noise": decode.noise.take(coord), "steps": decode.steps, "first": time.start == 0, "last": last}
        return self.spec.decode_tile(self, cells, CallOptions(arguments=arguments))

    @contextlib.contextmanager
    def operator(
        self, operation: Operation, x: torch.Tensor, arguments: dict[str, Any]
    ) -> Iterator[DistributedOperator]:
        steps = _steps(self, arguments)
        grid = self.spec.grid(self, operation, self.spec.extents(x.shape))
        # One step that predicts the sample itself never mixes its noise with it; other decodes must agree on it where
        # tiles overlap.
        alone = steps == 1 and self.decoder.model_output_type == "x0"
        kind = NoiseOfItsOwn if alone else NoiseOfOneCanvas
        noise = kind(grid, x.shape[0], self.decoder.out_channels, _draw(x, arguments["generator"]))
        decode = _Decode(grid, noise, steps)

        def run(task: TileTask) -> torch.Tensor:
            return self.tile_exec(task, decode=decode)

        try:
            yield DistributedOperator(self.tile_split, run, self.tile_merge, finish=self.tile_finish)
        finally:
            decode.noise.finish()


def _draw(like: torch.Tensor, generator: Any) -> Callable[[tuple[int, ...]], torch.Tensor]:
    """Noise of a shape, of the device and type of ``like``, as diffusers draws it."""

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        noise: torch.Tensor = randn_tensor(shape, generator=generator, device=like.device, dtype=like.dtype)
        return noise

    return draw
