# SPDX-License-Identifier: Apache-2.0
"""A configuration field that documents itself: the same declaration is the API, the flag and its help."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from enum import StrEnum
from typing import Any, TypeVar

from ..errors import ConfigurationError

Named = TypeVar("Named", bound=StrEnum)

_KEY = "vllm_omni_vae.option"


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """What the command line needs to know of one field beyond its name, type and default.

    Attributes:
        help: One or two sentences; shown by ``--help`` and in the generated flag table.
        aliases: Further spellings of the flag, with their dashes.
        parse: Turns the text of the command line into the field's value; derived from the type when absent.
        metavar: Placeholder in the help text.
        shared: vLLM's own ``serve`` parser already has this flag, so it is only added where vLLM's is absent.
    """

    help: str
    aliases: tuple[str, ...] = ()
    parse: Callable[[str], Any] | None = None
    metavar: str | None = None
    shared: bool = False


def option(
    default: Any,
    help: str,
    *,
    aliases: tuple[str, ...] = (),
    parse: Callable[[str], Any] | None = None,
    metavar: str | None = None,
    shared: bool = False,
) -> Any:
    """Declare a dataclass field that is also a command line flag (see `Option` for the arguments)."""
    declared = Option(help, aliases, parse, metavar, shared)
    if callable(default):
        return dataclasses.field(default_factory=default, metadata={_KEY: declared})
    return dataclasses.field(default=default, metadata={_KEY: declared})


def option_of(field: dataclasses.Field[Any]) -> Option | None:
    """Return the `Option` of a dataclass field, or None for a field that is no flag."""
    return field.metadata.get(_KEY)


def named(kind: type[Named], field: str, value: str) -> Named:
    """Return the member of ``kind`` that ``value`` of ``field`` names.

    Raises:
        ConfigurationError: none; the message lists those there are.
    """
    try:
        return kind(value)
    except ValueError:
        raise ConfigurationError(f"{field} {value!r} is not known; choose one of {', '.join(kind)}") from None
