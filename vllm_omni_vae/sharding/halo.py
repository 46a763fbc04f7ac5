# SPDX-License-Identifier: Apache-2.0
"""Padding that is the neighbour's rows at an interior edge, and itself at a true one."""

from __future__ import annotations

import dataclasses

import torch

from ..distributed import Communicator
from ..distributed.span import span as named
from ..errors import UnsupportedError
from .layout import ShardLayout

_HEIGHT, _WIDTH = -2, -1


@dataclasses.dataclass(frozen=True, slots=True)
class Edge:
    """What one axis gets on both sides.

    Attributes:
        before, after: Rows of the neighbour at an interior edge.
        pad_before, pad_after: Rows of padding at a true edge.
    """

    before: int = 0
    after: int = 0
    pad_before: int = 0
    pad_after: int = 0

    @classmethod
    def same(cls, before: int, after: int) -> Edge:
        """As many neighbour's rows as rows of padding."""
        return cls(before, after, before, after)


def pad_with_halos(
    x: torch.Tensor,
    comm: Communicator,
    layout: ShardLayout,
    height: Edge,
    width: Edge,
    *,
    outer: tuple[int, ...] = (),
    mode: str = "constant",
    value: float = 0.0,
) -> torch.Tensor:
    """Collective. Extend this rank's piece on the two spatial dims, into one new buffer that is written once.

    Height is exchanged first and width on the result, so corners come from the diagonal neighbour by themselves.

    Args:
        x: This rank's piece, ``(..., H, W)``.
        comm: The ranks of ``layout``.
        layout: Who holds what.
        height, width: What each axis gets.
        outer: Constant padding of the dims before, in `torch.nn.functional.pad`'s order from the third-last dim on.
        mode: Padding at true edges: ``constant``, ``reflect`` or ``replicate``.
        value: The constant.

    Returns:
        The extended piece in the memory format of ``x``.

    Raises:
        UnsupportedError: an edge is wider than the thinnest piece, on every rank alike.
    """
    spans = {dim: _span(x, layout, edge, dim, mode) for dim, edge in ((_HEIGHT, height), (_WIDTH, width))}
    shape = list(x.shape)
    for dim, (before, after) in spans.items():
        shape[dim] += before + after
    inner = [slice(None)] * x.dim()
    for i in range(0, len(outer), 2):
        dim = x.dim() - 3 - i // 2
        inner[dim] = slice(outer[i], outer[i] + x.shape[dim])
        shape[dim] += outer[i] + outer[i + 1]
    padded = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=_format(x))
    body = padded[tuple(inner)]
    (top, _), (left, _) = spans[_HEIGHT], spans[_WIDTH]
    rows, cols = x.shape[-2:]
    body[..., top : top + rows, left : left + cols].copy_(x)
    _fill_outer(padded, inner, value)
    _fill(body[..., left : left + cols], comm, layout, height, spans[_HEIGHT], _HEIGHT, mode, value)
    _fill(body, comm, layout, width, spans[_WIDTH], _WIDTH, mode, value)
    return padded


def _span(x: torch.Tensor, layout: ShardLayout, edge: Edge, dim: int, mode: str) -> tuple[int, int]:
    """Rows that are added before and after on this rank."""
    if not layout.sharded(dim):
        if mode == "reflect" and max(edge.pad_before, edge.pad_after) >= x.shape[dim]:
            raise UnsupportedError(f"reflection of {x.shape[dim]} rows needs less padding than that")
        return edge.pad_before, edge.pad_after
    shards = layout.extents(dim, x.shape[_HEIGHT], x.shape[_WIDTH])
    thinnest = min(shards)
    if max(edge.before, edge.after) > thinnest:
        raise UnsupportedError(
            f"a halo of {max(edge.before, edge.after)} rows is wider than the thinnest shard, {thinnest} rows; "
            "use fewer ranks along this axis"
        )
    short = edge.pad_before >= shards[0] + edge.after or edge.pad_after >= shards[-1] + edge.before
    if mode == "reflect" and short:
        raise UnsupportedError(f"reflection needs more rows than the outer of {shards} rows and their halos hold")
    before, after = layout.neighbours(dim)
    return (
        edge.pad_before if before is None else edge.before,
        edge.pad_after if after is None else edge.after,
    )


def _format(x: torch.Tensor) -> torch.memory_format:
    for dims, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == dims and x.is_contiguous(memory_format=memory_format) and not x.is_contiguous():
            return memory_format
    return torch.contiguous_format


def _fill_outer(padded: torch.Tensor, inner: list[slice], value: float) -> None:
    for dim, part in enumerate(inner):
        if part.start is not None:
            padded.narrow(dim, 0, part.start).fill_(value)
            padded.narrow(dim, part.stop, padded.shape[dim] - part.stop).fill_(value)


def _fill(
    body: torch.Tensor,
    comm: Communicator,
    layout: ShardLayout,
    edge: Edge,
    span: tuple[int, int],
    dim: int,
    mode: str,
    value: float,
) -> None:
    """Collective along ``dim``. Write the rows before and after the owned ones of ``body``."""
    owned = body.shape[dim] - sum(span)
    first, last = span[0], span[0] + owned
    before, after = layout.neighbours(dim) if layout.sharded(dim) else (None, None)
    sends, receives = [], []
    if before is not None and edge.after:
        sends.append((before, body.narrow(dim, first, edge.after)))
    if after is not None and edge.before:
        sends.append((after, body.narrow(dim, last - edge.before, edge.before)))
    halves = []
    if before is not None and edge.before:
        halves.append((before, body.narrow(dim, 0, edge.before)))
    if after is not None and edge.after:
        halves.append((after, body.narrow(dim, last, edge.after)))
    for peer, half in halves:
        receives.append((peer, torch.empty(half.shape, dtype=half.dtype, device=half.device)))
    with named("halo exchange"):
        comm.exchange(sends, receives)
    for (_, half), (_, arrived) in zip(halves, receives, strict=True):
        half.copy_(arrived)
    if before is None and span[0]:
        _fill_edge(body, dim, range(first - 1, -1, -1), first, +1, mode, value)
    if after is None and span[1]:
        _fill_edge(body, dim, range(last, last + span[1]), last - 1, -1, mode, value)


def _fill_edge(body: torch.Tensor, dim: int, targets: range, edge: int, inward: int, mode: str, value: float) -> None:
    """Padding at a true edge, walking outwards from row ``edge``; ``inward`` points back into the picture."""
    for step, target in enumerate(targets, start=1):
        row = body.narrow(dim, target, 1)
        if mode == "constant":
            row.fill_(value)
        else:
            row.copy_(body.narrow(dim, edge + inward * step if mode == "reflect" else edge, 1))
