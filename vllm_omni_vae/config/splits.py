# SPDX-License-Identifier: Apache-2.0
"""What an encode or a decode is cut into for the ranks, where it is neither run whole nor as one feature map."""

from __future__ import annotations

import dataclasses
from enum import StrEnum

from ..envs import vae_margin, vae_split
from ..errors import ConfigurationError
from .option import named

MARGIN = 2
"""Latent rows and columns of context, where no other number is asked for."""

OPERATIONS = ("encode", "decode")

RANK_SPLIT = "rank_split"
"""What one piece for each rank is called where strategies are named, and modes, of which it is none."""


class VaeSplit(StrEnum):
    """What the ranks cut.

    ``tile``: overlapping tiles, many or few, blended. ``rank``: one piece for each rank, with a margin of context on
    inner edges that is dropped afterwards; what is left of the pieces is put side by side.
    """

    TILE = "tile"
    RANK = "rank"

    @classmethod
    def parse(cls, value: str | VaeSplit) -> VaeSplit:
        """Return the split named ``value``.

        Raises:
            ConfigurationError: no such split; the message lists those there are.
        """
        return named(cls, "split", value)


@dataclasses.dataclass(frozen=True, slots=True)
class VaeSplits:
    """Which operations are split by rank instead of in tiles, and with how much context.

    >>> VaeSplits(encode=2).margin("decode") is None
    True

    Attributes:
        encode, decode: Latent rows and columns of margin on each inner edge of a piece; None: in tiles.

    Raises:
        ConfigurationError: a margin that is no number of rows.
    """

    encode: int | None = None
    decode: int | None = None

    def __post_init__(self) -> None:
        for operation in OPERATIONS:
            check_margin(f"{operation} margin", self.margin(operation))

    def margin(self, operation: str) -> int | None:
        """Margin of ``operation``; None: it is cut into tiles."""
        return self.encode if operation == "encode" else self.decode


def check_margin(name: str, margin: object) -> None:
    """Refuse what is neither None nor a number of latent rows.

    Raises:
        ConfigurationError: under ``name``.
    """
    if margin is not None and (not isinstance(margin, int) or isinstance(margin, bool) or margin < 0):
        raise ConfigurationError(f"{name} is {margin!r}; it counts latent rows and must be a whole number, 0 or more")


IN_TILES = VaeSplits()
"""Nothing is split by rank."""


def resolve(operation: str, split: str | None, margin: int | None, ranks: int) -> tuple[VaeSplit, int | None]:
    """Split of ``operation``, and its margin where it is split by rank; what is not given is asked of the environment.

    A variable of the environment may be meant for several servers, so one that is valid and has nothing to act on is
    passed over. What is given here is not: it would do nothing.

    Args:
        operation: ``encode`` or ``decode``.
        split, margin: As they were given; None: not at all.
        ranks: VAE ranks.

    Raises:
        ConfigurationError: names the field or the variable.
    """
    field = f"vae_{operation}_margin"
    check_margin(field, margin)
    usual, context = _split_of_environment(operation), _margin_of_environment(operation)
    if split is None:
        chosen = usual if ranks > 1 else VaeSplit.TILE
    else:
        chosen = named(VaeSplit, f"vae_{operation}_split", split)
        if chosen is VaeSplit.RANK and ranks == 1:
            raise ConfigurationError(
                f"vae_{operation}_split rank does nothing on one VAE rank; give a vae_patch_parallel_size of 2 or more"
            )
    if chosen is VaeSplit.TILE:
        if margin is not None:
            raise ConfigurationError(f"{field} {margin} does nothing without vae_{operation}_split rank; add that")
        return chosen, None
    return chosen, context if margin is None else margin


def _split_of_environment(operation: str) -> VaeSplit:
    found = vae_split(operation)
    return VaeSplit.TILE if found is None else named(VaeSplit, *found)


def _margin_of_environment(operation: str) -> int:
    found = vae_margin(operation)
    if found is None:
        return MARGIN
    name, text = found
    try:
        margin: object = int(text)
    except ValueError:
        margin = text
    check_margin(name, margin)
    return int(text)
