# SPDX-License-Identifier: Apache-2.0
"""Attention to a window around each position, on one piece of a map: the piece is extended by what windows reach."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from ..distributed import Communicator
from ..sharding import ShardLayout
from ..sharding.halo import Edge, pad_with_halos

_HEIGHT, _WIDTH = -2, -1


@contextlib.contextmanager
def windows_on(vae: Any, comm: Communicator, layout: ShardLayout) -> Iterator[None]:
    """Within it the attention of ``vae`` on a piece is that on the whole map, as long as it holds a whole window.

    The processors that are set go on doing the work. A window that would reach over an edge of the map is moved inwards
    by them; so it is here at true edges, and at others the piece goes on for as far as its windows reach.

    Args:
        vae: Its attention modules have a ``kernel_size`` (T, H, W), and a ``rope`` that counts positions from 0.
        comm, layout: The ranks, and who holds what.
    """
    before = vae.attn_processors
    vae.set_attn_processor({name: _OnPiece(inner, comm, layout) for name, inner in before.items()})
    try:
        yield
    finally:
        vae.set_attn_processor(before)


@dataclasses.dataclass(frozen=True, slots=True)
class _OnPiece:
    """A processor around another one."""

    inner: Any
    comm: Communicator
    layout: ShardLayout

    def __call__(self, attn: Any, hidden_states: torch.Tensor, block_mask: object = None) -> torch.Tensor:
        """Collective. Attention on this rank's piece, ``(B, T, H, W, C)``."""
        _, *kernel = attn.kernel_size
        rows, cols = hidden_states.shape[2:4]
        extended = pad_with_halos(
            hidden_states.permute(0, 4, 1, 2, 3), self.comm, self.layout, _reach(kernel[0]), _reach(kernel[1])
        )
        top, left = self._added(_HEIGHT, kernel[0]), self._added(_WIDTH, kernel[1])
        start = self._first(_HEIGHT, rows) - top, self._first(_WIDTH, cols) - left
        with _rotated_from(attn.rope, (0, *start)):
            attended: torch.Tensor = self.inner(attn, extended.permute(0, 2, 3, 4, 1))
        return attended[:, :, top : top + rows, left : left + cols]

    def _added(self, dim: int, kernel: int) -> int:
        """Positions of the neighbour that come before this piece."""
        neighbour = self.layout.neighbours(dim)[0] if self.layout.sharded(dim) else None
        return 0 if neighbour is None else kernel // 2

    def _first(self, dim: int, local: int) -> int:
        """Where in the whole map this piece of ``local`` positions begins."""
        place = self.layout.grid.coords(self.layout.rank)[dim]
        parts = self.layout.height if dim == _HEIGHT else self.layout.width
        return parts.starts[place] * (local // parts.row_sizes[place])


def _reach(kernel: int) -> Edge:
    """What a window around a position reaches before and after it; nothing is added at true edges."""
    return Edge(kernel // 2, kernel - 1 - kernel // 2)


@contextlib.contextmanager
def _rotated_from(rope: Any, start: tuple[int, ...]) -> Iterator[None]:
    """Count positions from ``start`` (T, H, W): angles are rounded, so that counting from 0 would give other ones."""

    def rotate(x: torch.Tensor) -> torch.Tensor:
        parts = []
        for axis, part in enumerate(x.split(rope.rope_dim_split, dim=-1), start=1):
            first = start[axis - 1]
            places = torch.arange(first, first + x.shape[axis], dtype=torch.float32, device=x.device)
            parts.append(rope._rotate_axis(part, places, rope._inv_freqs(part.shape[-1], x.device), axis=axis))
        return torch.cat(parts, dim=-1)

    rope.forward = rotate
    try:
        yield
    finally:
        del rope.forward
