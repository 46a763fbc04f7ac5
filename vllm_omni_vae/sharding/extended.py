# SPDX-License-Identifier: Apache-2.0
"""What a tensor that `torch.nn.functional.pad` extended remembers of it, until the operator that it is made for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .halo import Edge

Handler = Callable[..., Any]

_EXTENDED = "_vllm_omni_vae_extended"


def extension(x: torch.Tensor) -> Mapping[int, Edge] | None:
    """What was added by dim (-2, -1), or None."""
    found: Mapping[int, Edge] | None = getattr(x, _EXTENDED, None)
    return found


def extend(x: torch.Tensor, edges: Mapping[int, Edge]) -> torch.Tensor:
    """Note that ``edges`` were added to ``x``, and return it."""
    if any(edge != Edge() for edge in edges.values()):
        setattr(x, _EXTENDED, edges)
    return x


def carriers() -> dict[Any, Handler]:
    """Handlers of operators that leave height and width alone: what they return is extended as what they were given."""
    views: list[Any] = [torch.permute, torch.Tensor.__getitem__, torch.Tensor.expand, torch.Tensor.permute]
    others: list[Any] = [torch.clone, torch.reshape]
    others += [getattr(torch.Tensor, name) for name in ("clone", "contiguous", "repeat", "reshape", "to", "view")]
    table: dict[Any, Handler] = {function: _one(function, view=True) for function in views}
    table |= {function: _one(function) for function in others}
    return table | {function: _several(function) for function in (torch.cat, torch.concat, torch.concatenate)}


def _one(function: Handler, view: bool = False) -> Handler:
    """The last two dims of a view are those of ``x`` if their steps are, too; in a copy other dims cannot come last."""

    def carry(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = function(x, *args, **kwargs)
        edges = extension(x)
        if edges is None or result.shape[-2:] != x.shape[-2:] or (view and result.stride()[-2:] != x.stride()[-2:]):
            return result
        return extend(result, edges)

    return carry


def _several(function: Handler) -> Handler:
    def carry(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(tensors, *args, **kwargs)
        edges = extension(tensors[0])
        same = edges is not None and all(extension(x) == edges for x in tensors)
        return extend(result, edges) if edges and same and result.shape[-2:] == tensors[0].shape[-2:] else result

    return carry
