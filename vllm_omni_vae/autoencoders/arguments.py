# SPDX-License-Identifier: Apache-2.0
"""What ranks compare of a call besides its input: further arguments, and the state of the random generator."""

from __future__ import annotations

import hashlib
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
    """As `outline`, and sums over what is in a tensor."""
    known = outline(value)
    return (known, fingerprint(value.reshape(1, -1))) if isinstance(value, torch.Tensor) else known


def random_state(device: torch.device) -> str:
    """Digest of the state of the default generator of ``device``; equal where the next draws are equal."""
    if device.type == "meta":
        return ""
    state = torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()
