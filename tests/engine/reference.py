# SPDX-License-Identifier: Apache-2.0
"""What diffusers makes of a request in one process: its own pipeline, its own sequential tiles."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from PIL import Image

from tests.engine.engines import tile
from vllm_omni_vae.pipelines.request import Frames, GenerationRequest


class Reference:
    """Unmodified pipelines of the tiny checkpoints."""

    def __init__(self, checkpoints: Mapping[str, Path]):
        self._checkpoints = checkpoints
        self._pipelines: dict[tuple[str, bool], Any] = {}

    def frames(
        self, family: str, request: GenerationRequest, *, tiled: bool = True, tiles: tuple[int, int] | None = None
    ) -> Frames:
        """The clip of a resolved request, ``(T, H, W, 3)`` uint8; ``tiles`` are another tile size and stride."""
        pipeline = self._pipeline(family, with_image=bool(request.images))
        size, stride = tiles or tile(family)
        pipeline.vae.enable_tiling(size, size, stride, stride)
        pipeline.vae.use_tiling = tiled
        assert request.seed is not None
        torch.manual_seed(request.seed)
        images = {"image": Image.fromarray(request.images[0])} if request.images else {}
        with torch.no_grad():
            video = pipeline(
                prompt=request.prompt,
                height=request.height,
                width=request.width,
                num_frames=request.num_frames,
                num_inference_steps=request.num_inference_steps,
                guidance_scale=request.guidance_scale,
                generator=torch.Generator("cpu").manual_seed(request.seed),
                output_type="pt",
                **images,
            ).frames[0]
        return (video * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()

    def _pipeline(self, family: str, *, with_image: bool) -> Any:
        key = family, with_image
        if key not in self._pipelines:
            kind = diffusers.WanImageToVideoPipeline if with_image else diffusers.WanPipeline
            pipeline = kind.from_pretrained(self._checkpoints[family])
            pipeline.set_progress_bar_config(disable=True)
            self._pipelines[key] = pipeline
        return self._pipelines[key]
