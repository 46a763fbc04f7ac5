# SPDX-License-Identifier: Apache-2.0
"""``vllm-omni-vae verify``: whether ranks on this machine make of a checkpoint what is promised."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from ..config import TileExtent, VaeConfig
from ..errors import ConfigurationError, GeometryError
from .asked import check_numbers
from .blank import Found, find_autoencoders, make_blank
from .measured_report import verify_text
from .measuring import Request, add_arguments, plan_request, run_request
from .table import align

_TILE, _STRIDE = 8, 5
"""Tile size and stride in latents, where none is given."""
_PROBE = 2
"""Latents along height and width that every autoencoder decodes."""
_ROWS, _COLS, _TIME = 13, 17, 3
"""Latents that are verified with, where nothing is given: pieces of unlike size, and thin last tiles."""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand to ``commands``."""
    parser = commands.add_parser(
        "verify",
        help="check on this machine that ranks make what one rank makes",
        description="Encode and decode on one rank and shared among ranks in every mode, with the VAE of a checkpoint, "
        "and compare. Ends with code 1 if a result is not what is promised or a rank fails.",
    )
    add_arguments(parser, warmup=1, repeats=5)
    parser.add_argument(
        "--vae-patch-parallel-size",
        "--ranks",
        dest="ranks",
        type=int,
        required=True,
        metavar="N",
        help="Ranks that share the work.",
    )
    small = "Default: a small size, in small tiles."
    for name in ("height", "width"):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"Pixels; give both or none. {small}")
    parser.add_argument("--frames", type=int, metavar="N", help="Default: few, or 1 where there is no time.")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Compare, and print tables or JSON.

    Raises:
        ConfigurationError: what was asked for cannot be run; no process was started.
        EngineError: a rank failed.
        SystemExit: with code 1 when a promise is not kept.
    """
    check_numbers(args, "--vae-patch-parallel-size")
    if (args.height is None) != (args.width is None):
        raise ConfigurationError("only one of --height and --width is given; give both, or none for a small size")
    tiles = VaeConfig(vae_tile_size=args.tile_size, vae_tile_stride=args.tile_stride)
    found = find_autoencoders(args.model)
    requests = [request_of(one, args, tiles) for one in found if one.known]
    parts = [_Part.of(one, args.ranks) for one in found]
    if not args.json:
        print(_components(args.model, parts))
    measured = []
    for request in requests:
        measured.append(run_request(request))
        if not args.json:
            print(f"\n{verify_text(measured[-1], args.model)}", flush=True)
    broken = [promise for one in measured for promise in one.broken]
    if args.json:
        told = {
            "model": args.model,
            "components": [dataclasses.asdict(part) for part in parts],
            "autoencoders": [one.to_json() for one in measured],
            "broken": broken,
        }
        print(json.dumps(told, indent=2))
    if broken:
        sys.exit(f"error: promises that are not kept: {', '.join(broken)}")
    if not args.json:
        print("\nevery promise is kept")


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """One autoencoder of the pipeline: whether ranks share its work, and why not."""

    path: str
    kind: str
    parallel: bool
    detail: str

    @classmethod
    def of(cls, found: Found, ranks: int) -> _Part:
        why = f"on {ranks} ranks" if found.known else f"no distributed class for {found.kind}"
        return cls(found.path, found.kind, found.known, why)


def _components(model: str, parts: Sequence[_Part]) -> str:
    rows = [(part.path, part.kind, "on" if part.parallel else "off", part.detail) for part in parts]
    return "\n".join([f"autoencoders of {model}", "", *align([("component", "class", "shared", ""), *rows])])


def request_of(found: Found, args: argparse.Namespace, tiles: VaeConfig) -> Request:
    """What ``args`` ask for: the sizes that were given, and small ones that need several tiles where none was."""
    from ..autoencoders import Operation

    blank = make_blank(found.config, args.dtype, args.ranks, tiles.vae_tile_size, tiles.vae_tile_stride)
    probe = (_TIME if blank.spec.has_time else 1, _PROBE, _PROBE)
    few, high, wide = blank.spec.extents(blank.spec.example(blank, Operation.ENCODE, probe))
    height, width = high // _PROBE, wide // _PROBE
    if args.height is None and args.tile_size is None and args.tile_stride is None:
        small = TileExtent(_TILE * height, _TILE * width), TileExtent(_STRIDE * height, _STRIDE * width)
        tiles = VaeConfig(vae_tile_size=small[0], vae_tile_stride=small[1])
    rows, cols = (_latents(least, args.ranks) for least in (_ROWS, _COLS))
    pixels = (args.height or rows * height, args.width or cols * width)
    if args.frames is not None:
        return plan_request(found, args, (args.frames, *pixels), tiles, timing=False)
    try:
        return plan_request(found, args, (few, *pixels), tiles, timing=False)
    except GeometryError:
        return plan_request(found, args, (1, *pixels), tiles, timing=False)


def _latents(least: int, ranks: int) -> int:
    """An odd number that gives every rank two or more; tiles leave two over, of which reflection needs that many."""
    count = max(least, 2 * ranks + 1)
    return count + 2 if count % _STRIDE == 1 else count
