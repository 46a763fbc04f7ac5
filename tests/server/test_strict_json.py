# SPDX-License-Identifier: Apache-2.0
"""JSON from outside: nothing that the standard does not have, and a bound on what there is of it."""

import json

import pytest

from vllm_omni_vae.server.fields import MAX_PROMPT
from vllm_omni_vae.server.strict_json import MAX_DEPTH, MAX_VALUES, loads


@pytest.mark.parametrize("value", [{}, [], 1, 1.5, "a", True, None, {"a": [1, {"b": ["x"]}]}, "\ud800"])
def test_what_json_has(value: object) -> None:
    assert loads(json.dumps(value)) == value
    assert loads(json.dumps(value).encode()) == value


@pytest.mark.parametrize("text", ["", "{", "NaN", "[Infinity]", '{"a": -Infinity}', "[1,]", "'a'", "1" * 5000, "\x00"])
def test_what_it_does_not_have(text: str) -> None:
    with pytest.raises(ValueError):
        loads(text)
    with pytest.raises(ValueError):
        loads(text.encode())


def test_depth() -> None:
    assert loads("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    for depth in (MAX_DEPTH + 1, 900, 1_000_000):
        for text in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
            with pytest.raises(ValueError, match=f"more than {MAX_DEPTH} objects and arrays in one another"):
                loads(text)


def test_values() -> None:
    assert len(loads("[" + "1," * MAX_VALUES + "1]")) == MAX_VALUES + 1
    for text in ("[" + "1," * (MAX_VALUES + 1) + "1]", b'{"prompt": "' + b"," * (MAX_VALUES + 1) + b'"}'):
        with pytest.raises(ValueError, match=f"more than {MAX_VALUES} commas"):
            loads(text)
    assert 2 * MAX_PROMPT < MAX_VALUES
