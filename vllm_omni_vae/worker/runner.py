# SPDX-License-Identifier: Apache-2.0
"""Run one job on a rank that holds the pipeline."""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..distributed import Communicator, agree
from ..errors import Cancelled
from ..pipelines.profile import Made
from ..pipelines.request import Audio, Frames, GenerationRequest, GenerationResult, Stage
from .loader import LoadedModel
from .use import UseMeter
from .watch import StageClock, VaeWatch

logger = logging.getLogger(__name__)


class InvalidOutput(Exception):
    """The pipeline ended without an error, but what it made is no video or image."""


def run_job(
    model: LoadedModel,
    request: GenerationRequest,
    denoisers: Communicator | None,
    cancelled: Callable[[], bool],
    report: Callable[[Stage, int, int], None],
    is_output: bool,
    meter: UseMeter,
) -> GenerationResult | None:
    """Collective over the denoiser ranks. Make one clip, or the images of one request one after the other.

    Args:
        model: What is loaded.
        request: Resolved request, the same on every rank.
        denoisers: The denoiser ranks, or None when there is one.
        cancelled: Whether this rank was told to stop; asked after every step and between tiles.
        report: Told of progress.
        is_output: Whether this rank owns what is decoded.
        meter: Measures what the autoencoders cost this rank.

    Returns:
        The clip or images on the output rank, else None.

    Raises:
        Cancelled: on every denoiser rank in the same step.
        InvalidOutput: the wrong number of pictures, or values of pictures or sound that are not finite.
    """
    assert request.seed is not None
    clock = StageClock()
    begun = 0

    def check() -> None:
        if cancelled():
            raise Cancelled("the job was cancelled")

    def check_alone() -> None:
        if denoisers is None:
            check()

    def on_step(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        report(Stage.DENOISE, begun * pipeline.num_timesteps + step + 1, request.runs * pipeline.num_timesteps)
        if denoisers is None:
            check()
        else:
            agree(denoisers, Cancelled("the job was cancelled") if cancelled() else None)
        return tensors

    vaes, sound = list(model.vaes.values()), list(model.sound.values())
    watch = VaeWatch(vaes, sound, clock, report, check, check_alone, meter, denoisers, model.check_latents)
    results = []
    clock.enter(Stage.DENOISE)
    try:
        with torch.no_grad(), watch.watching():
            for begun in range(request.runs):
                seed = request.seed + begun
                torch.manual_seed(seed)
                generator = torch.Generator("cpu").manual_seed(seed)
                made = model.profile.call(model.pipeline, request, generator=generator, callback_on_step_end=on_step)
                if is_output:
                    results.append(_on_the_host(made, request.pictures, watch.finite))
    finally:
        clock.enter(None)
        model.pipeline.maybe_free_model_hooks()
    if not results:
        return None
    return GenerationResult(
        frames=np.concatenate([frames for frames, _ in results]) if len(results) > 1 else results[0][0],
        fps=request.fps,
        audio=results[0][1],
        seed=request.seed,
        stage_durations=clock.seconds,
        decisions=tuple(decision.to_json() for decision in watch.decisions),
        peak_memory_mb=(),
    )


def _on_the_host(made: Made, expected: int | None, decoded_finite: bool) -> tuple[Frames, Audio | None]:
    frames, samples = made.frames, made.samples
    if frames.shape[0] != expected:
        raise InvalidOutput(f"the model made {frames.shape[0]} pictures instead of {expected}")
    values = [frames] if samples is None else [frames, samples]
    if not decoded_finite or not all(bool(torch.isfinite(tensor).all()) for tensor in values):
        raise InvalidOutput("the model made values that are not finite; with float16 try bfloat16 or float32")
    pixels = (frames.float() * 255).round_().to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu().numpy()
    if samples is None:
        return pixels, None
    return pixels, Audio(np.ascontiguousarray(samples.float().cpu().numpy()), made.rate)


def reset_peak_memory(device: torch.device) -> None:
    """Begin a new measurement of `peak_memory_mb` where the device keeps one."""
    if device.type != "cpu":
        torch.accelerator.memory.reset_peak_memory_stats(device)


def peak_memory_mb(device: torch.device) -> float:
    """Peak memory in MiB: of the accelerator since the reset, or of the whole process on the CPU."""
    if device.type != "cpu":
        return float(torch.accelerator.memory.max_memory_allocated(device)) / 2**20
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
