# SPDX-License-Identifier: Apache-2.0
"""What requests for videos and for images have in common, and the check of a request field by field."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ..errors import RequestError
from ..pipelines.request import RANGES
from .strict_json import loads

MAX_PROMPT = 32_000
MAX_EXTRA = 65_536
_MAX_NAMED = 500
_SIZE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})")

Form = TypeVar("Form", bound=BaseModel)


def no_bool(value: Any) -> Any:
    """Refuse true and false where a number is needed."""
    if isinstance(value, bool):
        raise ValueError("true and false are no numbers")
    return value


def json_value(value: Any) -> Any:
    """Read text that looks like a JSON object or array; anything else is returned as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return loads(value)
        except ValueError as error:
            raise ValueError(f"malformed JSON ({error})") from None
    return value


def image_source(value: Any) -> Any:
    """The bytes or the URL of one picture, however it was sent."""
    value = json_value(value)
    if isinstance(value, list):
        if len(value) != 1:
            raise ValueError(f"one picture is taken, {len(value)} were given")
        value = value[0]
    if isinstance(value, Mapping):
        if set(value) != {"image_url"}:
            raise ValueError(f"an object with just image_url is needed, not {sorted(map(str, value))}")
        value = value["image_url"]
    if not isinstance(value, (bytes, str)):
        raise ValueError("a file, or an object with image_url, is needed")
    return value


def bounded(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse what is no object of JSON, or takes more than `MAX_EXTRA` characters of it: it is kept with its job."""
    try:
        length = len(json.dumps(value))
    except TypeError:
        raise ValueError("a file is no value of JSON") from None
    if length > MAX_EXTRA:
        raise ValueError(f"{length} characters of JSON are more than {MAX_EXTRA}")
    return value


def within(name: str) -> Any:
    """The range that every way in has for the request field ``name``."""
    return Field(ge=RANGES[name].low, le=RANGES[name].high)


Integer = Annotated[int, BeforeValidator(no_bool)]
Number = Annotated[float, BeforeValidator(no_bool), Field(allow_inf_nan=False)]
Guidance = Annotated[Number, within("guidance_scale")]
Prompt = Annotated[str, Field(min_length=1, max_length=MAX_PROMPT, pattern=r"\S")]
ImageSource = Annotated[bytes | str, BeforeValidator(image_source)]


class GenerationForm(BaseModel):
    """The fields that videos and images share."""

    model_config = ConfigDict(extra="forbid")

    prompt: Prompt
    model: str | None = None
    width: Annotated[Integer, within("width")] | None = None
    height: Annotated[Integer, within("height")] | None = None
    negative_prompt: Annotated[str, Field(max_length=MAX_PROMPT)] | None = None
    num_inference_steps: Annotated[Integer, within("num_inference_steps")] | None = None
    guidance_scale: Guidance | None = None
    true_cfg_scale: Guidance | None = None
    seed: Annotated[Integer, within("seed")] | None = None
    extra_params: Annotated[dict[str, Any], BeforeValidator(json_value), AfterValidator(bounded)] = Field(
        default_factory=dict
    )
    trace: bool = False
    user: str | None = None

    def frame(self, size: str | None) -> tuple[int | None, int | None]:
        """Return the width and height that are asked for.

        Args:
            size: What the field ``size`` says of them, if it says anything.

        Raises:
            RequestError: 400, ``size`` disagrees with ``width`` or ``height``.
        """
        match = _SIZE.fullmatch(size) if size is not None else None
        if match is None:
            return self.width, self.height
        width, height = int(match[1]), int(match[2])
        if self.width not in (None, width) or self.height not in (None, height):
            raise RequestError(
                f"size {size} disagrees with width {self.width} and height {self.height}; send one of the two",
                param="size",
                code="conflicting_parameters",
                status=400,
            )
        return width, height


def one_of(**values: Any) -> tuple[str, Any] | None:
    """Return the name and value of the one field that was given of several names for one thing, or None.

    Raises:
        RequestError: 400, more than one was given.
    """
    given = [(name, value) for name, value in values.items() if value is not None]
    if len(given) > 1:
        raise RequestError(
            f"{' and '.join(name for name, _ in given)} are names for one thing; send one of them",
            param=given[-1][0],
            code="conflicting_parameters",
            status=400,
        )
    return given[0] if given else None


def validate(form: type[Form], fields: Mapping[str, Any]) -> Form:
    """Check ``fields`` against ``form``.

    Raises:
        RequestError: 422, naming every unknown field, or else every field that is missing or out of range.
    """
    unknown = [name for name in fields if name not in form.model_fields]
    if unknown:
        raise RequestError(
            f"unknown: {_cut(', '.join(unknown))}; known: {', '.join(sorted(form.model_fields))}",
            param=unknown[0],
            code="unknown_parameter",
        )
    try:
        return form.model_validate(dict(fields))
    except ValidationError as error:
        problems = error.errors(include_url=False)
    order = {name: place for place, name in enumerate(fields)}
    problems.sort(key=lambda problem: order.get(str(problem["loc"][0]), -1))
    said = [_said(problem["loc"][0], problem["msg"], problem["type"], problem["input"]) for problem in problems]
    code = "missing_required_parameter" if problems[0]["type"] == "missing" else "invalid_value"
    raise RequestError("; ".join(dict.fromkeys(said)), param=str(problems[0]["loc"][0]), code=code)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_NAMED else text[:_MAX_NAMED] + "..."


def _said(name: str | int, message: str, kind: str, value: Any) -> str:
    message = message.removeprefix("Value error, ")
    if kind == "missing":
        return f"{name}: {message}"
    found = f"a file of {len(value)} bytes" if isinstance(value, bytes) else reprlib.repr(value)
    return f"{name}: {message}, not {found}"
