# SPDX-License-Identifier: Apache-2.0
"""Serve diffusion models whose VAE is shared among ranks: exact, on stock vLLM or plain diffusers.

The names below are loaded on first use, so that importing the package costs nothing and pulls in no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .autoencoders import (
        DistributedAutoencoderKL,
        DistributedAutoencoderKLFlux2,
        DistributedAutoencoderKLLTX2Video,
        DistributedAutoencoderKLQwenImage,
        DistributedAutoencoderKLQwenImage21,
        DistributedAutoencoderKLWan,
        DistributedLTX2VideoDiffusionDecoderModel,
        DistributedVaeMixin,
        distribute,
        selftest,
    )
    from .config import DiffusionParallelConfig, VaeParallelMode, VaeSplits
    from .engine.omni import Omni
    from .tiling import DistributedOperator, DistributedVaeExecutor, GridSpec, TileTask

__version__ = "0.1.0"

_HOMES = {
    "DiffusionParallelConfig": "config",
    "DistributedAutoencoderKL": "autoencoders",
    "DistributedAutoencoderKLFlux2": "autoencoders",
    "DistributedAutoencoderKLLTX2Video": "autoencoders",
    "DistributedAutoencoderKLQwenImage": "autoencoders",
    "DistributedAutoencoderKLQwenImage21": "autoencoders",
    "DistributedAutoencoderKLWan": "autoencoders",
    "DistributedLTX2VideoDiffusionDecoderModel": "autoencoders",
    "DistributedOperator": "tiling",
    "DistributedVaeExecutor": "tiling",
    "DistributedVaeMixin": "autoencoders",
    "GridSpec": "tiling",
    "Omni": "engine.omni",
    "TileTask": "tiling",
    "VaeParallelMode": "config",
    "VaeSplits": "config",
    "distribute": "autoencoders",
    "selftest": "autoencoders",
}

__all__ = [
    "DiffusionParallelConfig",
    "DistributedAutoencoderKL",
    "DistributedAutoencoderKLFlux2",
    "DistributedAutoencoderKLLTX2Video",
    "DistributedAutoencoderKLQwenImage",
    "DistributedAutoencoderKLQwenImage21",
    "DistributedAutoencoderKLWan",
    "DistributedLTX2VideoDiffusionDecoderModel",
    "DistributedOperator",
    "DistributedVaeExecutor",
    "DistributedVaeMixin",
    "GridSpec",
    "Omni",
    "TileTask",
    "VaeParallelMode",
    "VaeSplits",
    "__version__",
    "distribute",
    "selftest",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
