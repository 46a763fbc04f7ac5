# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` for diffusers checkpoints: the entry point that vLLM loads while it builds its ``serve`` parser."""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import logging
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .errors import ConfigurationError

if TYPE_CHECKING:
    from .config.flags import Flag

logger = logging.getLogger(__name__)

SUPPORTED_VLLM = "0.30 to 0.33"

_SERVE_MODULE = "vllm.entrypoints.cli.serve"
_OTHER_PARENTS = frozenset({"bench", "launch"})


def register() -> None:
    """Make ``vllm serve`` of this process take diffusers checkpoints; other models and commands stay as they were.

    Never raises, and may be called again. Does nothing outside vLLM's command line (engine cores and workers load
    plugins too) and nothing under ``--omni``, whose parser has flags of the same names. Where vLLM lacks what this
    hooks into, it is left untouched and one warning says so.
    """
    if "--omni" in sys.argv or _SERVE_MODULE not in sys.modules:
        return
    try:
        _install()
    except Exception as error:
        _warn(error)


def _warn(error: Exception) -> None:
    logger.warning(
        "`vllm serve` cannot take diffusion models here (%s: %s); vLLM %s are supported. "
        "Other models are served as ever; for diffusion models use `vllm-omni-vae serve MODEL`.",
        type(error).__name__,
        error,
        SUPPORTED_VLLM,
    )


@functools.cache
def _install() -> None:
    engine_args = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    subcommand = sys.modules[_SERVE_MODULE].ServeSubcommand
    add_cli_args = _hook(engine_args, "add_cli_args", staticmethod)
    cmd = _hook(subcommand, "cmd", staticmethod)
    validate = _hook(subcommand, "validate", types.FunctionType)
    serve = _Serve()

    @functools.wraps(add_cli_args)
    def add_cli_args_and_ours(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        result = add_cli_args(parser, *args, **kwargs)
        serve.extend(parser)
        return result

    @functools.wraps(validate)
    def validate_or_claim(command: Any, args: argparse.Namespace) -> Any:
        if serve.claims(args):
            return None
        serve.refuse_own_flags(args)
        return validate(command, args)

    @functools.wraps(cmd)
    def run_or_launch(args: argparse.Namespace) -> Any:
        return serve.launch(args) if serve.claims(args) else cmd(args)

    engine_args.add_cli_args = staticmethod(add_cli_args_and_ours)
    subcommand.cmd = staticmethod(run_or_launch)
    subcommand.validate = validate_or_claim


def _hook(owner: type, name: str, kind: type) -> Any:
    if not isinstance(inspect.getattr_static(owner, name), kind):
        raise TypeError(f"{owner.__name__}.{name} is no {kind.__name__}")
    return getattr(owner, name)


class _Serve:
    """One run of ``vllm serve``: its parser, the words it parsed, and whether its model is ours to serve."""

    def __init__(self) -> None:
        self._parser: argparse.ArgumentParser | None = None
        self._flags: list[Flag] = []
        self._words: list[str] = []
        self._claimed: bool | None = None

    def extend(self, parser: argparse.ArgumentParser) -> None:
        """Add our flags to ``parser`` if it is that of `vllm serve`, and keep the words it will parse. Never raises."""
        words = parser.prog.split()
        if words[-1:] != ["serve"] or _OTHER_PARENTS.intersection(words):
            return
        self._parser = None
        try:
            from .config.flags import add_arguments

            self._flags = add_arguments(parser, shared=False)
        except Exception as error:
            _warn(error)
            return
        parse = parser.parse_known_args

        @functools.wraps(parse)
        def keep_words_and_parse(args: Any = None, namespace: Any = None) -> Any:
            self._words, self._claimed = list(sys.argv[1:] if args is None else args), None
            return parse(args, namespace)

        parser.parse_known_args = keep_words_and_parse  # type: ignore[method-assign]
        self._parser = parser

    def claims(self, args: argparse.Namespace) -> bool:
        """Whether the model of ``args`` is a diffusers checkpoint that vLLM itself cannot serve; decided once.

        Raises:
            SystemExit: the checkpoint is broken, or the hub could not be asked about a model that has our flags.
        """
        if self._claimed is None:
            try:
                self._claimed = self._parser is not None and self._find_out(args)
            except ConfigurationError as error:
                given = self._own_flags(args)
                self._error(f"{_needs_ours(given)}: {error}" if given else str(error))
            except Exception as error:
                _warn(error)
                self._claimed = False
        return self._claimed

    def _find_out(self, args: argparse.Namespace) -> bool:
        from .checkpoint import find

        given = self._own_flags(args)
        found = find(_model(args), revision=args.revision, cache_dir=args.download_dir, online=bool(given))
        if found is None:
            return False
        if given or not Path(found.folder, "config.json").is_file():
            return True

        from .pipelines.registry import find_profile

        return find_profile(found.pipeline_class) is not None

    def refuse_own_flags(self, args: argparse.Namespace) -> None:
        """Refuse flags that only mean something to a diffusion model.

        Raises:
            SystemExit: there are some.
        """
        given = self._own_flags(args)
        if given:
            self._error(f"{_needs_ours(given)}, and {_model(args)} is none: there is no model_index.json in it")

    def launch(self, args: argparse.Namespace) -> None:
        """Serve the model of ``args`` with what the user gave; flags that have no meaning here are named once."""
        from .cli.serve import launch
        from .config.flags import flags

        known = {flag.name for flag in flags()}
        given = self._given()
        ignored = sorted(flag for name, (flag, _) in given.items() if name not in known)
        if ignored:
            logger.warning("Ignored, because they mean nothing to a diffusion model: %s", ", ".join(ignored))
        launch(_model(args), {name: value for name, (_, value) in given.items() if name in known})

    def _given(self) -> dict[str, tuple[str, Any]]:
        """What the user gave, by name: the flag and its value. A value that equals the default counts too."""
        assert self._parser is not None
        options = {a.dest: a.option_strings for a in self._parser._actions if a.option_strings}
        # argparse gives a default only to names that a namespace lacks. Its own method, because vLLM's warns of every
        # deprecated flag whose value is not the default.
        blank = argparse.Namespace(**dict.fromkeys(options))
        parsed, _ = argparse.ArgumentParser.parse_known_args(self._parser, self._words, blank)
        return {
            name: (next((s for s in options[name] if s.startswith("--")), options[name][0]), value)
            for name, value in vars(parsed).items()
            if value is not None and name in options and name != "model"
        }

    def _own_flags(self, args: argparse.Namespace) -> list[str]:
        return [flag.spellings[0] for flag in self._flags if hasattr(args, flag.name)]

    def _error(self, message: str) -> NoReturn:
        assert self._parser is not None
        self._parser.error(message)


def _model(args: argparse.Namespace) -> str:
    return getattr(args, "model_tag", None) or args.model


def _needs_ours(flags: list[str]) -> str:
    return f"{', '.join(flags)} can only be used with a diffusers checkpoint"
