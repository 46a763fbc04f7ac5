# SPDX-License-Identifier: Apache-2.0
"""Command line flags generated from the configuration classes, and the way back."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from ..errors import ConfigurationError
from .engine import EngineConfig
from .option import Option, option_of
from .parallel import DiffusionParallelConfig
from .server import ServerConfig
from .vae import VaeConfig

T = TypeVar("T")

CONFIGS: tuple[type, ...] = (DiffusionParallelConfig, VaeConfig, EngineConfig, ServerConfig)


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """One generated flag: the field it sets, how it is spelt, and its declaration."""

    name: str
    config: type
    type: Any
    default: Any
    option: Option

    @property
    def spellings(self) -> tuple[str, ...]:
        """Long flag first, then its aliases."""
        return ("--" + self.name.replace("_", "-"), *self.option.aliases)


def flags(configs: Iterable[type] = CONFIGS) -> list[Flag]:
    """Return every flag of ``configs`` in the order of declaration."""
    found = []
    for config in configs:
        hints = typing.get_type_hints(config)
        for field in dataclasses.fields(config):
            declared = option_of(field)
            if declared is not None:
                found.append(Flag(field.name, config, hints[field.name], _default(field), declared))
    return found


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def add_arguments(parser: argparse.ArgumentParser, *, shared: bool) -> list[Flag]:
    """Add one argument group per configuration class to ``parser`` and return the flags that were added.

    Every flag defaults to ``argparse.SUPPRESS``: a namespace only holds what the user gave, so that a parser that is
    shared with another program keeps its namespace unchanged. A spelling that the parser already has is left out.

    Args:
        parser: The parser to extend.
        shared: Whether flags that vLLM's own parser has are added too (False under ``vllm serve``).
    """
    taken = parser._option_string_actions
    added = []
    for config in CONFIGS:
        mine = [f for f in flags((config,)) if shared or not f.option.shared]
        group = parser.add_argument_group(config.__name__, inspect.cleandoc(config.__doc__ or "").splitlines()[0])
        for flag in mine:
            spellings = [s for s in flag.spellings if s not in taken]
            if spellings:
                group.add_argument(*spellings, **_argument(flag))
                added.append(flag)
    return added


def _argument(flag: Flag) -> dict[str, Any]:
    common: dict[str, Any] = {"dest": flag.name, "default": argparse.SUPPRESS, "help": _help(flag)}
    kind = _without_none(flag.type)
    if kind is bool:
        return common | {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(kind) is tuple:
        return common | {"nargs": "+", "action": _Strings}
    parse = flag.option.parse or kind
    metavar = flag.option.metavar or flag.name.upper()
    if isinstance(kind, type) and issubclass(kind, str) and kind is not str:
        metavar = "{" + ",".join(kind) + "}"  # type: ignore[arg-type]
    return common | {"type": _argparse_type(parse), "metavar": metavar}


class _Strings(argparse.Action):
    """One or more strings; each may also be a JSON list of them, the form that vLLM's ``--allowed-*`` flags take."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, tuple(string for value in values for string in _strings(value)))


def _strings(text: str) -> list[str]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return [text]
    return value if isinstance(value, list) and all(isinstance(item, str) for item in value) else [text]


def _argparse_type(parse: Any) -> Any:
    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ConfigurationError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    convert.__name__ = getattr(parse, "__name__", "value")
    return convert


def _help(flag: Flag) -> str:
    text = flag.option.help
    if "Default" not in text and flag.default not in (None, (), {}):
        text += f" Default: {' '.join(flag.default) if isinstance(flag.default, tuple) else flag.default}."
    return text.replace("%", "%%")


def _without_none(kind: Any) -> Any:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return next(k for k in typing.get_args(kind) if k is not type(None))
    return kind


def pick(config: type[T], values: Mapping[str, Any], **fixed: Any) -> T:
    """Build ``config`` from those of ``values`` that it declares; the rest keep their defaults.

    Raises:
        ConfigurationError: the configuration refuses a value.
    """
    names = {f.name for f in flags((config,))}
    return config(**{k: v for k, v in values.items() if k in names}, **fixed)


def engine_config(model: str, values: Mapping[str, Any]) -> EngineConfig:
    """Build the engine's configuration for ``model`` from flat flag values (underscored names)."""
    return pick(
        EngineConfig,
        values,
        model=model,
        parallel=pick(DiffusionParallelConfig, values),
        vae=pick(VaeConfig, values),
    )
