# SPDX-License-Identifier: Apache-2.0
"""``vllm-omni-vae tiny``: small random checkpoints to try everything with."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from ..tiny import FAMILIES, build


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand to ``commands``."""
    parser = commands.add_parser(
        "tiny",
        help="write a tiny checkpoint with random weights",
        description="Write a checkpoint with a model family's real structure, narrow layers and random weights. "
        "It needs no network and loads like the real one.",
    )
    parser.add_argument("--family", metavar="NAME", help="Which model family; see --list.")
    parser.add_argument("--out", metavar="DIR", type=Path, help="Folder to write to; new, or empty.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the weights. Default: 0.")
    parser.add_argument("--list", action="store_true", help="Show the families and exit.")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Write the checkpoint and print its folder, or print the families.

    Raises:
        ConfigurationError: no family or no folder was named, or `vllm_omni_vae.tiny.build` refuses them.
    """
    if args.list:
        width = max(map(len, FAMILIES))
        for family, description in FAMILIES.items():
            print(f"{family:<{width}}  {description}")
        return
    if args.family is None or args.out is None:
        raise ConfigurationError("tiny needs --family NAME and --out DIR; --list shows the families")
    print(build(args.family, args.out, seed=args.seed))
