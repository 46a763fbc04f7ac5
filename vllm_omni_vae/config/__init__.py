# SPDX-License-Identifier: Apache-2.0
"""Configuration: declared once, as frozen dataclasses whose fields are also the command line flags."""

from .engine import EngineConfig
from .parallel import DiffusionParallelConfig, VaeParallelMode, VaeTileMerge
from .server import ServerConfig
from .splits import IN_TILES, VaeSplit, VaeSplits
from .vae import TileExtent, VaeConfig

__all__ = [
    "IN_TILES",
    "DiffusionParallelConfig",
    "EngineConfig",
    "ServerConfig",
    "TileExtent",
    "VaeConfig",
    "VaeParallelMode",
    "VaeSplit",
    "VaeSplits",
    "VaeTileMerge",
]
