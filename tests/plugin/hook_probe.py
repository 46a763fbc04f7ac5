# SPDX-License-Identifier: Apache-2.0
"""A plugin that only watches: it notes which of the functions that ours replaces are called after vLLM loaded it."""

import functools
import inspect
import sys
from typing import Any

CALLS: list[str] = []


def register() -> None:
    serve = sys.modules["vllm.entrypoints.cli.serve"].ServeSubcommand
    engine_args = sys.modules["vllm.engine.arg_utils"].EngineArgs
    for owner, name in ((engine_args, "add_cli_args"), (serve, "validate"), (serve, "cmd")):
        watched = _watched(f"{owner.__name__}.{name}", getattr(owner, name))
        static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        setattr(owner, name, staticmethod(watched) if static else watched)


def _watched(name: str, function: Any) -> Any:
    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        CALLS.append(f"{name} {args[0].prog}" if hasattr(args[0], "prog") else name)
        return function(*args, **kwargs)

    return watched
