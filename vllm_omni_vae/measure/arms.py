# SPDX-License-Identifier: Apache-2.0
"""The ways to run one encode or decode that a measurement compares."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from enum import StrEnum

from ..config import IN_TILES, VaeParallelMode, VaeSplits, VaeTileMerge
from ..config.splits import RANK_SPLIT


class Kind(StrEnum):
    """Who runs, and what."""

    UNTILED = "direct"
    SEQUENTIAL = "sequential_tiles"
    SHARED = "shared"
    SILENT = "no_messages"


@dataclasses.dataclass(frozen=True, slots=True)
class Arm:
    """One way.

    Attributes:
        kind: ``direct``: one rank, the whole at once, as diffusers does it. ``sequential_tiles``: one rank, diffusers'
            own tiles. ``shared``: all ranks, under ``mode``. ``no_messages``: the same without any exchange, which no
            exchange can be faster than; what comes out has no meaning.
        mode: What the ranks are set to; None on one rank.
        merge: How shared tiles become one.
        margin: Latents of context on the inner edges of pieces, where one piece for each rank takes the place of tiles.
    """

    kind: Kind
    mode: VaeParallelMode | None = None
    merge: VaeTileMerge = VaeTileMerge.BLEND
    margin: int | None = None

    @property
    def splits(self) -> VaeSplits:
        """The splits that it sets."""
        return IN_TILES if self.margin is None else VaeSplits(self.margin, self.margin)

    @property
    def strategy(self) -> str:
        """What must run; only for all ranks."""
        return RANK_SPLIT if self.margin is not None else str(self.mode)

    @property
    def name(self) -> str:
        """Unlike that of any other arm; the key in JSON."""
        if self.mode is None:
            return self.kind.value
        if self.margin is not None:
            return f"{RANK_SPLIT}/{self.margin}"
        summed = "/sum" if self.merge is VaeTileMerge.SUM else ""
        return self.mode.value + summed + ("/no_messages" if self.kind is Kind.SILENT else "")

    @property
    def title(self) -> str:
        """For a table."""
        if self.mode is None:
            return "un-tiled, one rank" if self.kind is Kind.UNTILED else "tiles, one rank"
        return "  without messages" if self.kind is Kind.SILENT else self.name

    @property
    def alone(self) -> bool:
        """Whether one rank runs and the others wait."""
        return self.mode is None


def arms_of(
    modes: Sequence[VaeParallelMode],
    *,
    bounds: bool,
    merges: Sequence[VaeTileMerge] = (VaeTileMerge.BLEND,),
    margins: Sequence[int] = (),
) -> tuple[Arm, ...]:
    """Both baselines, then every mode: tiles with each merge, shards each with its bound if ``bounds``; then pieces."""
    arms = [Arm(Kind.UNTILED), Arm(Kind.SEQUENTIAL)]
    for mode in modes:
        if mode is VaeParallelMode.TILE:
            arms += [Arm(Kind.SHARED, mode, merge) for merge in merges]
            continue
        arms.append(Arm(Kind.SHARED, mode))
        if bounds:
            arms.append(Arm(Kind.SILENT, mode))
    arms += [Arm(Kind.SHARED, VaeParallelMode.TILE, margin=margin) for margin in margins]
    return tuple(arms)
