# SPDX-License-Identifier: Apache-2.0
"""LTX-2.0, 2.3 and 2.5: text-to-video and image-to-video with sound; one set of weights does both."""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..errors import RequestError
from .assemble import behind
from .checks import refused
from .profile import Made, PipelineProfile, hsdp_refusals, index_class, read_json, require_named
from .request import VIDEO_TASKS, GenerationRequest, ModelCard, Range, SamplingDefaults, Task

if TYPE_CHECKING:
    from ..config import EngineConfig

_TEXT, _IMAGE = "LTX2Pipeline", "LTX2ImageToVideoPipeline"
_PIPELINE_MULTIPLE = 32
_TEXT_ENCODERS = {
    "Gemma3ForConditionalGeneration": "LTX-2.0 and LTX-2.3",
    "Gemma4UnifiedForConditionalGeneration": "LTX-2.5",
}
_GUIDED = ("stg_scale", "modality_scale", "guidance_rescale")
_BLOCKS = "spatio_temporal_guidance_blocks"
_CROSS = "use_cross_timestep"

_SCALE, _SHARE = Range(0, 20, whole=False), Range(0, 1, whole=False)
_NUMBERS: Mapping[str, Range] = {
    "stg_scale": _SCALE,
    "modality_scale": _SCALE,
    "guidance_rescale": _SHARE,
    "audio_guidance_scale": _SCALE,
    "audio_stg_scale": _SCALE,
    "audio_modality_scale": _SCALE,
    "audio_guidance_rescale": _SHARE,
    "motion_speed": Range(0.05, 20, whole=False),
    "decode_timestep": _SHARE,
    "decode_noise_scale": _SHARE,
    "image_crf": Range(0, 51),
}
"""Numbers that go to the pipeline under the same name."""

# Which of its 48 blocks a released denoiser is perturbed at for spatio-temporal guidance, as diffusers recommends it.
_RELEASED_BLOCKS, _BLOCK_OF_2_0, _BLOCK_OF_2_3 = 48, 29, 28

# A distilled denoiser was trained for the noise levels of these steps alone, and without guidance.
_DISTILLED_STEPS = 8
_UNGUIDED = {
    "audio_guidance_scale": 1.0,
    "stg_scale": 0.0,
    "audio_stg_scale": 0.0,
    "modality_scale": 1.0,
    "audio_modality_scale": 1.0,
}


class Ltx2Profile(PipelineProfile):
    """Tells the releases apart by what the checkpoint's denoiser is made of, and a distilled one by its schedule.

    LTX-2.5 also brings what predicts the length of a clip and what rewrites prompts; both stay unused, as a request
    says how long its clip is and what it shows. So does its second decoder, which is no part of diffusers' pipeline:
    frames are decoded by ``vae``.
    """

    pipeline_classes = checkpoint_classes = (_TEXT, _IMAGE)
    sound = ("audio_vae", "vocoder")
    unused = ("duration_head", "prompt_enhancer", "processor", "diffusion_decoder")
    numbers = _NUMBERS
    switches = frozenset({_CROSS})
    extra_params = PipelineProfile.extra_params | numbers.keys() | switches | {_BLOCKS}
    least_steps = 2

    def card(self, folder: Path) -> ModelCard:
        index = read_json(folder / "model_index.json")
        require_named(folder, index, "vae", "audio_vae", "vocoder", "transformer")
        vae = read_json(folder / "vae" / "config.json")
        denoiser = read_json(folder / "transformer" / "config.json")
        space, time = _ratios(vae)
        reflects = "reflect" in (
            vae.get("encoder_spatial_padding_mode", "zeros"),
            vae.get("decoder_spatial_padding_mode", "reflect"),
        )
        distilled = is_distilled(read_json(folder / "scheduler" / "scheduler_config.json"))
        steps, guidance = (30, 3.0) if _is_2_3(denoiser) else (40, 4.0)
        if distilled:
            steps, guidance = _DISTILLED_STEPS, 1.0
        return ModelCard(
            pipeline_class=index_class(index),
            tasks=VIDEO_TASKS,
            spatial_multiple=lcm(_PIPELINE_MULTIPLE, space * denoiser.get("patch_size", 1)),
            temporal_ratio=time,
            defaults=SamplingDefaults(
                width=768, height=512, num_frames=121, fps=24, num_inference_steps=steps, guidance_scale=guidance
            ),
            spatial_minimum=2 * space if reflects else space,
            blocks=denoiser.get("num_layers", _RELEASED_BLOCKS),
            fixed_steps=_DISTILLED_STEPS if distilled else 0,
        )

    def refusals(self, folder: Path, config: EngineConfig) -> list[str]:
        index = read_json(folder / "model_index.json")
        parallel = config.parallel
        found = []
        text_encoder = (index.get("text_encoder") or [None])[-1]
        if text_encoder not in _TEXT_ENCODERS:
            served = "; ".join(f"{release} with the text encoder {name}" for name, release in _TEXT_ENCODERS.items())
            found.append(f"this checkpoint: served are {served}; not one with {text_encoder}")
        if parallel.tensor_parallel_size > 1:
            found.append("--tensor-parallel-size: diffusers has no tensor parallel plan for LTX-2")
        if parallel.cfg_parallel_size > 1:
            found.append("--cfg-parallel-size: diffusers runs LTX-2's guidance branches in one batch on each rank")
        if parallel.ring_degree > 1:
            found.append("--ring-degree: not available for LTX-2; use --ulysses-degree")
        denoiser = read_json(folder / "transformer" / "config.json")
        heads = {denoiser.get("num_attention_heads", 32), denoiser.get("audio_num_attention_heads", 32)}
        if any(count % parallel.ulysses_degree for count in heads):
            found.append(
                f"--ulysses-degree {parallel.ulysses_degree}: the denoiser's {sorted(heads)} heads do not divide by it"
            )
        found += hsdp_refusals(parallel, "LTX-2", "--ulysses-degree" if parallel.ulysses_degree > 1 else "")
        if config.boundary_ratio is not None:
            found.append("--boundary-ratio: this checkpoint has one denoiser, so there is no boundary")
        if config.flow_shift is not None:
            found.append("--flow-shift: LTX-2's schedule follows from the checkpoint and the size of the clip")
        return found

    def resolve(
        self, request: GenerationRequest, card: ModelCard, defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> GenerationRequest:
        request = super().resolve(request, card, defaults)
        _check_blocks(request.extra_params.get(_BLOCKS, [0]), card.blocks)
        if "image_crf" in request.extra_params and not request.images:
            raise RequestError(
                "extra_params image_crf is about the reference image, and there is none; leave it out",
                param="extra_params",
            )
        return request

    def share_sequence(self, denoiser: Any, config: Any) -> None:
        """Divide the video's tokens; every rank has all of the sound's.

        Diffusers' own plan cuts the heads of the positions and leaves out those between video and sound, and the
        timesteps of an image's tokens. Ranks exchange where video is attended to; elsewhere they have what they need.
        """
        from diffusers.models._modeling_parallel import ContextParallelInput as Cut
        from diffusers.models._modeling_parallel import ContextParallelOutput as Join

        positions = {place: Cut(split_dim=2, expected_dims=4, split_output=True) for place in (0, 1)}
        plan = {
            "": {
                "hidden_states": Cut(split_dim=1, expected_dims=3),
                "timestep": Cut(split_dim=1, expected_dims=2),
            },
            "rope": positions,
            "cross_attn_rope": positions,
            "proj_out": Join(gather_dim=1, expected_dims=3),
        }
        denoiser.enable_parallelism(config=config, cp_plan=plan)
        for name, module in denoiser.named_modules():
            processor: Any = getattr(module, "processor", None)
            if hasattr(processor, "_parallel_config") and not name.endswith((".attn1", ".video_to_audio_attn")):
                processor._parallel_config = None

    def call(self, pipeline: Any, request: GenerationRequest, **arguments: Any) -> Made:
        from PIL import Image

        pipeline = for_task(pipeline, request.task)
        if request.images:
            arguments["image"] = Image.fromarray(request.images[0])
        distilled = is_distilled(pipeline.scheduler.config)
        if distilled:
            arguments["sigmas"] = distilled_schedule()
        output = pipeline(
            prompt=request.prompt,
            negative_prompt=request.negative_prompt,
            height=request.height,
            width=request.width,
            num_frames=request.num_frames,
            frame_rate=float(request.fps or 0),
            num_inference_steps=request.num_inference_steps,
            guidance_scale=request.guidance_scale,
            output_type="pt",
            **guidance(pipeline.transformer.config, request.extra_params, distilled=distilled),
            **arguments,
        )
        return Made(output.frames[0], output.audio[0], int(pipeline.vocoder.config.output_sampling_rate))


def distilled_schedule() -> list[float]:
    """The noise levels that distilled denoisers were trained for, one for each step."""
    from diffusers.pipelines.ltx2.utils import DISTILLED_SIGMA_VALUES

    return list(DISTILLED_SIGMA_VALUES)


def guidance(denoiser: Mapping[str, Any], extra: Mapping[str, Any], *, distilled: bool = False) -> dict[str, Any]:
    """Arguments of the pipeline that follow from the denoiser's configuration, under those that ``extra`` gives.

    Spatio-temporal guidance compares with a denoiser that is perturbed at a block: the one at the released models'
    depth. It is off for a denoiser that cannot be perturbed, where it would cost a run and change nothing. All guidance
    is off for a ``distilled`` one. A scale that ``extra`` gives for the frames is also that of the sound, unless that
    has its own.
    """
    layers = denoiser.get("num_layers", _RELEASED_BLOCKS)
    released = _BLOCK_OF_2_3 if _is_2_3(denoiser) else _BLOCK_OF_2_0
    made: dict[str, Any] = {_BLOCKS: [released * layers // _RELEASED_BLOCKS], _CROSS: _is_2_3(denoiser)}
    if not denoiser.get("perturbed_attn", False):
        made |= {"stg_scale": 0.0, "audio_stg_scale": 0.0}
    if distilled:
        made |= _UNGUIDED
    made |= {f"audio_{name}": extra[name] for name in _GUIDED if name in extra}
    return made | {name: value for name, value in extra.items() if name not in PipelineProfile.extra_params}


def _is_2_3(denoiser: Mapping[str, Any]) -> bool:
    """Whether the text is modulated by the timestep, as it is from LTX-2.3 on."""
    return bool(denoiser.get("cross_attn_mod", False))


def is_distilled(scheduler: Mapping[str, Any]) -> bool:
    """Whether the schedule is used as it is given. Diffusers shifts that of a full denoiser by the size of the clip."""
    return not scheduler.get("use_dynamic_shifting", False) and not scheduler.get("shift_terminal")


def _ratios(vae: Mapping[str, Any]) -> tuple[int, int]:
    """Pixels and frames that make a latent, as diffusers counts them."""
    blocks = vae.get("spatio_temporal_scaling", (True,) * 4)
    space = vae.get("spatial_compression_ratio") or vae.get("patch_size", 4) * 2 ** sum(blocks)
    time = vae.get("temporal_compression_ratio") or vae.get("patch_size_t", 1) * 2 ** sum(blocks)
    return int(space), int(time)


def _check_blocks(chosen: Any, blocks: int) -> None:
    whole = isinstance(chosen, list) and all(isinstance(b, int) and not isinstance(b, bool) for b in chosen)
    if not whole or not chosen or not all(0 <= block < blocks for block in chosen):
        raise refused(_BLOCKS, chosen, f"a list of blocks of the denoiser, 0 to {blocks - 1}")


def for_task(pipeline: Any, task: Task) -> Any:
    """The same components behind the class that does ``task``."""
    return behind(pipeline, _IMAGE if task is Task.IMAGE_TO_VIDEO else _TEXT)
