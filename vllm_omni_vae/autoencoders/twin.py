# SPDX-License-Identifier: Apache-2.0
"""What a call of an autoencoder would return, found out by making it without values."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution, IdentityDistribution
from torch.overrides import TorchFunctionMode

from ..errors import UnsupportedError
from .arguments import PLAIN_TYPES
from .spec import Operation, Vae


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """One call for inputs of one shape.

    Attributes:
        shape: Shape of the tensor that is returned: a sample, latents, or the moments of a distribution of them.
        ratio: Pixels along height and along width that make a latent; None where they are no whole power of two, the
            same for both.
        container: What is returned: an output class of diffusers, a tuple, or the tensor itself.
        field: Name in an output class.
        distribution: What the tensor is the moments of, if anything.
        attends: Whether attention is called.
        draws: Whether random numbers are drawn.
    """

    shape: tuple[int, ...]
    ratio: int | None
    container: type
    field: str
    distribution: type | None
    attends: bool
    draws: bool

    def wrap(self, whole: torch.Tensor) -> Any:
        """What the call returns, around the tensor in it."""
        value = self.distribution(whole) if self.distribution else whole
        if self.container is torch.Tensor:
            return value
        return (value,) if self.container is tuple else self.container(**{self.field: value})


def tensor_in(output: Any) -> torch.Tensor:
    """The tensor in what ``encode`` or ``decode`` returned.

    Raises:
        UnsupportedError: there is not exactly one.
    """
    tensor: torch.Tensor = _taken_apart(output)[-1]
    return tensor


def switches(vae: Vae) -> dict[str, Any]:
    """The tiling and the like that is set on ``vae``."""
    return {name: value for name, value in vars(vae).items() if name.startswith(("tile_", "use_"))}


def twin_of(vae: Vae) -> Vae:
    """The same autoencoder without values, of the same class and set as ``vae`` is."""
    twin = make_blank(type(vae), vae.config, vae.dtype)
    vars(twin).update(switches(vae))
    return twin


def plan(vae: Vae, base: type, operation: Operation, shape: tuple[int, ...], args: Any, kwargs: Any) -> Plan:
    """Plan a public call of ``base``'s ``operation``. Not collective; the same on every rank.

    Args:
        vae: Whose configuration and switches to take.
        base: Its diffusers class.
        shape: Of the input.
        args, kwargs: Further arguments of the call.
    """
    set_on_it = tuple(sorted((name, value) for name, value in switches(vae).items() if isinstance(value, PLAIN_TYPES)))
    config = json.dumps(dict(vae.config), sort_keys=True, default=str)
    further = tuple(_Blank.of(value) for value in args), tuple((k, _Blank.of(v)) for k, v in sorted(kwargs.items()))
    return _plan(base, config, set_on_it, vae.dtype, operation, shape, further)


@contextlib.contextmanager
def untiled(vae: Vae) -> Iterator[None]:
    """Switch cutting in height and width off; what is done in time and batch stays as it is set."""
    before = vae.__dict__.get("use_tiling")
    if before:
        vae.use_tiling = False
    try:
        yield
    finally:
        if before:
            vae.use_tiling = True


@dataclasses.dataclass(frozen=True, slots=True)
class _Blank:
    """An argument that is a tensor, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return cls(tuple(value.shape), value.dtype)
        return value if isinstance(value, PLAIN_TYPES) else None

    @staticmethod
    def fill(value: Any) -> Any:
        return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, _Blank) else value


def make_blank(base: Any, config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """An autoencoder of class ``base`` on `torch.device("meta")`; names in ``config`` that it does not take are left.

    It is in evaluation mode.
    """
    given = {name: config[name] for name in inspect.signature(base.__init__).parameters if name in config}
    with torch.device("meta"):
        twin = base(**given)
    torch.nn.Module.to(twin, "meta", dtype)  # diffusers' own `to` writes a line for every cast
    return twin.requires_grad_(False).eval()


_IN_USE = threading.Lock()
"""Threads share twins, and networks keep frames on themselves while they run."""


@lru_cache(maxsize=8)
def _twin(base: Any, config: str, dtype: torch.dtype) -> Any:
    return make_blank(base, json.loads(config), dtype)


@lru_cache(maxsize=256)
def _plan(
    base: Any,
    config: str,
    set_on_it: Sequence[tuple[str, Any]],
    dtype: torch.dtype,
    operation: Operation,
    shape: tuple[int, ...],
    further: tuple[Sequence[Any], Sequence[tuple[str, Any]]],
) -> Plan:
    args, kwargs = (_Blank.fill(v) for v in further[0]), {k: _Blank.fill(v) for k, v in further[1]}
    noted = _Noted()
    with _IN_USE:
        twin = _twin(base, config, dtype)
        vars(twin).update(set_on_it)
        with untiled(twin), torch.no_grad(), noted:
            blank = torch.empty(shape, dtype=dtype, device="meta")
            output = getattr(base, operation.value)(twin, blank, *args, **kwargs)
    container, field, distribution, tensor = _taken_apart(output)
    small, large = (tensor.shape, shape) if operation is Operation.ENCODE else (shape, tensor.shape)
    return Plan(
        tuple(tensor.shape), _ratio(small, large), container, field, distribution, noted.attention > 0, noted.draws > 0
    )


def _ratio(small: Sequence[int], large: Sequence[int]) -> int | None:
    height, width = (divmod(large[dim], small[dim]) for dim in (-2, -1))
    whole = height == width and not height[1] and height[0] & (height[0] - 1) == 0
    return height[0] if whole else None


def _taken_apart(output: Any) -> tuple[type, str, type | None, torch.Tensor]:
    container: type = torch.Tensor if isinstance(output, torch.Tensor) else type(output)
    parts: dict[Any, Any] = {"": output}
    if isinstance(output, tuple):
        parts = dict(enumerate(output))
    elif container is not torch.Tensor:
        parts = dict(output)
    if len(parts) != 1:
        raise UnsupportedError(f"{container.__name__} of {len(parts)} values cannot be put together from shards")
    ((field, value),) = parts.items()
    distribution = type(value) if isinstance(value, (DiagonalGaussianDistribution, IdentityDistribution)) else None
    tensor: Any = value.parameters if distribution else value
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedError(f"{type(value).__name__} cannot be put together from shards")
    return container, str(field), distribution, tensor


class _Noted(TorchFunctionMode):
    """Counts calls that a shard must have seen to."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = 0
        self.draws = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.attention += func is F.scaled_dot_product_attention
        self.draws += func is torch.randn
        return func(*args, **(kwargs or {}))
