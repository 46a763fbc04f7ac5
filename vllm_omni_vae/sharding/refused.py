# SPDX-License-Identifier: Apache-2.0
"""Operators that would mix rows of several ranks in a way that is not written down: refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import UnsupportedError
from .layout import ShardLayout

Handler = Callable[..., Any]

_IN_PLACE_DRAWS = ["bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "random", "uniform"]

ALWAYS = [
    *(f"adaptive_{kind}_pool{dims}d" for kind in ("avg", "max") for dims in (1, 2, 3)),
    *(f"{kind}_pool{dims}d" for kind in ("avg", "max") for dims in (1, 3)),
    *(f"conv_transpose{dims}d" for dims in (1, 2, 3)),
    *(f"{kind}_" for kind in _IN_PLACE_DRAWS),
    "bernoulli",
    "binomial",
    "fliplr",
    "flipud",
    "fold",
    "grid_sample",
    "gumbel_softmax",
    "instance_norm",
    "lp_pool2d",
    "multi_head_attention_forward",
    "multinomial",
    "nonzero",
    "normal",
    "poisson",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn_like",
    "randperm",
    "rot90",
    "unfold",
    "unique",
]


@dataclasses.dataclass(frozen=True, slots=True)
class Along:
    """Where an operator says which dims it works along.

    Attributes:
        place: Position of the dims among the arguments.
        default: Dims when none are given; None: all.
        spread: Dims may be given one by one.
    """

    place: int = 1
    default: tuple[int, ...] | None = None
    spread: bool = False


_REDUCTIONS = [
    "all",
    "amax",
    "amin",
    "any",
    "argmax",
    "argmin",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "log_softmax",
    "logcumsumexp",
    "logsumexp",
    "max",
    "mean",
    "median",
    "min",
    "nanmean",
    "nansum",
    "prod",
    "softmax",
    "softmin",
    "std",
    "std_mean",
    "sum",
    "var",
    "var_mean",
]
_LAST = (-1,)
ALONG: dict[str, Along] = {
    **dict.fromkeys(_REDUCTIONS, Along()),
    "norm": Along(2),
    "roll": Along(2),
    "flip": Along(spread=True),
    "sort": Along(default=_LAST),
    "argsort": Along(default=_LAST),
    "diff": Along(2, _LAST),
    "kthvalue": Along(2, _LAST),
    "topk": Along(2, _LAST),
    "normalize": Along(2, (1,)),
}
FFT = {
    **dict.fromkeys(["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"], Along(2, _LAST)),
    **dict.fromkeys(["fft2", "ifft2", "rfft2", "irfft2"], Along(2, (-2, -1))),
    **dict.fromkeys(["fftn", "ifftn", "rfftn", "irfftn"], Along(2)),
    **dict.fromkeys(["fftshift", "ifftshift"], Along()),
}


def refusals(layout: ShardLayout) -> dict[Any, Handler]:
    """Handlers of every operator that is refused always, or along a cut axis."""
    table: dict[Any, Handler] = {}
    for name in ALWAYS:
        table |= {function: _always(name) for function in _functions(name)}
    for name, along in ALONG.items():
        table |= {function: _along(function, name, along, layout) for function in _functions(name)}
    for name, along in FFT.items():
        function = getattr(torch.fft, name)
        table[function] = _along(function, f"fft.{name}", along, layout)
    for function in (torch.linalg.vector_norm, torch.linalg.norm):
        table[function] = _along(function, function.__name__.removeprefix("linalg_"), Along(2), layout)
    return table


def _functions(name: str) -> list[Any]:
    """Every callable of torch, its tensors and its functional module that goes by ``name``."""
    return [getattr(home, name) for home in (torch, torch.Tensor, F) if hasattr(home, name)]


def _always(name: str) -> Handler:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(f"{name} is not known on a shard")

    return refuse


def _along(function: Handler, name: str, along: Along, layout: ShardLayout) -> Handler:
    def checked(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs.get("input")
        if isinstance(x, torch.Tensor) and layout.cut_dims(x) & _dims(args, kwargs, along, x.dim()):
            raise UnsupportedError(f"{name} over a sharded axis of {tuple(x.shape)} is not known on a shard")
        return function(*args, **kwargs)

    return checked


def _dims(args: tuple[Any, ...], kwargs: dict[str, Any], along: Along, count: int) -> set[int]:
    given: Any = next((kwargs[key] for key in ("dim", "dims", "axis") if key in kwargs), None)
    if given is None and len(args) > along.place:
        given = args[along.place :] if along.spread else args[along.place]
        if isinstance(given, torch.Tensor):
            return set()
    if "other" in kwargs:
        return set()
    if given is None or isinstance(given, bool) or given == ():
        given = range(count) if along.default is None else along.default
    flat = [d for part in (given if isinstance(given, (tuple, list, range)) else [given]) for d in _flat(part)]
    return {d % count for d in flat}


def _flat(part: Any) -> list[int]:
    return list(part) if isinstance(part, (tuple, list)) else [part]
