# SPDX-License-Identifier: Apache-2.0
"""Random numbers on a shard: every rank draws the whole map from the same generator state and keeps its part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import UnsupportedError
from .layout import ShardLayout

Handler = Callable[..., Any]

_DROPOUTS: dict[str, bool] = {
    "dropout": True,
    "dropout1d": True,
    "dropout2d": True,
    "dropout3d": True,
    "dropout_": True,
    "feature_dropout": True,
    "feature_dropout_": True,
    "alpha_dropout": False,
    "alpha_dropout_": False,
    "feature_alpha_dropout": False,
    "feature_alpha_dropout_": False,
}
"""Whether each drops where its caller does not say so."""


def draws(layout: ShardLayout) -> dict[Any, Handler]:
    """Handlers of `torch.randn` and of dropout; whatever else draws is in `refused.ALWAYS`."""
    table: dict[Any, Handler] = {torch.randn: _whole_map(layout)}
    for name, default in _DROPOUTS.items():
        for function in (getattr(home, name) for home in (torch, F) if hasattr(home, name)):
            table[function] = _dropout(function, name, default)
    return table


def _whole_map(layout: ShardLayout) -> Handler:
    def randn(*size: Any, **kwargs: Any) -> torch.Tensor:
        given = kwargs.pop("size", size)
        local = tuple(given[0] if len(given) == 1 and not isinstance(given[0], int) else given)
        scale = _scale(layout, local)
        if scale is None or kwargs.get("out") is not None:
            raise UnsupportedError(
                f"randn of {local} is not known on a shard of {'x'.join(map(str, layout.latents))} latents; "
                "only a map (H, W) of new values is"
            )
        whole = torch.randn((layout.height.extent * scale, layout.width.extent * scale), **kwargs)
        return layout.local(whole, scale)

    return randn


def _scale(layout: ShardLayout, local: tuple[int, ...]) -> int | None:
    """Units a latent of a piece ``local`` (H, W), where every rank can tell the whole; else None."""
    if len(local) != 2 or layout.remainder:
        return None
    rows, cols = layout.latents
    scale = local[0] // rows
    return scale if scale and local == (rows * scale, cols * scale) else None


def _dropout(function: Handler, name: str, default: bool) -> Handler:
    def checked(input: torch.Tensor, p: float = 0.5, *args: Any, **kwargs: Any) -> Any:
        training = args[0] if args else kwargs.get("training", kwargs.get("train", default))
        if training and p > 0:
            raise UnsupportedError(f"{name} in training is not known on a shard; call eval() on the autoencoder")
        return function(input, p, *args, **kwargs)

    return checked
