# SPDX-License-Identifier: Apache-2.0
"""The context in which an unmodified network runs on one piece of a feature map."""

from __future__ import annotations

from math import prod
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..distributed import Communicator
from ..errors import GeometryError
from .layout import ShardLayout
from .operators import Operators


class SpatialShard:
    """Within ``with shard:`` torch operators that look beyond a position act as on the whole map.

    The network, its weights and its class stay as they are; leaving the block is the way back. The block acts on the
    thread that entered it. Every rank of the layout must run the same network on its piece, in the same order.

    Args:
        comm: The ranks; their numbers are those of the layout's grid.
        layout: Who holds what.
    """

    def __init__(self, comm: Communicator, layout: ShardLayout):
        if comm.size != layout.grid.size or comm.rank != layout.rank:
            raise GeometryError(f"rank {comm.rank} of {comm.size} is not rank {layout.rank} of {layout.grid}")
        self.comm = comm
        self.layout = layout
        self.operators = Operators(comm, layout)
        self._mode = _ShardMode(self.operators.table)

    def __enter__(self) -> SpatialShard:
        self._mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mode.__exit__(kind, error, trace)

    def shard(self, x: torch.Tensor, ratio: int = 1) -> torch.Tensor:
        """This rank's piece of the whole ``x`` ``(..., H, W)``, of which ``ratio`` units make a latent."""
        return self.layout.local(x, ratio)

    def room(
        self, piece: torch.Tensor, extents: tuple[int, int], comm: Communicator, dst: int
    ) -> tuple[list[torch.Tensor], torch.Tensor] | None:
        """What `gather` with these arguments needs memory for on ``dst``; elsewhere None. Without communication."""
        if comm.rank != dst:
            return None
        sizes = [prod(shape) for shape in self._shapes(piece, extents)]
        pieces = comm.room(piece.contiguous().flatten(), sizes, dst)
        return pieces, piece.new_empty((*piece.shape[:-2], *extents))

    def gather(
        self,
        piece: torch.Tensor,
        extents: tuple[int, int],
        comm: Communicator,
        dst: int,
        room: tuple[list[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor | None:
        """Collective. Put the pieces of all ranks together on ``dst``, in exact sizes.

        Args:
            piece: This rank's piece ``(..., h, w)``.
            extents: Height and width of the whole.
            comm: The ranks of the layout; nobody abandons these.
            dst: Rank that owns the result.
            room: What `room` gave, by which a rank learns beforehand that it has no memory for the whole.

        Returns:
            ``(..., H, W)`` on ``dst``; elsewhere None.
        """
        shapes = self._shapes(piece, extents)
        room = self.room(piece, extents, comm, dst) if room is None else room
        mine = piece.contiguous().flatten() if room is None else room[0][dst]
        pieces = comm.gather(mine, [prod(shape) for shape in shapes], dst, room and room[0])
        if pieces is None or room is None:
            return None
        whole = room[1]
        for rank, (flat, shape) in enumerate(zip(pieces, shapes, strict=True)):
            rows, cols = self.layout.bounds(rank, extents, extents[0] // self.layout.height.extent)
            whole[..., rows, cols] = flat.view(shape)
        return whole

    def check(self, piece: torch.Tensor, extents: tuple[int, int]) -> None:
        """Refuse a piece that is not this rank's share of a whole of ``extents``.

        Raises:
            GeometryError: the network does not keep its feature map where it was cut.
        """
        expected = self._shapes(piece, extents)[self.layout.rank]
        if tuple(piece.shape) != expected:
            raise GeometryError(f"this shard came out as {tuple(piece.shape)} instead of {expected}")

    def _shapes(self, piece: torch.Tensor, extents: tuple[int, int]) -> list[tuple[int, ...]]:
        ratio = extents[0] // self.layout.height.extent
        cuts = [self.layout.bounds(rank, extents, ratio) for rank in range(self.layout.grid.size)]
        return [(*piece.shape[:-2], rows.stop - rows.start, cols.stop - cols.start) for rows, cols in cuts]


class _ShardMode(TorchFunctionMode):
    """Sends each call of the table's operators to its handler; everything else runs as it is."""

    def __init__(self, table: dict[Any, Any]):
        super().__init__()
        self._handler = table.get

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = self._handler(func)
        return (handler or func)(*args, **(kwargs or {}))
