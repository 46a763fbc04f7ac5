# SPDX-License-Identifier: Apache-2.0
"""Bodies: multipart, forms and JSON become the same nested fields."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from vllm_omni_vae.errors import RequestError
from vllm_omni_vae.server.body import read_fields


def read(repeated: frozenset[str] = frozenset(), **content: Any) -> dict[str, Any]:
    """Read what httpx makes of ``content``."""
    sent = httpx.Request("POST", "http://server/", **content)
    body = sent.read()
    headers = [(name.lower().encode(), value.encode()) for name, value in sent.headers.items()]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": headers, "app": None}
    return asyncio.run(read_fields(Request(scope, receive), max_bytes=4 * 2**20, repeated=repeated))


def refusal(**content: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(**content)
    return caught.value


def multipart(*fields: tuple[str, str]) -> dict[str, Any]:
    return {"files": [(name, (None, value)) for name, value in fields]}


def test_a_form_is_text_and_files_are_bytes() -> None:
    fields = {"prompt": "a cat", "seed": "7"}
    assert read(data=fields) == fields
    assert read(files={"input_reference": ("x", b"\x00\xff", "text/plain")}, data=fields) == {
        **fields,
        "input_reference": b"\x00\xff",
    }


def test_brackets_nest_and_their_text_is_coerced() -> None:
    got = read(
        **multipart(
            ("extra_params[a]", "1"),
            ("extra_params[b]", "true"),
            ("extra_params[c][d]", "2.5"),
            ("extra_params[e]", "text"),
            ("extra_params[f]", "null"),
            ("extra_params[g][]", "1"),
            ("extra_params[g][]", "x"),
            ("extra_params[h]", '"quoted"'),
            ("input_reference[image_url]", "data:x"),
        )
    )
    nested = {"a": 1, "b": True, "c": {"d": 2.5}, "e": "text", "f": None, "g": [1, "x"], "h": '"quoted"'}
    assert got == {"extra_params": nested, "input_reference": {"image_url": "data:x"}}


def test_odd_names_are_left_alone_for_validation_to_name() -> None:
    assert read(**multipart(("a]", "1"), ("[b]", "2"), ("c[d", "3"))) == {"a]": "1", "[b]": "2", "c[d": "3"}


def test_an_empty_field_was_not_given() -> None:
    assert read(**multipart(("seed", ""), ("prompt", ""), ("negative_prompt", ""))) == {
        "prompt": "",
        "negative_prompt": "",
    }


@pytest.mark.parametrize(
    "fields",
    [
        [("seed", "1"), ("seed", "2")],
        [("a[b]", "1"), ("a[b]", "2")],
        [("a", "1"), ("a[b]", "2")],
        [("a[b]", "1"), ("a[b][c]", "2")],
        [("a[b]", "1"), ("a[b][]", "2")],
        [("a[b]", "1"), ("a", "2")],
    ],
)
def test_a_field_sent_twice_is_refused(fields: list[tuple[str, str]]) -> None:
    error = refusal(**multipart(*fields))
    assert (error.status, error.param, error.code) == (400, fields[0][0].partition("[")[0], "duplicate_parameter")


def test_fields_that_may_come_more_than_once_are_lists() -> None:
    image = frozenset({"image"})
    for names in (("image", "image"), ("image[]", "image[]"), ("image", "image[]")):
        files = [(name, ("f", data)) for name, data in zip(names, (b"1", b"2"), strict=True)]
        assert read(image, files=files) == {"image": [b"1", b"2"]}
    assert read(image, **multipart(("image", "data:x"), ("seed", "1"))) == {"image": ["data:x"], "seed": "1"}
    assert read(image, **multipart(("image", ""), ("seed", "1"))) == {"seed": "1"}
    assert read(image, json={"image": "data:x"}) == {"image": "data:x"}
    with pytest.raises(RequestError) as caught:
        read(image, **multipart(("image[image_url]", "data:x"), ("image", "data:y")))
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "image", "duplicate_parameter")


def test_a_long_field_passes_starlette_s_own_limit() -> None:
    url = "data:image/png;base64," + "A" * (2 * 2**20)
    assert read(**multipart(("input_reference[image_url]", url)))["input_reference"]["image_url"] == url


def test_json() -> None:
    body = {"prompt": "a cat", "seed": 7, "size": None, "extra_params": {"a": None}}
    assert read(json=body) == {"prompt": "a cat", "seed": 7, "extra_params": {"a": None}}
    utf8 = json.dumps({"prompt": "猫"}, ensure_ascii=False).encode()
    headers = {"Content-Type": "application/json; charset=utf-8"}
    assert read(content=utf8, headers=headers) == {"prompt": "猫"}


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'"x"', b"\xff", b"[" * 200_000, b'{"seed": ' + b"1" * 5000 + b"}"]
)
def test_malformed_json_is_400(content: bytes) -> None:
    error = refusal(content=content, headers={"Content-Type": "application/json"})
    assert (error.status, error.code) == (400, "invalid_json")


@pytest.mark.parametrize("headers", [{}, {"Content-Type": "text/plain"}])
def test_another_type_is_415(headers: dict[str, str]) -> None:
    assert refusal(content=b"x", headers=headers).status == 415
