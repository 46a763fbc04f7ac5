# SPDX-License-Identifier: Apache-2.0
"""How far a network looks: the margin with which a rank split is the un-tiled result, where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil

import torch

from ..distributed import NullCommunicator
from ..distributed.communicator import Message
from ..geometry import Partition, RankGrid
from ..sharding import ShardLayout, SpatialShard
from .spec import CallOptions, Operation, Vae

_LATENTS = 8
"""Latent rows of the rank that is watched, and columns: more than any layer fetches at once."""


def exact_margin(vae: Vae, operation: Operation) -> int | None:
    """Latent rows and columns of margin that make a split by rank equal to the un-tiled result; None: no number does.

    What an inner rank of a spatial shard fetches for each layer is how far that layer looks, and layers follow one
    another: so the sum, each counted in latents, is how far the network looks. Where branches run beside each other it
    is counted as if they followed one another, so that the true reach may be less. A network that attends over the
    map, or normalises over all of it, looks at everything.

    Not collective. One call of the network runs, on the autoencoder as it is.

    Args:
        vae: A distributed autoencoder on `torch.device("meta")`.
        operation: Encode or decode.
    """
    found = [_reach(vae, operation, grid) for grid in (RankGrid(3, 1), RankGrid(1, 3))]
    reaches = [reach for reach in found if reach is not None]
    return ceil(max(reaches)) if len(reaches) == len(found) else None


def _reach(vae: Vae, operation: Operation, grid: RankGrid) -> Fraction | None:
    """Latents along the axis that ``grid`` cuts, to the side of which more is fetched; None: all there are."""
    rows, cols = (_LATENTS * parts for parts in (grid.rows, grid.cols))
    comm = _Watched(1, 3, dim=-2 if grid.rows > 1 else -1, across=_LATENTS)
    shard = SpatialShard(comm, ShardLayout(grid, Partition(rows, grid.rows), Partition(cols, grid.cols), 1))
    shape = vae.spec.example(vae, operation, (1, _LATENTS, _LATENTS))
    seen = vae.spec.seen_extents(vae, operation, shape)
    x = torch.empty(vae.spec.seen_shape(vae, operation, seen, 1), dtype=vae.dtype, device=vae.device)
    arguments = vae.spec.stand_ins(vae, operation, x)
    try:
        with torch.no_grad():
            vae.spec.run_piece(vae, operation, shard, x, CallOptions(arguments=arguments))
    except _LooksAtEverything:
        return None
    finally:
        vae.spec.reset(vae)
    return max(comm.before, comm.after)


class _LooksAtEverything(Exception):
    """A layer takes the whole map."""


class _Watched(NullCommunicator):
    """An inner rank that notes how many rows its neighbours would get, in latents, and stops where all ranks would.

    Args:
        rank, size: As for every communicator.
        dim: The dim that is cut.
        across: Latents of the piece along the other one, by which a row's scale is known.

    Attributes:
        before, after: Sum of all rows that the rank before, and after, looks at.
    """

    def __init__(self, rank: int, size: int, *, dim: int, across: int):
        super().__init__(rank, size)
        self.before = self.after = Fraction(0)
        self._dim = dim
        self._across = across

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        for peer, tensor in sends:
            # Padding of the other axis may be in its extent, by less than one unit a latent.
            units = tensor.shape[-3 - self._dim] // self._across
            reach = Fraction(tensor.shape[self._dim], units)
            if peer < self.rank:
                self.before += reach
            else:
                self.after += reach
        super().exchange(sends, receives)

    def all_gather(self, piece: torch.Tensor) -> torch.Tensor:
        raise _LooksAtEverything

    def all_gather_uneven(self, piece: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        raise _LooksAtEverything
