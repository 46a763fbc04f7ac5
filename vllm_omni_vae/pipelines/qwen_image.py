# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image: images from text; Edit and Edit-Plus: from images and text; Layered: an image taken apart into layers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from .assemble import behind
from .checks import refused
from .image import (
    SIDE,
    STRENGTH,
    STRENGTHS,
    ImageProfile,
    check_size,
    masking,
    pictures,
    repainting,
    size,
    size_of_area,
)
from .profile import Made, index_class, read_json, read_part
from .request import IMAGE_TASKS, GenerationRequest, ModelCard, Range, SamplingDefaults, Task

_MAX_TOKENS = Range(1, 1024)
_TAKES = frozenset({"negative_prompt", "true_cfg_scale"})
_NO_WORDS = " "


class QwenImageProfile(ImageProfile):
    """Images from text; with an image, that image painted anew, in whole or where a mask says.

    ``true_cfg_scale`` above 1 guides away from the negative prompt. Diffusers does so only where there is one, so a
    request without it gets a single space, as the models' authors recommend: the scale always means something.
    """

    pipeline_classes: tuple[str, ...] = ("QwenImagePipeline",)
    name = "Qwen-Image"
    heads = 24
    most_aspect = 100
    least_steps = 2
    numbers: Mapping[str, Range] = {"max_sequence_length": _MAX_TOKENS, STRENGTH: STRENGTHS}
    extra_params = frozenset(numbers)
    takes: ClassVar[frozenset[str]] = frozenset({"mask"})
    tasks: ClassVar[frozenset[Task]] = IMAGE_TASKS
    max_references: ClassVar[int] = 1
    own_defaults: ClassVar[Mapping[str, Any]] = {"width": SIDE, "height": SIDE, "num_inference_steps": 50}

    def card(self, folder: Path) -> ModelCard:
        index = read_json(folder / "model_index.json")
        vae, denoiser = read_part(folder, index, "vae"), read_part(folder, index, "transformer")
        guided = bool(denoiser.get("guidance_embeds", False))
        return ModelCard(
            pipeline_class=index_class(index),
            tasks=self.tasks,
            spatial_multiple=2 * 2 ** len(vae.get("temperal_downsample", (False, True, True))),
            temporal_ratio=1,
            defaults=SamplingDefaults(
                guidance_scale=1.0 if guided else None, true_cfg_scale=4.0, num_images=1, **self.own_defaults
            ),
            takes=_TAKES | self.takes | ({"guidance_scale"} if guided else set()),
            max_references=self.max_references,
            transparency=vae.get("input_channels", 3) == 4,
        )

    def repaints(self, request: GenerationRequest) -> bool:
        return bool(request.images)

    def call(self, pipeline: Any, request: GenerationRequest, **arguments: Any) -> Made:
        arguments |= {"width": request.width, "height": request.height}
        if request.images:
            kind = "QwenImageImg2ImgPipeline" if request.mask is None else "QwenImageInpaintPipeline"
            pipeline = behind(pipeline, kind)
            arguments |= repainting(request)
        return _made(pipeline, request, **arguments)


class QwenImageEditProfile(QwenImageProfile):
    """One image changed as the prompt says, in whole or where a mask says.

    The reference is encoded at about 1024x1024 pixels in its own aspect, whatever the size of the result; that is also
    the default size of the result, and the only one with a mask.
    """

    pipeline_classes = ("QwenImageEditPipeline",)
    tasks = frozenset({Task.IMAGE_TO_IMAGE})
    of_the_last: ClassVar[bool] = False

    def sized(self, request: GenerationRequest, card: ModelCard) -> SamplingDefaults:
        width, height = self.natural_size(request)
        return dataclasses.replace(card.defaults, width=width, height=height)

    def natural_size(self, request: GenerationRequest) -> tuple[int, int]:
        """Width and height that the pipeline takes from the reference image."""
        image = request.images[-1 if self.of_the_last else 0]
        return size_of_area(size(image), SIDE**2)

    def resolve(
        self, request: GenerationRequest, card: ModelCard, defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> GenerationRequest:
        request = super().resolve(request, card, defaults)
        if request.mask is not None:
            check_size(request, self.natural_size(request), "with a mask the size follows from the image")
        return request

    def repaints(self, request: GenerationRequest) -> bool:
        return request.mask is not None

    def call(self, pipeline: Any, request: GenerationRequest, **arguments: Any) -> Made:
        given = pictures(request)
        if request.mask is None:
            sizes = {"width": request.width, "height": request.height}
            return _made(pipeline, request, image=given if self.max_references > 1 else given[0], **sizes, **arguments)
        masked = behind(pipeline, "QwenImageEditInpaintPipeline")
        return _made(masked, request, image=given[0], **masking(request), **arguments)


class QwenImageEditPlusProfile(QwenImageEditProfile):
    """Up to three images put together as the prompt says; the last one's aspect is that of the result."""

    pipeline_classes = ("QwenImageEditPlusPipeline",)
    numbers: Mapping[str, Range] = {"max_sequence_length": _MAX_TOKENS}
    extra_params = frozenset(numbers)
    takes = frozenset()
    max_references = 3
    own_defaults: ClassVar[Mapping[str, Any]] = {**QwenImageProfile.own_defaults, "num_inference_steps": 40}
    of_the_last = True


class QwenImageLayeredProfile(QwenImageEditProfile):
    """An image taken apart into transparent layers, bottom first; the model itself words a prompt of one space.

    The size follows from the image: about ``resolution`` squared pixels in its aspect.
    """

    pipeline_classes = ("QwenImageLayeredPipeline",)
    numbers: Mapping[str, Range] = {"max_sequence_length": _MAX_TOKENS}
    switches = frozenset({"cfg_normalize", "use_en_prompt"})
    extra_params = frozenset(numbers) | switches | {"resolution"}
    takes = frozenset({"layers"})
    own_defaults: ClassVar[Mapping[str, Any]] = {"width": 640, "height": 640, "num_inference_steps": 50, "layers": 4}
    resolutions: ClassVar[tuple[int, ...]] = (640, 1024)

    def natural_size(self, request: GenerationRequest) -> tuple[int, int]:
        resolution = request.extra_params.get("resolution", self.resolutions[0])
        if resolution not in self.resolutions or isinstance(resolution, bool):
            raise refused("resolution", resolution, " or ".join(map(str, self.resolutions)))
        return size_of_area(size(request.images[0]), resolution**2)

    def resolve(
        self, request: GenerationRequest, card: ModelCard, defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> GenerationRequest:
        request = super().resolve(request, card, defaults)
        why = "the size follows from the image and from extra_params resolution"
        check_size(request, self.natural_size(request), why)
        return request

    def call(self, pipeline: Any, request: GenerationRequest, **arguments: Any) -> Made:
        with _one_at_a_time(pipeline.vae):
            return _made(pipeline, request, image=pictures(request)[0], layers=request.layers, **arguments)


def _made(pipeline: Any, request: GenerationRequest, **arguments: Any) -> Made:
    negative = request.negative_prompt
    if negative is None and request.true_cfg_scale is not None and request.true_cfg_scale > 1:
        negative = _NO_WORDS
    if request.guidance_scale is not None:
        arguments["guidance_scale"] = request.guidance_scale
    output = pipeline(
        prompt=request.prompt,
        negative_prompt=negative,
        true_cfg_scale=request.true_cfg_scale,
        num_inference_steps=request.num_inference_steps,
        output_type="pt",
        **{**request.extra_params, **arguments},
    )
    images = output.images
    return Made(images[0] if isinstance(images, list) else images)


@contextlib.contextmanager
def _one_at_a_time(vae: Any) -> Iterator[None]:
    """Decode a batch sample by sample, so that layers take no more memory than one of them."""
    before = vae.use_slicing
    vae.use_slicing = True
    try:
        yield
    finally:
        vae.use_slicing = before
