# SPDX-License-Identifier: Apache-2.0
"""What is refused when an autoencoder is set up to be shared, and what is said of it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..config import VaeParallelMode, VaeSplits, VaeTileMerge
from ..errors import UnsupportedError
from .spec import FamilySpec

if TYPE_CHECKING:
    from .mixin import DistributedVaeMixin

logger = logging.getLogger(__name__)


def check_mode(spec: FamilySpec, mode: VaeParallelMode) -> None:
    """Refuse a mode that the family does not have.

    Raises:
        UnsupportedError: names the modes it has.
    """
    if mode not in spec.modes:
        raise UnsupportedError(
            f"{spec.name} cannot run vae_parallel_mode {mode.value}; "
            f"it has {', '.join(m for m in VaeParallelMode if m in spec.modes)}"
        )


def check_splits(spec: FamilySpec, splits: VaeSplits) -> None:
    """Refuse to split by rank what the family cannot; an operation that it does not have is passed over.

    Raises:
        UnsupportedError: says why.
    """
    for operation in spec.operations:
        margin = splits.margin(operation)
        if margin is not None and (VaeParallelMode.TILE not in spec.modes or spec.no_pieces):
            why = spec.no_pieces or "it is not shared in tiles, whose place the pieces take"
            raise UnsupportedError(f"{spec.name} cannot run vae_{operation}_split rank: {why}")


def say_splits(spec: FamilySpec, mode: VaeParallelMode, splits: VaeSplits) -> None:
    """Log what the split of each operation comes to, once, when it is set."""
    for operation in spec.operations:
        margin = splits.margin(operation)
        if margin is None:
            continue
        if margin == 0:
            logger.warning(
                "VAE %s of %s is split by rank without a margin, which is less accurate than tiles; 2 is usual",
                operation,
                spec.name,
            )
        if mode is not VaeParallelMode.TILE:
            logger.info(
                "VAE %s of %s is split by rank only where vae_parallel_mode %s would take tiles",
                operation,
                spec.name,
                mode,
            )


def check_merge(kind: type[DistributedVaeMixin], merge: VaeTileMerge) -> None:
    """Refuse to sum tiles where that would leave out what ``kind`` does when it merges them.

    Raises:
        UnsupportedError: it has no tiles, or a merge of its own.
    """
    if merge is VaeTileMerge.BLEND:
        return
    if VaeParallelMode.TILE not in kind.spec.modes:
        raise UnsupportedError(
            f"{kind.spec.name} is not shared in tiles, so vae_tile_merge {merge} does nothing for it"
        )
    from .mixin import DistributedVaeMixin as Shared

    for name in ("tile_merge", "encode_tile_merge"):
        if getattr(kind, name) is not getattr(Shared, name):
            raise UnsupportedError(
                f"{kind.__name__} merges tiles by its own {name}, which vae_tile_merge {merge} would not call; take "
                f"{VaeTileMerge.BLEND}"
            )
