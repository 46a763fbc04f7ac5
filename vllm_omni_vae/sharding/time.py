# SPDX-License-Identifier: Apache-2.0
"""Operators along time: local where each position goes by itself, and attention that frames order."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import UnsupportedError
from .extended import extension
from .halo import Edge
from .layout import ShardLayout

Handler = Callable[..., Any]


def along_time(layout: ShardLayout, batch: int, length: int) -> bool:
    """Whether a sequence of ``length`` in a ``batch`` is time at each position, rather than the positions.

    Raises:
        UnsupportedError: it could be either, or neither; if it is time, on every rank alike.
    """
    positions = prod(layout.latents)
    areas = [rows * cols for rows in layout.height.row_sizes for cols in layout.width.row_sizes]
    time = batch % positions == 0
    space = any(length % area == 0 for area in (areas if time else [positions]))
    if time == space:
        raise UnsupportedError(
            f"a batch of {batch} sequences of {length} on a shard of {positions} latents could be along time or space"
        )
    return time


def frame_mask(layout: ShardLayout, mask: torch.Tensor, keys: int, sizes: list[int]) -> torch.Tensor:
    """The mask for keys of all ranks, of one that orders frames: the same for every position of a frame.

    Args:
        mask: ``(..., keys)`` for this rank's positions, frame by frame.
        keys: Their number.
        sizes: Positions of every rank, in the order of the keys.

    Raises:
        UnsupportedError: it tells positions of a frame apart.
    """
    own = prod(layout.latents)
    if mask.shape[-1] != keys:
        raise UnsupportedError(f"an attention mask of {tuple(mask.shape)} is not known on a shard")
    frames = keys // own
    blocks = mask.unflatten(-1, (frames, own))
    alike = blocks[..., :1]
    if not mask.is_meta and not bool((blocks == alike).all()):
        raise UnsupportedError("attention whose mask tells the positions of a frame apart is not known on a shard")
    return torch.cat([alike.expand(*alike.shape[:-1], size // frames).flatten(-2) for size in sizes], dim=-1)


def pools(layout: ShardLayout) -> dict[Any, Handler]:
    """Handlers of means over time, and over whole cells in space."""
    return {F.avg_pool1d: _pool1d(layout, F.avg_pool1d), F.avg_pool3d: _pool3d(layout, F.avg_pool3d)}


def _pool1d(layout: ShardLayout, function: Handler) -> Handler:
    def pool(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if input.dim() != 3 or not along_time(layout, input.shape[0], input.shape[-1]):
            raise UnsupportedError(f"{function.__name__} of {tuple(input.shape)} is not known on a shard")
        return function(input, *args, **kwargs)

    return pool


def _pool3d(layout: ShardLayout, function: Handler) -> Handler:
    def pool(input: torch.Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, *args: Any) -> Any:
        kernel, steps, pads = (each(value, 3) for value in (kernel_size, stride or kernel_size, padding))
        ready = extension(input) or {}
        for dim in (-2, -1):
            added = ready.get(dim, Edge())
            rest = (input.shape[dim] - added.before - added.after) % kernel[dim]
            cells = kernel[dim] == steps[dim] and not (pads[dim] or rest or added.before) and added.after < kernel[dim]
            if layout.sharded(dim) and not cells:
                raise UnsupportedError(f"{function.__name__} of {kernel[1:]} that is not cut where shards are")
        return function(input, kernel_size, stride, padding, *args)

    return pool


def transposed(layout: ShardLayout, function: Handler) -> Handler:
    """The handler of a transposed convolution: local where every position makes a cell of its own."""

    def convolve(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        dims = weight.dim() - 2
        steps, pads, more = (each(value, dims) for value in (stride, padding, output_padding))
        for dim in (-2, -1):
            if layout.sharded(dim) and (weight.shape[dim] != steps[dim] or pads[dim] or more[dim]):
                raise UnsupportedError(
                    f"{function.__name__} of {weight.shape[dim]} rows with stride {steps[dim]} is not known on a shard"
                )
        result: torch.Tensor = function(input, weight, bias, stride, padding, output_padding, *args, **kwargs)
        return result

    return convolve


def each(value: Any, dims: int) -> list[int]:
    """An argument that torch takes as one number or as one for each dim, as the latter."""
    return [value] * dims if isinstance(value, int) else (list(value) * dims if len(value) == 1 else list(value))
