# SPDX-License-Identifier: Apache-2.0
"""Arguments that several commands take: which autoencoder, how large an input, which operation, how many ranks."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..config import VaeTileMerge
from ..config.splits import MARGIN, check_margin
from ..errors import ConfigurationError

if TYPE_CHECKING:
    from ..autoencoders import FamilySpec, Operation

_LEAST = {"height": 1, "width": 1, "frames": 1, "repeats": 1, "warmup": 0, "chunk": 1}


def add_model(parser: argparse.ArgumentParser, what: str) -> None:
    """Add MODEL|FAMILY to ``parser``, which may also be given as ``--family``; ``what`` it is."""
    one = parser.add_mutually_exclusive_group(required=True)
    one.add_argument("model", metavar="MODEL|FAMILY", nargs="?", default=argparse.SUPPRESS, help=what)
    one.add_argument("--family", dest="model", metavar="FAMILY", help="The same by another name.")


def add_size(parser: argparse.ArgumentParser) -> None:
    """Add the size of the input and the number of ranks, all of which must be given."""
    for name, what in (("height", "Pixels."), ("width", "Pixels."), ("frames", "Frames; 1 for a picture.")):
        parser.add_argument(f"--{name}", type=int, required=True, metavar="N", help=what)
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="Ranks that share the work.")


def add_operation(parser: argparse.ArgumentParser, doing: str) -> None:
    """Add the operation, which the command is ``doing`` something with."""
    parser.add_argument(
        "--operation", choices=("encode", "decode", "both"), default="both", help=f"What to {doing}. Default: both."
    )


def add_tiles(parser: argparse.ArgumentParser, default: str = "") -> None:
    """Add the geometry of tiles; ``default`` says what holds where it is not given."""
    for name, what in (
        ("size", "Tile size in pixels, and frames if a family cuts time."),
        ("stride", "Pixels, and frames, between the starts of neighbouring tiles."),
    ):
        parser.add_argument(f"--tile-{name}", f"--vae-tile-{name}", metavar="HxW[xT]", help=f"{what} {default}".strip())
    parser.add_argument(
        "--tile-merge",
        "--vae-tile-merge",
        nargs="+",
        metavar="MERGE",
        choices=[merge.value for merge in VaeTileMerge],
        default=[VaeTileMerge.BLEND.value],
        help=f"How tiles become one result, or both ways: {', '.join(VaeTileMerge)}. Default: {VaeTileMerge.BLEND}.",
    )


def add_margins(parser: argparse.ArgumentParser) -> None:
    """Add the margins of pieces."""
    parser.add_argument(
        "--split-margin",
        nargs="+",
        type=int,
        metavar="N",
        default=[MARGIN],
        help="Latent rows and columns of context on the inner edges of one piece for each rank (rank_split), or "
        f"several numbers to compare. Default: {MARGIN}.",
    )


def margins_of(args: argparse.Namespace) -> list[int]:
    """Margins that were asked for, each once.

    Raises:
        ConfigurationError: one is negative.
    """
    for margin in args.split_margin:
        check_margin("--split-margin", margin)
    return list(dict.fromkeys(args.split_margin))


def merges_of(args: argparse.Namespace) -> list[VaeTileMerge]:
    """Ways to make one result of tiles that were asked for, each once."""
    return list(dict.fromkeys(map(VaeTileMerge, args.tile_merge)))


def operations_of(args: argparse.Namespace, spec: FamilySpec) -> tuple[Operation, ...]:
    """Those that were asked for; of both, those that the family has.

    Raises:
        UnsupportedError: the family does not have the one that was asked for.
    """
    from ..autoencoders import Operation

    if args.operation == "both":
        return spec.operations
    spec.check_operation(Operation(args.operation))
    return (Operation(args.operation),)


def check_numbers(args: argparse.Namespace, ranks_flag: str = "--ranks") -> None:
    """Refuse numbers that cannot be meant.

    Raises:
        ConfigurationError: names the flag.
    """
    for name, least in _LEAST.items():
        value: Any = getattr(args, name, None)
        if value is not None and value < least:
            raise ConfigurationError(f"--{name} is {value}; it must be at least {least}")
    if args.ranks < 2:
        raise ConfigurationError(f"{ranks_flag} is {args.ranks}; one rank has nobody to share with, so give at least 2")
    if not getattr(args, "timeout", 1.0) > 0:
        raise ConfigurationError(f"--timeout is {args.timeout:g}; give a number of seconds above 0")
