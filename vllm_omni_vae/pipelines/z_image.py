# SPDX-License-Identifier: Apache-2.0
"""Z-Image and Z-Image-Turbo: images from text, and images painted anew, in whole or where a mask says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..errors import RequestError
from .assemble import behind
from .image import SIDE, STRENGTH, STRENGTHS, ImageProfile, repainting
from .profile import Made, index_class, read_json, read_part
from .request import IMAGE_TASKS, GenerationRequest, ModelCard, Range, SamplingDefaults

_MOST_SIDE = 8192
# Turbo was distilled with this shift of its schedule; the model that it was made from has another.
_TURBO_SHIFT = 3.0


class ZImageProfile(ImageProfile):
    """Tells Turbo, which is distilled to few steps without guidance, from the full model by its schedule.

    ``guidance_scale`` above 0 guides away from the negative prompt, or from an empty one.
    """

    pipeline_classes = ("ZImagePipeline",)
    name = "Z-Image"
    heads_key = "n_heads"
    heads = 30
    most_aspect = 50
    divisible = False
    numbers: Mapping[str, Range] = {
        "max_sequence_length": Range(1, 512),
        STRENGTH: STRENGTHS,
        "cfg_truncation": Range(0, 1, whole=False),
    }
    switches = frozenset({"cfg_normalization"})
    extra_params = frozenset(numbers) | switches

    def card(self, folder: Path) -> ModelCard:
        index = read_json(folder / "model_index.json")
        vae, _ = (read_part(folder, index, name) for name in ("vae", "transformer"))
        shift = read_json(folder / "scheduler" / "scheduler_config.json").get("shift", 1.0)
        steps, guidance = (8, 0.0) if shift == _TURBO_SHIFT else (50, 5.0)
        return ModelCard(
            pipeline_class=index_class(index),
            tasks=IMAGE_TASKS,
            spatial_multiple=2 * 2 ** (len(vae.get("block_out_channels", (0,))) - 1),
            temporal_ratio=1,
            defaults=SamplingDefaults(
                width=SIDE, height=SIDE, num_inference_steps=steps, guidance_scale=guidance, num_images=1
            ),
            takes=frozenset({"negative_prompt", "guidance_scale", "mask"}),
        )

    def resolve(
        self, request: GenerationRequest, card: ModelCard, defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> GenerationRequest:
        request = super().resolve(request, card, defaults)
        for name in ("width", "height"):
            if getattr(request, name) > _MOST_SIDE:
                raise RequestError(
                    f"{name} {getattr(request, name)} cannot be made: the model knows {_MOST_SIDE} pixels at most",
                    param=name,
                    code="unsupported_size",
                )
        return request

    def repaints(self, request: GenerationRequest) -> bool:
        return bool(request.images)

    def call(self, pipeline: Any, request: GenerationRequest, **arguments: Any) -> Made:
        if request.images:
            kind = "ZImageImg2ImgPipeline" if request.mask is None else "ZImageInpaintPipeline"
            pipeline = behind(pipeline, kind)
            arguments |= repainting(request)
        output = pipeline(
            prompt=request.prompt,
            negative_prompt=request.negative_prompt,
            width=request.width,
            height=request.height,
            num_inference_steps=request.num_inference_steps,
            guidance_scale=request.guidance_scale,
            output_type="pt",
            **{**request.extra_params, **arguments},
        )
        return Made(output.images)
