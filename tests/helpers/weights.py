# SPDX-License-Identifier: Apache-2.0
"""Weights of a checkpoint that make no picture."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file


def spoil(weights: Path, name: str, value: float) -> None:
    """Fill the tensor ``name`` of the file ``weights`` with ``value``."""
    tensors = load_file(weights)
    tensors[name].fill_(value)
    save_file(tensors, weights, metadata={"format": "pt"})
