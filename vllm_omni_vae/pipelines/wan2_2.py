# SPDX-License-Identifier: Apache-2.0
"""Wan 2.1 and 2.2: text-to-video, image-to-video and TI2V-5B, which does both with one set of weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from math import lcm
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError
from .assemble import assembled
from .profile import Made, PipelineProfile, hsdp_refusals, index_class, read_json, read_part
from .request import VIDEO_TASKS, GenerationRequest, ModelCard, Range, SamplingDefaults, Task

if TYPE_CHECKING:
    from ..config import EngineConfig

_TEXT, _IMAGE = "WanPipeline", "WanImageToVideoPipeline"
_PIPELINE_MULTIPLE = 16
_TAKES = frozenset({"negative_prompt", "guidance_scale", "flow_shift"})
_OF_TWO_EXPERTS = frozenset({"guidance_scale_2", "boundary_ratio"})


class WanProfile(PipelineProfile):
    """Reads sizes, tasks and experts from the checkpoint, so that one profile serves every Wan release."""

    pipeline_classes = (_TEXT, _IMAGE)
    denoisers = ("transformer", "transformer_2")
    full_precision = ("vae",)
    numbers = MappingProxyType({"max_sequence_length": Range(1, 512)})
    extra_params = PipelineProfile.extra_params | numbers.keys()

    def card(self, folder: Path) -> ModelCard:
        index = read_json(folder / "model_index.json")
        vae = read_part(folder, index, "vae")
        both = bool(index.get("expand_timesteps"))
        image = index_class(index) == _IMAGE
        denoisers = _denoisers(folder, index)
        experts = len(denoisers)
        patch = denoisers[0].get("patch_size", (1, 2, 2))
        ratio = 2 ** sum(map(bool, vae.get("temperal_downsample", (False, True, True))))
        return ModelCard(
            pipeline_class=index_class(index),
            tasks=VIDEO_TASKS if both else frozenset({Task.IMAGE_TO_VIDEO if image else Task.TEXT_TO_VIDEO}),
            spatial_multiple=lcm(_PIPELINE_MULTIPLE, vae.get("scale_factor_spatial", 8) * patch[1]),
            temporal_ratio=ratio,
            defaults=_defaults(both, image, experts),
            takes=_TAKES | _OF_TWO_EXPERTS if experts > 1 else _TAKES,
            max_references=1 if both else 2,
        )

    def refusals(self, folder: Path, config: EngineConfig) -> list[str]:
        index = read_json(folder / "model_index.json")
        parallel = config.parallel
        found = []
        if parallel.tensor_parallel_size > 1:
            found.append("--tensor-parallel-size: diffusers has no tensor parallel plan for Wan; use --ulysses-degree")
        if parallel.cfg_parallel_size > 1:
            found.append("--cfg-parallel-size: diffusers runs Wan's guidance branches one after the other on each rank")
        if parallel.ring_degree > 1 and parallel.ulysses_degree > 1:
            found.append("--ring-degree together with --ulysses-degree: choose one of them for Wan")
        shared = parallel.ulysses_degree * parallel.ring_degree > 1
        found += hsdp_refusals(parallel, "Wan", "sequence parallelism" if shared else "")
        experts = len(_denoisers(folder, index))
        if config.boundary_ratio is not None and experts < 2:
            found.append("--boundary-ratio: this checkpoint has one expert, so there is no boundary")
        return found

    def call(self, pipeline: Any, request: GenerationRequest, **arguments: Any) -> Made:
        pipeline = _for_task(pipeline, request.task)
        if request.images:
            arguments |= _images(request)
        if request.guidance_scale_2 is not None:
            arguments["guidance_scale_2"] = request.guidance_scale_2
        if "max_sequence_length" in request.extra_params:
            arguments["max_sequence_length"] = request.extra_params["max_sequence_length"]
        with _schedule(pipeline, request):
            output = pipeline(
                prompt=request.prompt,
                negative_prompt=request.negative_prompt,
                height=request.height,
                width=request.width,
                num_frames=request.num_frames,
                num_inference_steps=request.num_inference_steps,
                guidance_scale=request.guidance_scale,
                output_type="pt",
                **arguments,
            )
        return Made(output.frames[0])


def _denoisers(folder: Path, index: dict[str, Any]) -> list[dict[str, Any]]:
    present = [name for name in WanProfile.denoisers if (index.get(name) or [None])[0]]
    if not present:
        raise ConfigurationError(
            f"{folder} names no transformer in its model_index.json; is this a complete checkpoint?"
        )
    return [read_json(folder / name / "config.json") for name in present]


def _defaults(both: bool, image: bool, experts: int) -> SamplingDefaults:
    if both:
        return SamplingDefaults(
            width=1280, height=704, num_frames=121, fps=24, num_inference_steps=50, guidance_scale=5.0
        )
    if experts > 1:
        return SamplingDefaults(
            width=832, height=480, num_frames=81, fps=16, num_inference_steps=40, guidance_scale=3.5 if image else 4.0
        )
    return SamplingDefaults(width=832, height=480, num_frames=81, fps=16, num_inference_steps=50, guidance_scale=5.0)


def _for_task(pipeline: Any, task: Task) -> Any:
    """The same components behind the class that does ``task``; only TI2V-5B checkpoints change class."""
    import diffusers

    wanted = getattr(diffusers, _IMAGE if task is Task.IMAGE_TO_VIDEO else _TEXT)
    if isinstance(pipeline, wanted):
        return pipeline
    shared = {name: part for name, part in pipeline.components.items() if part is not None}
    if task is Task.TEXT_TO_VIDEO:
        shared = {name: part for name, part in shared.items() if name not in ("image_encoder", "image_processor")}
    settings = {"boundary_ratio": pipeline.config.boundary_ratio, "expand_timesteps": True}
    return assembled(wanted, shared | settings, pipeline)


def _images(request: GenerationRequest) -> dict[str, Any]:
    from PIL import Image

    images = [Image.fromarray(pixels) for pixels in request.images]
    return {"image": images[0]} | ({"last_image": images[1]} if len(images) > 1 else {})


@contextlib.contextmanager
def _schedule(pipeline: Any, request: GenerationRequest) -> Iterator[None]:
    """Give the pipeline this request's boundary and shift, and take them away afterwards."""
    scheduler, boundary = pipeline.scheduler, pipeline.config.boundary_ratio
    try:
        if request.boundary_ratio is not None:
            pipeline.register_to_config(boundary_ratio=request.boundary_ratio)
        if request.flow_shift is not None:
            key = "flow_shift" if "flow_shift" in scheduler.config else "shift"
            pipeline.scheduler = type(scheduler).from_config(scheduler.config, **{key: request.flow_shift})
        yield
    finally:
        pipeline.scheduler = scheduler
        pipeline.register_to_config(boundary_ratio=boundary)
