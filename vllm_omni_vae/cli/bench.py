# SPDX-License-Identifier: Apache-2.0
"""``vllm-omni-vae bench``: time every way to share an encode or decode against one rank."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ..config import VaeConfig
from ..errors import ConfigurationError
from .asked import add_size, check_numbers
from .bars import Chart, draw_png
from .blank import find_autoencoders
from .measured_report import bars, bench_text
from .measuring import add_arguments, plan_request, run_request


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand to ``commands``."""
    parser = commands.add_parser(
        "bench",
        help="time every VAE parallel mode on this machine",
        description="Time encode and decode on one rank, un-tiled and in tiles, and shared among ranks in every mode, "
        "each shard also without messages. Nothing else of a pipeline runs. Every rank is a process that this "
        "command starts and ends: one for each accelerator, or of the CPU. Every repeat runs everything once.",
    )
    add_arguments(parser, warmup=3, repeats=20)
    add_size(parser)
    parser.add_argument(
        "--chunk",
        type=int,
        metavar="N",
        help="Latent frames that a shard takes at a time after the first. Default: as it decides by its size.",
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="Also draw the times.")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Measure, and print tables or JSON.

    Raises:
        ConfigurationError: what was asked for cannot be run; no process was started.
        EngineError: a rank failed.
        SystemExit: with code 1 when shared tiles are not those of one rank: then the times mean nothing.
    """
    check_numbers(args)
    if args.png and not args.png.absolute().parent.is_dir():
        raise ConfigurationError(f"cannot write {args.png}: there is no such folder")
    tiles = VaeConfig(vae_tile_size=args.tile_size, vae_tile_stride=args.tile_stride)
    found = next(one for one in find_autoencoders(args.model) if one.known)
    size = (args.frames, args.height, args.width)
    measured = run_request(plan_request(found, args, size, tiles, timing=True))
    if args.png:
        draw_png([Chart(f"{one.operation}: seconds", tuple(bars(one))) for one in measured.operations], args.png)
    if args.json:
        print(json.dumps({"model": args.model} | measured.to_json(), indent=2))
    else:
        print(bench_text(measured, args.model))
    if measured.broken:
        sys.exit(f"error: not what is promised: {', '.join(measured.broken)}")
