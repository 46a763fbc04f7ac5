# SPDX-License-Identifier: Apache-2.0
"""The ``vllm-omni-vae`` command."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence

from . import bench, plan, serve, tiny, verify
from .exit import exit_on_error


def main(argv: Sequence[str] | None = None) -> None:
    """Run one subcommand. Neither torch nor vLLM is imported before a command needs it.

    Args:
        argv: Arguments without the program's name; None for the process's own.

    Raises:
        SystemExit: after ``--help`` and ``--version``, and with a non-zero code on any error of this package.
    """
    parser = argparse.ArgumentParser(
        prog="vllm-omni-vae", description="Diffusion models whose VAE encodes and decodes on several ranks."
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (serve, plan, verify, bench, tiny):
        command.add_parser(commands)
    args = parser.parse_args([_dashed(word) for word in (sys.argv[1:] if argv is None else argv)])
    with exit_on_error():
        args.run(args)


def _version() -> str:
    try:
        return importlib.metadata.version("vllm-omni-vae")
    except importlib.metadata.PackageNotFoundError:
        return "unknown: the package is not installed"


def _dashed(word: str) -> str:
    """Spell a long flag with dashes, so that ``--max_frames`` works as it does under ``vllm serve``."""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else word


if __name__ == "__main__":
    main()
