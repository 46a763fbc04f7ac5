# SPDX-License-Identifier: Apache-2.0
"""``vllm-omni-vae serve``, and the start of the server that it shares with ``vllm serve``."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import checkpoint
from ..config import ServerConfig
from ..config.engine import ExecutorBackend
from ..config.flags import add_arguments, engine_config, pick
from ..errors import ConfigurationError
from .exit import exit_on_error

_OWN = ("run", "model", "config")


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand to ``commands``."""
    parser = commands.add_parser(
        "serve",
        help="serve a diffusers checkpoint over HTTP",
        usage="%(prog)s MODEL [options]",
        description="Serve a diffusers checkpoint over OpenAI's HTTP API: what `vllm serve` does with this package "
        "installed, without vLLM.",
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help="Local folder, or name of a model on the hub.")
    parser.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        help="YAML file of flags without their dashes, and of the model; the command line wins.",
    )
    add_arguments(parser, shared=True)
    parser.set_defaults(run=functools.partial(run, parser))


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Serve until the process is asked to stop.

    Raises:
        SystemExit: as for `launch`; with code 2 also when no model is given or ``--config`` cannot be used.
    """
    values = vars(args)
    if args.config is not None:
        try:
            model, words = _read_config(args.config)
        except ConfigurationError as error:
            parser.error(str(error))
        values = {**vars(parser.parse_args(words)), **values, "model": args.model or model}
    if values["model"] is None:
        parser.error("no model was given; name one after `serve` or as `model` in the file of --config")
    launch(values["model"], {name: value for name, value in values.items() if name not in _OWN})


def launch(model: str, values: Mapping[str, Any]) -> None:
    """Serve ``model`` until the process is asked to stop; every way to start the server ends here.

    Args:
        model: Local folder, or name of a model on the hub.
        values: Configuration fields by name, only those that the user gave.

    Raises:
        SystemExit: with code 2 and one line on stderr for a value or a checkpoint that cannot work, with code 1 when
            the server could not go on.
    """
    with exit_on_error():
        engine = engine_config(model, values)
        if engine.distributed_executor_backend is ExecutorBackend.EXTERNAL_LAUNCHER:
            raise ConfigurationError(
                "distributed_executor_backend external_launcher is for Omni in a program that torchrun starts; a "
                "server has one process that takes requests, so start it once, with mp, or ray for several machines"
            )
        server = pick(ServerConfig, values)
        found = checkpoint.require(model, revision=engine.revision, cache_dir=engine.download_dir)
        found.profile(engine.model_class_name)

        from ..server.app import run as run_server

        run_server(engine, server)


def _read_config(file: Path) -> tuple[str | None, list[str]]:
    """Return the model that ``file`` names, if any, and its other entries as command line words."""
    import yaml

    try:
        entries = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(f"cannot read {file}: {error}") from None
    if not isinstance(entries, dict):
        raise ConfigurationError(f"{file} holds no mapping; write one flag a line, such as `port: 8000`")
    model = entries.pop("model", None)
    words: list[str] = []
    for name, value in entries.items():
        flag = str(name).replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            words += [f"--{flag}", *map(str, value)]
        elif isinstance(value, dict):
            words.append(f"--{flag}={json.dumps(value)}")
        else:
            words.append(f"--{flag}={value}")
    return model, words
