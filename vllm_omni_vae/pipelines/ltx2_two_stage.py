# SPDX-License-Identifier: Apache-2.0
"""LTX-2 in two stages: a clip of half the size, its latents upsampled, and refined at full size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .assemble import assembled
from .ltx2 import Ltx2Profile, distilled_schedule, for_task, guidance, is_distilled
from .profile import Made, read_json
from .request import GenerationRequest, ModelCard

if TYPE_CHECKING:
    from ..config import EngineConfig

_UPSAMPLER = "latent_upsampler"
_FACTOR = 2
_CHANNELS = 128

# Parameters of a request that do not guide; stage 2 is not guided.
_OF_BOTH = ("motion_speed", "decode_timestep", "decode_noise_scale", "use_cross_timestep")


@dataclasses.dataclass(frozen=True, slots=True)
class _StepCount:
    """Tells of the steps of both stages as of one pipeline's, in whose place it stands."""

    num_timesteps: int
    tell: Callable[..., dict[str, Any]]

    def after(self, done: int) -> Callable[..., dict[str, Any]]:
        """A step callback for the stage that begins when ``done`` steps are over."""
        return lambda _, step, *rest: self.tell(self, done + step, *rest)


class Ltx2TwoStageProfile(Ltx2Profile):
    """Runs a checkpoint of LTX-2 that has a latent upsampler; asked for by name, since no index names two stages.

    Stage 1 makes latents of half the width and height, in as many steps as the request says. Stage 2 adds noise to the
    upsampled latents, frames and sound, and takes it away in the three steps that diffusers recommends. A reference
    image is encoded for either stage, in that stage's size, and all encodes come first.
    """

    pipeline_classes = ("LTX2TwoStagesPipeline", "LTX2ImageToVideoTwoStagesPipeline")

    def card(self, folder: Path) -> ModelCard:
        card = super().card(folder)
        usual = card.defaults
        return dataclasses.replace(
            card,
            spatial_multiple=_FACTOR * card.spatial_multiple,
            spatial_minimum=_FACTOR * card.spatial_minimum,
            defaults=dataclasses.replace(usual, width=_FACTOR * usual.width, height=_FACTOR * usual.height),
        )

    def refusals(self, folder: Path, config: EngineConfig) -> list[str]:
        found = super().refusals(folder, config)
        if not (folder / _UPSAMPLER / "config.json").is_file():
            found.append(
                f"--model-class-name: two stages need a latent upsampler, and the checkpoint has no "
                f"{_UPSAMPLER}/config.json; put one there, or leave the flag out"
            )
            return found
        upsampler = read_json(folder / _UPSAMPLER / "config.json")
        factor = upsampler.get("rational_spatial_scale", 2.0) if upsampler.get("use_rational_resampler", True) else 2.0
        in_space, in_time = upsampler.get("spatial_upsample", True), upsampler.get("temporal_upsample", False)
        if not in_space or in_time or factor != _FACTOR:
            found.append(
                f"--model-class-name: two stages need a latent upsampler that doubles width and height and nothing "
                f"else; this one has spatial_upsample {in_space} by {factor:g} and temporal_upsample {in_time}"
            )
        channels = upsampler.get("in_channels", _CHANNELS)
        wanted = read_json(folder / "vae" / "config.json").get("latent_channels", _CHANNELS)
        if channels != wanted:
            found.append(
                f"--model-class-name: the latent upsampler is made for {channels} channels, and the VAE's latents have "
                f"{wanted}; take the one that belongs to this checkpoint"
            )
        return found

    def complete(self, pipeline: Any, load: Callable[[Any, str], Any]) -> Any:
        from diffusers import LTX2LatentUpsamplePipeline
        from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel

        upsampler = load(LTX2LatentUpsamplerModel, _UPSAMPLER)
        pipeline.upsample_pipeline = LTX2LatentUpsamplePipeline(vae=pipeline.vae, latent_upsampler=upsampler)
        return pipeline

    def call(self, pipeline: Any, request: GenerationRequest, **arguments: Any) -> Made:
        from diffusers.pipelines.ltx2.utils import STAGE_2_DISTILLED_SIGMA_VALUES
        from PIL import Image

        width, height, steps = request.width, request.height, request.num_inference_steps
        assert width is not None and height is not None and steps is not None
        refining = list(STAGE_2_DISTILLED_SIGMA_VALUES)
        count = _StepCount(steps + len(refining), arguments.pop("callback_on_step_end"))
        stage_1 = for_task(pipeline, request.task)
        stage_2 = _with_sigmas_as_given(stage_1)
        config, extra = pipeline.transformer.config, request.extra_params
        distilled = is_distilled(pipeline.scheduler.config)
        begun: dict[str, Any] = {"sigmas": distilled_schedule()} if distilled else {}
        reference = None
        if request.images:
            reference = _encoded(pipeline, request)
            begun["image"] = Image.fromarray(request.images[0])
        shared = arguments | {
            "prompt": request.prompt,
            "negative_prompt": request.negative_prompt,
            "num_frames": request.num_frames,
            "frame_rate": float(request.fps or 0),
            "return_dict": False,
        }
        small, sound = stage_1(
            width=width // _FACTOR,
            height=height // _FACTOR,
            num_inference_steps=steps,
            guidance_scale=request.guidance_scale,
            output_type="latent",
            callback_on_step_end=count.after(0),
            **shared,
            **begun,
            **guidance(config, extra, distilled=distilled),
        )
        (large,) = pipeline.upsample_pipeline(latents=small, output_type="latent", return_dict=False)
        if reference is not None:
            large[:, :, : reference.shape[2]] = reference
        frames, samples = stage_2(
            width=width,
            height=height,
            latents=large,
            audio_latents=sound,
            num_inference_steps=len(refining),
            sigmas=refining,
            noise_scale=refining[0],
            guidance_scale=1.0,
            guidance_rescale=0.0,
            audio_guidance_rescale=0.0,
            output_type="pt",
            callback_on_step_end=count.after(steps),
            **shared,
            **guidance(config, {name: extra[name] for name in _OF_BOTH if name in extra}, distilled=True),
        )
        return Made(frames[0], samples[0], int(pipeline.vocoder.config.output_sampling_rate))


def _with_sigmas_as_given(pipeline: Any) -> Any:
    """The same components, with a schedule that takes its sigmas unchanged."""
    scheduler = type(pipeline.scheduler).from_config(
        pipeline.scheduler.config, use_dynamic_shifting=False, shift=1.0, shift_terminal=None
    )
    return assembled(type(pipeline), pipeline.components | {"scheduler": scheduler}, pipeline)


def _encoded(pipeline: Any, request: GenerationRequest) -> Any:
    """Latents ``(1, C, 1, H, W)`` of the reference image in the clip's size, encoded as the pipeline does it."""
    from diffusers.pipelines.ltx2.utils import apply_image_conditioning_crf, resolve_default_image_crf
    from PIL import Image

    crf = request.extra_params.get("image_crf", resolve_default_image_crf(pipeline.text_encoder))
    image = Image.fromarray(apply_image_conditioning_crf(request.images[0], crf))
    pixels = pipeline.video_processor.preprocess(image, height=request.height, width=request.width)
    vae = pipeline.vae
    return vae.encode(pixels.to(vae.device, vae.dtype).unsqueeze(2)).latent_dist.mode()
