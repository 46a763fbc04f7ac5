# SPDX-License-Identifier: Apache-2.0
"""What a client may ask of the video routes."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ..errors import RequestError
from ..pipelines.request import GenerationRequest
from .decode import Upload
from .fields import GenerationForm, Guidance, ImageSource, Integer, Number, Prompt, no_bool, one_of, within
from .reference import ReferenceFit


def _seconds(value: Any) -> Any:
    no_bool(value)
    text = f"{value:g}" if isinstance(value, (int, float)) else value
    if not isinstance(text, str) or not re.fullmatch(r"\d{1,6}(\.\d{1,6})?", text) or float(text) <= 0:
        raise ValueError("a length such as '4' or '2.5' is needed")
    return text


class RemixForm(BaseModel):
    """A new prompt for the settings of an earlier video."""

    model_config = ConfigDict(extra="forbid")

    prompt: Prompt
    user: str | None = None


class VideoForm(GenerationForm):
    """A request for a video: OpenAI's fields and vLLM-Omni's. What is left out is the model's default.

    ``seconds`` becomes the number of frames, of those that the model can make, that is nearest to ``seconds`` x ``fps``
    (the longer one of two equally near). ``user`` is accepted and not used.
    """

    seconds: Annotated[str, BeforeValidator(_seconds)] | None = None
    size: Annotated[str, Field(pattern=r"^[1-9]\d{0,4}x[1-9]\d{0,4}$", description="WIDTHxHEIGHT in pixels")] | None = (
        None
    )
    input_reference: ImageSource | None = None
    image_reference: ImageSource | None = None
    video_reference: Any = None
    num_frames: Annotated[Integer, within("num_frames")] | None = None
    fps: Annotated[Integer, within("fps")] | None = None
    guidance_scale_2: Guidance | None = None
    boundary_ratio: Annotated[Number, within("boundary_ratio")] | None = None
    flow_shift: Annotated[Number, within("flow_shift")] | None = None

    def reference(self) -> Upload | None:
        """Return the reference image.

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
        given = one_of(input_reference=self.input_reference, image_reference=self.image_reference)
        return Upload(given[1], given[0]) if given else None

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
        width, height = self.frame(self.size)
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
            trace=self.trace,
        )


def nearest_frames(seconds: float, fps: int, temporal_ratio: int) -> int:
    """Return the ``1 + k * temporal_ratio`` nearest to ``seconds * fps``; of two equally near, the larger.

    >>> nearest_frames(5, 16, 4)
    81
    """
    steps = math.floor((seconds * fps - 1) / temporal_ratio + 0.5)
    return 1 + max(0, steps) * temporal_ratio
