# SPDX-License-Identifier: Apache-2.0
"""What a client may ask of the video routes, and the one place where it is checked field by field."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ..errors import RequestError
from ..pipelines.request import RANGES, GenerationRequest
from .reference import ReferenceFit

MAX_PROMPT = 32_000
_SIZE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})")

Form = TypeVar("Form", bound=BaseModel)


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("true and false are no numbers")
    return value


def _seconds(value: Any) -> Any:
    _no_bool(value)
    text = f"{value:g}" if isinstance(value, (int, float)) else value
    if not isinstance(text, str) or not re.fullmatch(r"\d{1,6}(\.\d{1,6})?", text) or float(text) <= 0:
        raise ValueError("a length such as '4' or '2.5' is needed")
    return text


def _json_value(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"malformed JSON ({error})") from None
    return value


def _image_source(value: Any) -> Any:
    value = _json_value(value)
    if isinstance(value, list):
        if len(value) != 1:
            raise ValueError(f"one reference image is taken, {len(value)} were given")
        value = value[0]
    if isinstance(value, Mapping):
        if set(value) != {"image_url"}:
            raise ValueError(f"an object with just image_url is needed, not {sorted(map(str, value))}")
        value = value["image_url"]
    if not isinstance(value, (bytes, str)):
        raise ValueError("a file, or an object with image_url, is needed")
    return value


def _within(name: str) -> Any:
    return Field(ge=RANGES[name].low, le=RANGES[name].high)


Integer = Annotated[int, BeforeValidator(_no_bool)]
Number = Annotated[float, BeforeValidator(_no_bool), Field(allow_inf_nan=False)]
Guidance = Annotated[Number, _within("guidance_scale")]
Prompt = Annotated[str, Field(min_length=1, max_length=MAX_PROMPT, pattern=r"\S")]
ImageSource = Annotated[bytes | str, BeforeValidator(_image_source)]


class RemixForm(BaseModel):
    """A new prompt for the settings of an earlier video."""

    model_config = ConfigDict(extra="forbid")

    prompt: Prompt
    user: str | None = None


class VideoForm(BaseModel):
    """A request for a video: OpenAI's fields and vLLM-Omni's. What is left out is the model's default.

    ``seconds`` becomes the number of frames, of those that the model can make, that is nearest to ``seconds`` x ``fps``
    (the longer one of two equally near). ``user`` is accepted and not used.
    """

    model_config = ConfigDict(extra="forbid")

    prompt: Prompt
    model: str | None = None
    seconds: Annotated[str, BeforeValidator(_seconds)] | None = None
    size: Annotated[str, Field(pattern=r"^[1-9]\d{0,4}x[1-9]\d{0,4}$", description="WIDTHxHEIGHT in pixels")] | None = (
        None
    )
    input_reference: ImageSource | None = None
    image_reference: ImageSource | None = None
    video_reference: Any = None
    width: Annotated[Integer, _within("width")] | None = None
    height: Annotated[Integer, _within("height")] | None = None
    num_frames: Annotated[Integer, _within("num_frames")] | None = None
    fps: Annotated[Integer, _within("fps")] | None = None
    negative_prompt: Annotated[str, Field(max_length=MAX_PROMPT)] | None = None
    num_inference_steps: Annotated[Integer, _within("num_inference_steps")] | None = None
    guidance_scale: Guidance | None = None
    guidance_scale_2: Guidance | None = None
    true_cfg_scale: Guidance | None = None
    boundary_ratio: Annotated[Number, _within("boundary_ratio")] | None = None
    flow_shift: Annotated[Number, _within("flow_shift")] | None = None
    seed: Annotated[Integer, _within("seed")] | None = None
    extra_params: Annotated[dict[str, Any], BeforeValidator(_json_value)] = Field(default_factory=dict)
    user: str | None = None

    def reference(self) -> bytes | str | None:
        """Return the reference image, as a file's bytes or a URL.

        Raises:
            RequestError: 400, two references, or one that is a video.
        """
        if self.video_reference is not None:
            raise RequestError(
                "this model takes no reference video; leave video_reference out",
                param="video_reference",
                code="unsupported_parameter",
                status=400,
            )
        if self.input_reference is not None and self.image_reference is not None:
            raise RequestError(
                "input_reference and image_reference are two names for one thing; send one of them",
                param="image_reference",
                code="conflicting_parameters",
                status=400,
            )
        return self.input_reference if self.input_reference is not None else self.image_reference

    def reference_fit(self) -> ReferenceFit:
        """How the reference image becomes the clip's size (``extra_params.reference_fit``, crop unless given).

        Raises:
            RequestError: 422, neither crop nor pad.
        """
        value = self.extra_params.get("reference_fit", ReferenceFit.CROP)
        try:
            return ReferenceFit(value)
        except ValueError:
            raise RequestError(
                f"extra_params.reference_fit is {value!r}; it is crop or pad", param="extra_params"
            ) from None

    def to_request(self) -> GenerationRequest:
        """Return the request without its reference image and without what ``seconds`` says.

        Raises:
            RequestError: 400, ``size`` disagrees with ``width`` or ``height``, or a field that no video model has.
        """
        if self.true_cfg_scale is not None:
            raise RequestError(
                "true_cfg_scale belongs to image models; this model has guidance_scale",
                param="true_cfg_scale",
                code="unsupported_parameter",
                status=400,
            )
        width, height = self._size()
        return GenerationRequest(
            prompt=self.prompt,
            negative_prompt=self.negative_prompt,
            width=width,
            height=height,
            num_frames=self.num_frames,
            fps=self.fps,
            num_inference_steps=self.num_inference_steps,
            guidance_scale=self.guidance_scale,
            guidance_scale_2=self.guidance_scale_2,
            boundary_ratio=self.boundary_ratio,
            flow_shift=self.flow_shift,
            seed=self.seed,
            extra_params=self.extra_params,
        )

    def _size(self) -> tuple[int | None, int | None]:
        match = _SIZE.fullmatch(self.size) if self.size is not None else None
        if match is None:
            return self.width, self.height
        width, height = int(match[1]), int(match[2])
        if self.width not in (None, width) or self.height not in (None, height):
            raise RequestError(
                f"size {self.size} disagrees with width {self.width} and height {self.height}; send one of the two",
                param="size",
                code="conflicting_parameters",
                status=400,
            )
        return width, height


def nearest_frames(seconds: float, fps: int, temporal_ratio: int) -> int:
    """Return the ``1 + k * temporal_ratio`` nearest to ``seconds * fps``; of two equally near, the larger.

    >>> nearest_frames(5, 16, 4)
    81
    """
    steps = math.floor((seconds * fps - 1) / temporal_ratio + 0.5)
    return 1 + max(0, steps) * temporal_ratio


def validate(form: type[Form], fields: Mapping[str, Any]) -> Form:
    """Check ``fields`` against ``form``.

    Raises:
        RequestError: 422, naming every unknown field, or else every field that is missing or out of range.
    """
    unknown = [name for name in fields if name not in form.model_fields]
    if unknown:
        raise RequestError(
            f"unknown: {', '.join(unknown)}; known: {', '.join(sorted(form.model_fields))}",
            param=unknown[0],
            code="unknown_parameter",
        )
    try:
        return form.model_validate(dict(fields))
    except ValidationError as error:
        problems = error.errors(include_url=False)
    said = [_said(problem["loc"][0], problem["msg"], problem["type"], problem["input"]) for problem in problems]
    code = "missing_required_parameter" if problems[0]["type"] == "missing" else "invalid_value"
    raise RequestError("; ".join(dict.fromkeys(said)), param=str(problems[0]["loc"][0]), code=code)


def _said(name: str | int, message: str, kind: str, value: Any) -> str:
    message = message.removeprefix("Value error, ")
    if kind == "missing":
        return f"{name}: {message}"
    found = f"a file of {len(value)} bytes" if isinstance(value, bytes) else reprlib.repr(value)
    return f"{name}: {message}, not {found}"
