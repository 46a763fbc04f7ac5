# SPDX-License-Identifier: Apache-2.0
"""What a client may ask of the image routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ..errors import RequestError
from ..pipelines.request import GenerationRequest, Medium
from .decode import Upload
from .fields import MAX_PROMPT, GenerationForm, ImageSource, Integer, Number, image_source, json_value, one_of, within
from .pictures import Encoding, PictureFormat

REPEATED = frozenset({"image", "url"})
"""Fields that a form may hold more than once."""

_SHORT_FOR_EXTRA = ("resolution", "strength")

Quality = Literal["low", "medium", "high", "xhigh", "max", "auto", "standard", "hd"]


def _image_sources(value: Any) -> Any:
    value = json_value(value)
    values = value if isinstance(value, list) else [value]
    if not values:
        raise ValueError("at least one picture is needed")
    return tuple(map(image_source, values))


ImageSources = Annotated[tuple[bytes | str, ...], BeforeValidator(_image_sources)]


class ImageForm(GenerationForm):
    """A request for images: OpenAI's fields and vLLM-Omni's. What is left out is the model's default.

    ``moderation``, ``quality``, ``style``, ``user`` and ``safety_identifier`` are accepted and not used.
    """

    n: Annotated[Integer, within("num_images")] | None = None
    size: (
        Annotated[
            str, Field(pattern=r"^(auto|[1-9]\d{0,4}x[1-9]\d{0,4})$", description="WIDTHxHEIGHT in pixels, or auto")
        ]
        | None
    ) = None
    response_format: Literal["b64_json", "url"] | None = None
    output_format: PictureFormat = "png"
    output_compression: Annotated[Integer, Field(ge=0, le=100)] | None = None
    background: Literal["auto", "opaque", "transparent"] = "auto"
    quality: Quality = "auto"
    stream: bool = False
    partial_images: Annotated[Integer, Field(ge=0, le=3)] | None = None
    layers: Annotated[Integer, within("layers")] | None = None
    resolution: Annotated[Integer, within("width")] | None = None
    strength: Annotated[Number, Field(ge=0, le=1)] | None = None
    moderation: Literal["auto", "low"] | None = None
    style: Literal["vivid", "natural"] | None = None
    safety_identifier: str | None = None

    def encoding(self, transparency: bool) -> Encoding:
        """Return how the images are written.

        Args:
            transparency: Whether the model makes it.

        Raises:
            RequestError: 400, an address instead of the bytes, or a background or compression that there is not.
        """
        if self.response_format == "url":
            raise RequestError(
                "this server keeps no images, so it has no address for one; leave response_format out, or say b64_json",
                param="response_format",
                code="unsupported_parameter",
                status=400,
            )
        if self.output_compression is not None and self.output_format == "png":
            raise _conflict("output_compression", "output_format png has none; use jpeg or webp")
        if self.background == "transparent":
            if not transparency:
                raise RequestError(
                    "this model makes no transparent background; say opaque or auto",
                    param="background",
                    code="unsupported_parameter",
                    status=400,
                )
            if self.output_format == "jpeg":
                raise _conflict("background", "transparent cannot be written as output_format jpeg; use png or webp")
        return Encoding(
            format=self.output_format,
            quality=100 if self.output_compression is None else self.output_compression,
            transparency=transparency and self.background != "opaque" and self.output_format != "jpeg",
        )

    def to_request(self) -> GenerationRequest:
        """Return the request without its images and mask.

        Raises:
            RequestError: 400, two fields disagree; 422, a parameter of clips.
        """
        if "reference_fit" in self.extra_params:
            raise RequestError(
                "extra_params.reference_fit is for clips; an image model gets every reference in its own size",
                param="extra_params",
                code="unknown_parameter",
            )
        width, height = self.frame(self.size)
        return GenerationRequest(
            prompt=self.prompt,
            medium=Medium.IMAGE,
            negative_prompt=self.negative_prompt,
            width=width,
            height=height,
            num_inference_steps=self.num_inference_steps,
            guidance_scale=self.guidance_scale,
            true_cfg_scale=self.true_cfg_scale,
            seed=self.seed,
            num_images=self.n,
            layers=self.layers,
            extra_params=self._extra_params(),
            trace=self.trace,
        )

    def _extra_params(self) -> Mapping[str, Any]:
        given = {name: getattr(self, name) for name in _SHORT_FOR_EXTRA if getattr(self, name) is not None}
        for name, value in given.items():
            if self.extra_params.get(name, value) != value:
                raise _conflict(name, "extra_params has another value; send one of the two")
        return {**self.extra_params, **given}


class EditForm(ImageForm):
    """A request for images made of others. ``images`` and ``url`` are other names for ``image``, and ``mask_image`` is
    one for ``mask``; an image is a file, a data URL, or an object with ``image_url``.

    ``input_fidelity`` is accepted and not used, and so is what a request without images accepts.
    """

    # Layered models word a prompt of one space themselves.
    prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT)]
    image: ImageSources | None = None
    images: ImageSources | None = None
    url: ImageSources | None = None
    mask: ImageSource | None = None
    mask_image: ImageSource | None = None
    input_fidelity: Literal["high", "low"] | None = None

    def references(self) -> list[Upload]:
        """Return the images, at least one.

        Raises:
            RequestError: 422 for none; 400 for more than one of the names.
        """
        given = one_of(image=self.image, images=self.images, url=self.url)
        if given is None:
            raise RequestError(
                "image: Field required; an edit needs one, and /v1/images/generations needs none",
                param="image",
                code="missing_required_parameter",
            )
        param, sources = given
        if len(sources) == 1:
            return [Upload(sources[0], param)]
        return [Upload(source, param, f"reference image {number}") for number, source in enumerate(sources, 1)]

    def mask_upload(self) -> Upload | None:
        """Return the mask, if there is one.

        Raises:
            RequestError: 400 for both of the names.
        """
        given = one_of(mask=self.mask, mask_image=self.mask_image)
        return Upload(given[1], given[0], "the mask") if given else None


def _conflict(param: str, message: str) -> RequestError:
    return RequestError(f"{param}: {message}", param=param, code="conflicting_parameters", status=400)
