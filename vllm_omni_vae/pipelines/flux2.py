# SPDX-License-Identifier: Apache-2.0
"""FLUX.2 dev and klein: images from text, and from reference images and text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from ..errors import RequestError
from .assemble import behind
from .image import (
    SIDE,
    STRENGTH,
    STRENGTHS,
    ImageProfile,
    check_size,
    masking,
    pictures,
    size,
)
from .profile import Made, index_class, read_json, read_part
from .request import IMAGE_TASKS, GenerationRequest, ModelCard, Range, SamplingDefaults

_LEAST_SIDE = 64


class Flux2Profile(ImageProfile):
    """Without a size, a request with reference images gets that of the first one, scaled down to 1024x1024 pixels."""

    pipeline_classes: tuple[str, ...] = ("Flux2Pipeline",)
    name = "FLUX.2"
    heads = 48
    most_aspect = 8
    max_references: ClassVar[int] = 6

    def card(self, folder: Path) -> ModelCard:
        index = read_json(folder / "model_index.json")
        vae, _ = (read_part(folder, index, name) for name in ("vae", "transformer"))
        steps, guidance = self.sampling(index)
        return ModelCard(
            pipeline_class=index_class(index),
            tasks=IMAGE_TASKS,
            spatial_multiple=2 * 2 ** (len(vae.get("block_out_channels", (0,) * 4)) - 1),
            temporal_ratio=1,
            defaults=SamplingDefaults(
                width=SIDE, height=SIDE, num_inference_steps=steps, guidance_scale=guidance, num_images=1
            ),
            takes=self.takes(index),
            max_references=self.max_references,
        )

    def sampling(self, index: Mapping[str, Any]) -> tuple[int, float | None]:
        """Denoising steps and guidance of the model whose ``model_index.json`` is ``index``."""
        return 50, 4.0

    def takes(self, index: Mapping[str, Any]) -> frozenset[str]:
        """Optional fields that mean something to the model whose ``model_index.json`` is ``index``."""
        return frozenset({"guidance_scale"})

    def sized(self, request: GenerationRequest, card: ModelCard) -> SamplingDefaults:
        if not request.images:
            return card.defaults
        for place, pixels in enumerate(request.images, 1):
            if min(size(pixels)) < _LEAST_SIDE:
                raise RequestError(
                    f"reference image {place} is {size(pixels)[0]}x{size(pixels)[1]}; this model reads images from "
                    f"{_LEAST_SIDE} pixels on, each way",
                    param="image",
                    code="unsupported_image",
                )
        width, height = _natural_size(request, card)
        return dataclasses.replace(card.defaults, width=width, height=height)

    def call(self, pipeline: Any, request: GenerationRequest, **arguments: Any) -> Made:
        pipeline, given = self.with_references(pipeline, request)
        output = pipeline(
            prompt=request.prompt,
            width=request.width,
            height=request.height,
            num_inference_steps=request.num_inference_steps,
            guidance_scale=1.0 if request.guidance_scale is None else request.guidance_scale,
            output_type="pt",
            **{**request.extra_params, **given, **arguments},
        )
        return Made(output.images)

    def with_references(self, pipeline: Any, request: GenerationRequest) -> tuple[Any, dict[str, Any]]:
        """The pipeline for the request's images, and what it takes of them."""
        given = pictures(request)
        return pipeline, {"image": given} if given else {}


class Flux2KleinProfile(Flux2Profile):
    """Also fills in the part of an image that a mask says. The distilled model is not guided."""

    pipeline_classes = ("Flux2KleinPipeline",)
    numbers: Mapping[str, Range] = {**Flux2Profile.numbers, STRENGTH: STRENGTHS}
    extra_params = frozenset(numbers)
    max_references = 4

    def sampling(self, index: Mapping[str, Any]) -> tuple[int, float | None]:
        return (4, None) if index.get("is_distilled") else (50, 4.0)

    def takes(self, index: Mapping[str, Any]) -> frozenset[str]:
        return frozenset({"mask"} if index.get("is_distilled") else {"mask", "guidance_scale"})

    def resolve(
        self, request: GenerationRequest, card: ModelCard, defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> GenerationRequest:
        request = super().resolve(request, card, defaults)
        if request.mask is not None:
            check_size(request, _natural_size(request, card), "with a mask the size follows from the first image")
            if len(request.images) > 2:
                raise RequestError(
                    f"{len(request.images)} images were given with a mask; then this model looks at the image to fill "
                    "in and one more",
                    param="image",
                    code="too_many_images",
                )
        return request

    def with_references(self, pipeline: Any, request: GenerationRequest) -> tuple[Any, dict[str, Any]]:
        if request.mask is None:
            return super().with_references(pipeline, request)
        image, *further = pictures(request)
        given = {"image": image, **masking(request)} | ({"image_reference": further[0]} if further else {})
        return behind(pipeline, "Flux2KleinInpaintPipeline", is_distilled=pipeline.config.is_distilled), given


def _natural_size(request: GenerationRequest, card: ModelCard) -> tuple[int, int]:
    """Width and height that the pipelines take from the first image, in their own floating-point steps."""
    width, height = size(request.images[0])
    if width * height > SIDE**2:
        scale = math.sqrt(SIDE**2 / (width * height))
        width, height = int(width * scale), int(height * scale)
    multiple = card.spatial_multiple
    return width // multiple * multiple, height // multiple * multiple
