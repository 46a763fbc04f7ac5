# SPDX-License-Identifier: Apache-2.0
"""JSON that comes from outside: what the standard has and nothing more, and not so much that reading it takes long."""

from __future__ import annotations

import json
from typing import Any, NoReturn

MAX_VALUES = 100_000
"""Commas in a text: more than two prompts of the most characters can have."""

MAX_DEPTH = 32
"""Objects and arrays in one another."""


def loads(text: str | bytes) -> Any:
    """Return the value of a JSON text, in a time that depends on `MAX_VALUES` besides the length of its strings.

    Raises:
        ValueError: it is malformed, holds NaN or an infinity, or has too many values or too deep ones.
    """
    if (text.count(b",") if isinstance(text, bytes) else text.count(",")) > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES} commas")
    try:
        value = json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise _too_deep() from None
    if _is_deeper(value, MAX_DEPTH):
        raise _too_deep()
    return value


def _too_deep() -> ValueError:
    return ValueError(f"more than {MAX_DEPTH} objects and arrays in one another")


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _is_deeper(value: Any, most: int) -> bool:
    if not isinstance(value, (dict, list)):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return most == 0 or any(_is_deeper(item, most - 1) for item in inner)
