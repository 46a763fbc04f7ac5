# SPDX-License-Identifier: Apache-2.0
"""What the profiles of image models share: refusals of flags, further parameters, and pictures in and out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..errors import RequestError
from .profile import PipelineProfile, hsdp_refusals, read_json
from .request import GenerationRequest, ModelCard, Range, SamplingDefaults

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..config import EngineConfig

SIDE = 1024
"""Pixels along each side of the square that the released models were trained to fill."""

STRENGTH = "strength"
STRENGTHS = Range(0.01, 1, whole=False)
_MULTIPLE_OF_AREAS = 32


class ImageProfile(PipelineProfile):
    """A family of image models; what is its own stands in the class attributes.

    Class attributes:
        name: What the family is called in messages.
        heads_key: Where the denoiser's configuration says how many attention heads it has.
        heads: How many it has where its configuration does not say.
        divisible: Whether diffusers can divide the denoiser's tokens, and its weights, among ranks.
        most_aspect: How many times as long one way as the other a reference image may be.
    """

    name: str
    heads_key: str = "num_attention_heads"
    heads: int
    divisible: bool = True
    most_aspect: int
    numbers: Mapping[str, Range] = MappingProxyType({"max_sequence_length": Range(1, 512)})
    extra_params = frozenset({"max_sequence_length"})

    def refusals(self, folder: Path, config: EngineConfig) -> list[str]:
        parallel = config.parallel
        shared = {
            "--tensor-parallel-size": parallel.tensor_parallel_size,
            "--ulysses-degree": parallel.ulysses_degree,
        }
        used = [flag for flag, ranks in shared.items() if ranks > 1]
        heads = read_json(folder / "transformer" / "config.json").get(self.heads_key, self.heads)
        found = []
        for flag in used:
            if not self.divisible:
                found.append(f"{flag}: diffusers has no plan to divide {self.name}'s denoiser; use --use-hsdp")
            elif heads % shared[flag]:
                found.append(f"{flag} {shared[flag]}: the denoiser's {heads} heads do not divide by it")
        if self.divisible and len(used) > 1:
            found.append(f"{' together with '.join(used)}: diffusers does not combine them; choose one of them")
        if parallel.ring_degree > 1:
            instead = "--ulysses-degree" if self.divisible else "--use-hsdp"
            found.append(f"--ring-degree: not available for {self.name}; use {instead}")
        if parallel.cfg_parallel_size > 1:
            found.append(
                f"--cfg-parallel-size: diffusers runs {self.name}'s guidance branches on each rank; leave it out"
            )
        found += hsdp_refusals(parallel, self.name, next(iter(used), ""))
        if config.boundary_ratio is not None:
            found.append("--boundary-ratio: this checkpoint has one denoiser, so there is no boundary")
        if config.flow_shift is not None:
            found.append(f"--flow-shift: {self.name} goes by the schedule of its checkpoint")
        return found

    def defaults(self, request: GenerationRequest, card: ModelCard) -> SamplingDefaults:
        check_aspects(request, self.most_aspect)
        return self.sized(request, card)

    def sized(self, request: GenerationRequest, card: ModelCard) -> SamplingDefaults:
        """The model's own values with the size that follows from the reference images, which can be read."""
        return in_its_aspect(request, card.defaults)

    def resolve(
        self, request: GenerationRequest, card: ModelCard, defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> GenerationRequest:
        request = super().resolve(request, card, defaults)
        check_mask(request)
        if STRENGTH in request.extra_params and not self.repaints(request):
            raise RequestError(
                f"extra_params {STRENGTH} says how much of a given picture is made anew, and nothing of one is kept "
                "here; leave it out",
                param="extra_params",
            )
        return request

    def repaints(self, request: GenerationRequest) -> bool:
        """Whether the pipeline that makes ``request`` begins with the reference image instead of noise alone."""
        return request.mask is not None


def pictures(request: GenerationRequest) -> list[Image]:
    """The reference images, as pipelines take them."""
    from PIL import Image

    return [Image.fromarray(pixels) for pixels in request.images]


def masking(request: GenerationRequest) -> dict[str, Any]:
    """The mask as pipelines take it, white where the picture changes. There it is made anew, unless the request says
    how much of it is kept."""
    from PIL import Image

    assert request.mask is not None
    return {"mask_image": Image.fromarray(request.mask), STRENGTH: request.extra_params.get(STRENGTH, 1.0)}


def repainting(request: GenerationRequest) -> dict[str, Any]:
    """The image and the mask, if there is one, for a pipeline that paints an image anew: cropped to the size asked for
    about the centre, as pipelines would stretch them."""
    from PIL import ImageOps

    assert request.width is not None and request.height is not None
    given = {"image": pictures(request)[0]} | (masking(request) if request.mask is not None else {})
    return {
        name: value if name == STRENGTH else ImageOps.fit(value, (request.width, request.height))
        for name, value in given.items()
    }


def in_its_aspect(request: GenerationRequest, defaults: SamplingDefaults) -> SamplingDefaults:
    """``defaults`` with the size of an image of as many pixels in the aspect of the first reference image."""
    if not request.images:
        return defaults
    width, height = size_of_area(size(request.images[0]), defaults.width * defaults.height)
    return dataclasses.replace(defaults, width=width, height=height)


def size_of_area(image_size: tuple[int, int], area: int) -> tuple[int, int]:
    """Width and height of about ``area`` pixels in the aspect of an image, each the nearest multiple of 32.

    In the same floating-point steps as ``calculate_dimensions`` of diffusers' pipelines.

    Args:
        image_size: Width and height of the image.
    """
    ratio = image_size[0] / image_size[1]
    width = math.sqrt(area * ratio)
    return (
        round(width / _MULTIPLE_OF_AREAS) * _MULTIPLE_OF_AREAS,
        round(width / ratio / _MULTIPLE_OF_AREAS) * _MULTIPLE_OF_AREAS,
    )


def size(pixels: Any) -> tuple[int, int]:
    """Width and height of ``(height, width, ...)`` pixels."""
    return int(pixels.shape[1]), int(pixels.shape[0])


def check_aspects(request: GenerationRequest, most: int) -> None:
    """Refuse reference images that are more than ``most`` times as long one way as the other.

    Raises:
        RequestError: 422, naming the image.
    """
    for place, pixels in enumerate(request.images, 1):
        width, height = size(pixels)
        if max(width, height) > most * min(width, height):
            raise RequestError(
                f"reference image {place} is {width}x{height}; this model reads images up to {most}:1, crop it",
                param="image",
                code="unsupported_image",
            )


def check_size(request: GenerationRequest, legal: tuple[int, int], why: str) -> None:
    """Refuse a width and height other than ``legal``, which follow from the reference image.

    Raises:
        RequestError: 422, with the one size that can be made.
    """
    if (request.width, request.height) != legal:
        raise RequestError(
            f"{request.width}x{request.height} cannot be made: {why}, here {legal[0]}x{legal[1]}; "
            "ask for that, or leave the size out",
            param="size",
            code="unsupported_size",
        )


def check_mask(request: GenerationRequest) -> None:
    """Refuse a mask that does not fit the first reference image.

    Raises:
        RequestError: 400 without an image; 422 for another size.
    """
    if request.mask is None:
        return
    if not request.images:
        raise RequestError("a mask was given, and no image that it belongs to; send both", param="mask", status=400)
    if request.mask.shape != request.images[0].shape[:2]:
        width, height = size(request.mask)
        wanted = "x".join(map(str, size(request.images[0])))
        raise RequestError(
            f"the mask is {width}x{height} and its image {wanted}; send them in one size",
            param="mask",
            code="unsupported_size",
        )
