# SPDX-License-Identifier: Apache-2.0
"""What ranks compare of a call besides its input: further arguments, and the state of the random generator."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..distributed import fingerprint

PLAIN_TYPES = (bool, int, float, str, type(None))
"""Types of arguments that ranks can compare by their text."""


def outline(value: Any) -> object:
    """A plain value itself, shape and type of a tensor, the class of anything else."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    return value if isinstance(value, PLAIN_TYPES) else type(value).__name__


def content(value: Any) -> object:
    """As `outline`, and sums over what is in a tensor, and the state of a generator; of a list, each value's."""
    if isinstance(value, list | tuple):
        return [content(one) for one in value]
    if isinstance(value, torch.Generator):
        return _digest(value.get_state())
    known = outline(value)
    return (known, fingerprint(value.reshape(1, -1))) if isinstance(value, torch.Tensor) else known


def call_facts(
    operation: str,
    weights: torch.dtype,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    draws_on: torch.device | None,
) -> dict[str, object]:
    """What must be equal on all ranks of a shared call besides the input, by name.

    Args:
        operation: Encode or decode.
        weights: Their type.
        args, kwargs: Further arguments.
        draws_on: Where the network draws random numbers, if it does.
    """
    further = [*map(content, args), *sorted((name, content(value)) for name, value in kwargs.items())]
    facts: dict[str, object] = {"operation": operation, "weights": str(weights), "arguments": further}
    return facts if draws_on is None else facts | {"random state": random_state(draws_on)}


def random_state(device: torch.device) -> str:
    """Digest of the state of the default generator of ``device``; equal where the next draws are equal."""
    if device.type == "meta":
        return ""
    state = torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    return _digest(state)


def _digest(state: torch.Tensor) -> str:
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()
