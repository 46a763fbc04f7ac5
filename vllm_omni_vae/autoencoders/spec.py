# SPDX-License-Identifier: Apache-2.0
"""What the shared code needs to know of one autoencoder family."""

from __future__ import annotations

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

import torch

from ..config import TileExtent, VaeParallelMode
from ..errors import GeometryError, UnsupportedError
from ..geometry import AxisTiling, TileGrid, Window, cut_for_ranks
from ..sharding import SpatialShard

Vae = Any
"""An instance of the family's diffusers class; diffusers ships no types."""


Between = Callable[[int, int], None]


def ignore(done: int, total: int) -> None:
    """Do nothing between network calls."""


@dataclasses.dataclass(frozen=True, slots=True)
class CallOptions:
    """How one input goes through the networks.

    Attributes:
        chunk: Latent frames that the network takes at a time after the first; 1 as in diffusers.
        between: Called with (done, all) network calls before each of them; it may raise to stop.
        arguments: Further arguments of the public call that the networks take, by name.
    """

    chunk: int = 1
    between: Between = ignore
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)


PLAIN = CallOptions()
"""As diffusers calls the networks."""


class Operation(StrEnum):
    """Which way through the autoencoder."""

    ENCODE = "encode"
    DECODE = "decode"

    @property
    def other(self) -> Operation:
        """The way back."""
        return Operation.DECODE if self is Operation.ENCODE else Operation.ENCODE


class FamilySpec(ABC):
    """Capabilities, geometry and the two single-tile functions of a family. Stateless; one instance each.

    Class attributes:
        name: What the family is called in tables and messages.
        modes: Strategies the family can run; anything else is refused when it is set.
        operations: Ways through the autoencoder that the family has.
        chunked: Whether the networks take a clip a few latent frames at a time, however many.
        has_time: Whether tensors are ``(B, C, T, H, W)``; else ``(B, C, H, W)``, and the extent of time counts as 1.
        mends_tiles: Whether the distributed class can run its own tiles on one rank too, where diffusers' are wrong.
        no_pieces: Why an operation cannot be split by rank; empty: it can.
    """

    name: str
    modes: frozenset[VaeParallelMode] = frozenset({VaeParallelMode.TILE, VaeParallelMode.AUTO})
    operations: tuple[Operation, ...] = tuple(Operation)
    chunked: bool = False
    has_time: bool = True
    mends_tiles: bool = False
    no_pieces: str = ""

    @property
    @abstractmethod
    def base_class(self) -> type:
        """The diffusers class."""

    @abstractmethod
    def tiling(self, vae: Vae, operation: Operation) -> tuple[AxisTiling, AxisTiling, AxisTiling]:
        """Tiling of time, height and width as it is set on ``vae``, in the units that the tiled function sees.

        Raises:
            GeometryError: the tile size and stride that are set cannot be used.
        """

    @abstractmethod
    def is_tiled(self, vae: Vae, operation: Operation, shape: tuple[int, ...]) -> bool:
        """Whether diffusers takes its tiled path for this public input ``shape``: pixels or latents."""

    @abstractmethod
    def check(self, vae: Vae, operation: Operation, shape: tuple[int, ...]) -> None:
        """Refuse a public input that the family cannot do exactly.

        Raises:
            GeometryError: with what is possible instead.
        """

    @abstractmethod
    def channels(self, vae: Vae, operation: Operation) -> int:
        """Channels that one tile yields."""

    def network_calls(self, vae: Vae, operation: Operation, extents: tuple[int, int, int]) -> int:
        """How often the encoder or decoder network runs for one tile of ``extents``; progress counts these."""
        return 1

    @abstractmethod
    def encode_tile(self, vae: Vae, x: torch.Tensor, options: CallOptions = PLAIN) -> torch.Tensor:
        """Moments of one tile, from a clean state; ``x`` is pixels as the tiled function sees them."""

    @abstractmethod
    def decode_tile(self, vae: Vae, z: torch.Tensor, options: CallOptions = PLAIN) -> torch.Tensor:
        """Sample of one tile, from a clean state, as it is before tiles are merged."""

    def run_piece(
        self, vae: Vae, operation: Operation, shard: SpatialShard, x: torch.Tensor, options: CallOptions
    ) -> torch.Tensor:
        """Collective over the working ranks. What ``operation`` makes of this rank's piece ``x``, finished."""
        with shard:
            if operation is Operation.ENCODE:
                return self.encode_tile(vae, x, options)
            return self.finish_decode(vae, self.decode_tile(vae, x, options))

    def attends(self, vae: Vae) -> bool:
        """Whether every network call attends over space, which a shard must have seen to."""
        return False

    def stand_ins(self, vae: Vae, operation: Operation, x: torch.Tensor) -> dict[str, Any]:
        """Arguments without which ``vae`` does not run on ``x``, whatever their values, for a run that has none."""
        return {}

    def draws(self, vae: Vae, operation: Operation) -> bool:
        """Whether the network draws random numbers; the ranks must then begin with the same generator state."""
        return False

    def countable(self, vae: Vae) -> contextlib.AbstractContextManager[None]:
        """Within it what ``vae`` holds can be counted, also on `torch.device("meta")`; its values may be anything."""
        return contextlib.nullcontext()

    def finish_decode(self, vae: Vae, merged: torch.Tensor) -> torch.Tensor:
        """What un-tiled decode does last, applied once to the merged tiles."""
        return merged

    def finished_shape(self, vae: Vae, merged: tuple[int, ...]) -> tuple[int, ...]:
        """Shape that `finish_decode` makes of ``merged``."""
        return merged

    def finish_tiles(self, vae: Vae, sample: torch.Tensor) -> torch.Tensor:
        """What diffusers' tiled decode of one rank leaves out that its un-tiled one does; ``sample`` is its result."""
        return sample

    def tiles_as_diffusers(self, vae: Vae, operation: Operation, shape: tuple[int, ...]) -> bool:
        """Whether the tiles of a public input of ``shape`` are bit-equal to those of diffusers on one rank.

        Where they are not, because diffusers fails or gets them wrong, they are equal to our own on one rank.
        """
        return True

    def leave_whole(self, vae: Vae) -> None:
        """Switch off what makes diffusers cut an input up that a shard takes whole."""
        vae.use_tiling = False

    def example(self, vae: Vae, operation: Operation, latents: tuple[int, int, int]) -> tuple[int, ...]:
        """Shape of a public input of one picture or clip of so many ``latents`` (T, H, W)."""
        small = self.shape(1, self.channels(vae, Operation.ENCODE) // 2, latents)
        return small if operation is Operation.DECODE else self.whole_shape(vae, Operation.DECODE, small)

    def reset(self, vae: Vae) -> None:
        """Drop what a call left on the module; called when one has failed."""
        return

    def set_tiling(self, vae: Vae, size: TileExtent | None, stride: TileExtent | None) -> None:
        """Switch tiling on, with what is given of a tile size and stride in pixels; the rest stays the family's.

        Args:
            vae: Of the diffusers class or the distributed one.
            size, stride: As an operator asks for them.

        Raises:
            GeometryError: they cannot be used.
            UnsupportedError: a length in time, for a family that is not tiled in time.
        """
        self.refuse_frames(size, stride)
        chosen = {
            "tile_sample_min_height": size and size.height,
            "tile_sample_min_width": size and size.width,
            "tile_sample_stride_height": stride and stride.height,
            "tile_sample_stride_width": stride and stride.width,
        }
        vae.enable_tiling(**{name: value for name, value in chosen.items() if value})
        self.check_tiling(vae)

    def refuse_frames(self, size: TileExtent | None, stride: TileExtent | None) -> None:
        """Refuse a tile length in time.

        Raises:
            UnsupportedError: names the option.
        """
        for flag, extent in (("--vae-tile-size", size), ("--vae-tile-stride", stride)):
            if extent and extent.frames:
                raise UnsupportedError(f"{flag} {extent}: {self.name} is not tiled in time; write HxW")

    def check_tiling(self, vae: Vae) -> None:
        """Refuse the tile size and stride that are set on ``vae`` if they cannot be used.

        Raises:
            GeometryError: what is wrong with them.
        """
        for operation in Operation:
            self.tiling(vae, operation)

    def check_operation(self, operation: Operation) -> None:
        """Refuse a way through that the family does not have.

        Raises:
            UnsupportedError: says which it has.
        """
        if operation not in self.operations:
            raise UnsupportedError(f"{self.name} cannot {operation}; it has {', '.join(self.operations)}")

    def check_dims(self, operation: Operation, shape: tuple[int, ...]) -> None:
        """Refuse an input with other dims than the family's.

        Raises:
            GeometryError: says which it takes.
        """
        dims = "(B, C, T, H, W)" if self.has_time else "(B, C, H, W)"
        if len(shape) != dims.count(",") + 1:
            raise GeometryError(f"{self.name} {operation}s {dims} tensors; this one has the shape {shape}")

    def extents(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """(T, H, W) of a tensor of ``shape``."""
        return shape[-3] if self.has_time else 1, shape[-2], shape[-1]

    def shape(self, batch: int, channels: int, extents: tuple[int, int, int]) -> tuple[int, ...]:
        """Shape of a tensor of ``extents``."""
        return batch, channels, *(extents if self.has_time else extents[1:])

    def cut(self, x: torch.Tensor, cell: tuple[Window, Window, Window]) -> torch.Tensor:
        """What a tile reads of ``x``; a view."""
        time, height, width = (slice(window.start, window.stop) for window in cell)
        return x[..., time, height, width] if self.has_time else x[..., height, width]

    def seen_extents(self, vae: Vae, operation: Operation, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """(T, H, W) of what the tiled function sees when the public input has ``shape``."""
        return self.extents(shape)

    def seen_shape(self, vae: Vae, operation: Operation, seen: tuple[int, int, int], batch: int) -> tuple[int, ...]:
        """Shape of a tensor of extents ``seen`` that the tiled function takes."""
        channels = self.channels(vae, operation.other)
        return self.shape(batch, channels // 2 if operation is Operation.DECODE else channels, seen)

    def public_shape(self, vae: Vae, operation: Operation, seen: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of a public input of which the tiled function sees ``seen``."""
        return seen

    def least_latents(self, vae: Vae, operation: Operation) -> tuple[int, int, int]:
        """Latents (T, H, W) below which `check` refuses an input; a shard has as many of an axis that is cut."""
        return 1, 1, 1

    def latents(self, vae: Vae, operation: Operation, extents: tuple[int, int]) -> tuple[int, int]:
        """Latent rows and columns of (H, W) as the tiled function sees them."""
        _, height, width = self.tiling(vae, operation)
        if operation is Operation.DECODE:
            return extents
        return height.scale.length(extents[0]), width.scale.length(extents[1])

    def ratio(self, vae: Vae, operation: Operation) -> int:
        """Spatial units of the tiled function's input that make a latent."""
        _, height, _ = self.tiling(vae, operation)
        return height.scale.down

    def tile_unit(self, vae: Vae, operation: Operation) -> int:
        """Spatial units that make a latent, as `tiling` counts them."""
        return self.ratio(vae, operation)

    def whole_shape(self, vae: Vae, operation: Operation, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the finished result, where the tiled function sees an input of ``shape``."""
        out = self.grid(vae, operation, self.extents(shape)).out_extents
        whole = self.shape(shape[0], self.channels(vae, operation), out)
        return whole if operation is Operation.ENCODE else self.finished_shape(vae, whole)

    def grid(self, vae: Vae, operation: Operation, extents: tuple[int, int, int]) -> TileGrid:
        """The tile grid over ``extents`` (T, H, W) as the tiled function sees them."""
        return TileGrid(self.tiling(vae, operation), extents)

    def pieces(
        self, vae: Vae, operation: Operation, extents: tuple[int, int, int], ranks: int, margin: int
    ) -> TileGrid:
        """A piece for each of ``ranks`` ranks over ``extents`` as the tiled function sees them; time stays whole.

        Raises:
            GeometryError: they are too small for it.
        """
        return cut_for_ranks(self.tiling(vae, operation), extents, ranks, margin)


def output_dtype(x: torch.Tensor) -> torch.dtype:
    """Type of what an autoencoder makes of ``x``: its own, or autocast's where that is on."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)
