# SPDX-License-Identifier: Apache-2.0
"""Request bodies as one nested mapping, whether they came as multipart, as a plain form or as JSON."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection
from typing import Any

from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.requests import Request

from ..errors import RequestError
from .strict_json import MAX_DEPTH, loads

# Sixteen images and a mask, as OpenAI's client sends them.
MAX_FILES = 17
MAX_FIELDS = 256
# Others that Python knows take time that grows with the square of a text, or are no text at all.
_CHARSETS = frozenset({"utf-8", "utf8", "us-ascii", "iso-8859-1", "latin-1"})
_FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")
_BRACKETS = re.compile(r"([^\[\]]+)((?:\[[^\[\]]*\])+)")
_TEXT_FIELDS = frozenset({"prompt", "negative_prompt"})


async def read_fields(request: Request, *, max_bytes: int, repeated: Collection[str] = frozenset()) -> dict[str, Any]:
    """Return the fields of a request's body.

    In a form, ``a[b]=1`` is the field ``a`` with the mapping ``{"b": 1}`` and ``a[]=x`` a list; a file is its bytes; an
    empty text means that the field was not given, except for prompts. Text inside brackets that reads as a JSON number,
    true, false or null is that value.

    Args:
        request: A request whose body is a form or a JSON object.
        max_bytes: Most bytes of one part.
        repeated: Fields that a form may hold more than once; they are lists, also where they come once.

    Raises:
        RequestError: 400 for a malformed body, too many parts or too deep ones, 415 for another Content-Type or
            charset.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type in _FORMS:
        _check_charset(request.headers["content-type"])
        return await _read_form(request, max_bytes, repeated)
    if content_type == "application/json" or content_type.endswith("+json"):
        return await asyncio.to_thread(_parse_json, await request.body())
    raise RequestError(
        f"the Content-Type is {content_type or 'missing'}; send multipart/form-data or application/json",
        code="unsupported_media_type",
        status=415,
    )


def _parse_json(body: bytes) -> dict[str, Any]:
    try:
        value = loads(body)
    except ValueError as error:
        raise RequestError(f"the body is no JSON: {error}", code="invalid_json", status=400) from None
    if not isinstance(value, dict):
        raise RequestError("the body is JSON but no object; send {...}", code="invalid_json", status=400)
    if len(value) > MAX_FIELDS:
        message = f"the body has {len(value)} fields; send at most {MAX_FIELDS}"
        raise RequestError(message, code="invalid_json", status=400)
    return {name: field for name, field in value.items() if field is not None}


def _check_charset(content_type: str) -> None:
    charset = parse_options_header(content_type)[1].get(b"charset", b"utf-8").decode("latin-1")
    if charset.lower() not in _CHARSETS:
        raise RequestError(
            f"the charset of the form is {charset}; send it in utf-8", code="unsupported_media_type", status=415
        )


async def _read_form(request: Request, max_bytes: int, repeated: Collection[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    async with request.form(max_files=MAX_FILES, max_fields=MAX_FIELDS, max_part_size=max_bytes) as form:
        for name, value in form.multi_items():
            content = await value.read() if isinstance(value, UploadFile) else value
            if content == "" and name not in _TEXT_FIELDS:
                continue
            _put(fields, f"{name}[]" if name in repeated else name, content)
    return fields


def _put(fields: dict[str, Any], name: str, value: bytes | str) -> None:
    if name.count("[") > MAX_DEPTH:
        message = f"a field has more than {MAX_DEPTH} pairs of brackets"
        raise RequestError(message, code="invalid_parameter", status=400)
    match = _BRACKETS.fullmatch(name)
    if match is None:
        _put_leaf(fields, name, value, name)
        return
    keys = [match[1], *re.findall(r"\[([^\[\]]*)\]", match[2])]
    is_list = keys[-1] == ""
    if is_list:
        keys.pop()
    leaf = _literal(value) if isinstance(value, str) else value
    target: Any = fields
    for key in keys[:-1]:
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            raise _clash(name)
    if is_list:
        items = target.setdefault(keys[-1], [])
        if not isinstance(items, list):
            raise _clash(name)
        items.append(leaf)
    else:
        _put_leaf(target, keys[-1], leaf, name)


def _put_leaf(target: dict[str, Any], key: str, value: Any, name: str) -> None:
    if key in target:
        raise _clash(name)
    target[key] = value


def _clash(name: str) -> RequestError:
    return RequestError(
        f"the field {name} was sent more than once",
        param=name.partition("[")[0],
        code="duplicate_parameter",
        status=400,
    )


def _literal(text: str) -> Any:
    try:
        value = loads(text)
    except ValueError:
        return text
    return text if isinstance(value, (dict, list, str)) else value
