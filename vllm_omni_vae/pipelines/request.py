# SPDX-License-Identifier: Apache-2.0
"""What a caller asks of a pipeline and what comes back; free of torch, so that a server process stays small."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

Frames = npt.NDArray[np.uint8]
Samples = npt.NDArray[np.float32]


class Medium(StrEnum):
    """What a pipeline makes."""

    VIDEO = "video"
    IMAGE = "image"


class Task(StrEnum):
    """What a pipeline makes out of what."""

    TEXT_TO_VIDEO = "text-to-video"
    IMAGE_TO_VIDEO = "image-to-video"
    TEXT_TO_IMAGE = "text-to-image"
    IMAGE_TO_IMAGE = "image-to-image"

    @property
    def medium(self) -> Medium:
        """What comes out."""
        return Medium.IMAGE if self in (Task.TEXT_TO_IMAGE, Task.IMAGE_TO_IMAGE) else Medium.VIDEO

    @property
    def needs_image(self) -> bool:
        """Whether a reference image goes in."""
        return self in (Task.IMAGE_TO_VIDEO, Task.IMAGE_TO_IMAGE)


VIDEO_TASKS = frozenset(task for task in Task if task.medium is Medium.VIDEO)
IMAGE_TASKS = frozenset(Task) - VIDEO_TASKS


class Stage(StrEnum):
    """The parts of a job that report progress, in their order."""

    ENCODE = "encode"
    DENOISE = "denoise"
    DECODE = "decode"
    EXPORT = "export"


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """Values that a request field may have, both ends included; ``whole``: integers only."""

    low: int | float
    high: int | float
    whole: bool = True


RANGES: Mapping[str, Range] = {
    "width": Range(1, 16_384),
    "height": Range(1, 16_384),
    "num_frames": Range(1, 1_000_000),
    "fps": Range(1, 120),
    "num_inference_steps": Range(1, 200),
    "guidance_scale": Range(0, 20, whole=False),
    "guidance_scale_2": Range(0, 20, whole=False),
    "true_cfg_scale": Range(0, 20, whole=False),
    "boundary_ratio": Range(0, 1, whole=False),
    "flow_shift": Range(0.01, 100, whole=False),
    "seed": Range(0, 2**63 - 1),
    "num_images": Range(1, 10),
    "layers": Range(1, 16),
}
"""The numbers of a `GenerationRequest`, for every way in: HTTP, offline and the operator's defaults."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One clip, or some images, to make. None means "the model's default"; `PipelineProfile.resolve` fills these in.

    Attributes:
        prompt: What to show.
        medium: What is asked for.
        negative_prompt: What not to show.
        images: Reference images, each ``(height, width, 3)`` uint8 RGB, or ``(height, width, 4)`` RGBA for a model that
            takes transparency; of a clip the first is the first frame.
        mask: Where the first image may change, ``(height, width)`` uint8 of its size: 255 there, 0 elsewhere.
        width, height: Pixels.
        num_frames: Frames of the clip.
        fps: Frames per second of the clip.
        num_inference_steps: Denoising steps.
        guidance_scale, guidance_scale_2: Classifier-free guidance, of the first and second expert.
        true_cfg_scale: Classifier-free guidance of a model whose ``guidance_scale`` is something else.
        boundary_ratio: Share of the schedule at which the second expert takes over.
        flow_shift: Shift of the flow-matching schedule.
        seed: Seed of every random draw; of several images the first has it, the next the number after it, and so on.
        num_images: Images to make, one after the other.
        layers: Transparent layers that each image is made of.
        extra_params: Further arguments that the pipeline's profile understands.
        trace: Write down what every rank does, for a trace viewer; where the engine has a folder for it.
    """

    prompt: str
    medium: Medium = Medium.VIDEO
    negative_prompt: str | None = None
    images: tuple[Frames, ...] = ()
    mask: Frames | None = None
    width: int | None = None
    height: int | None = None
    num_frames: int | None = None
    fps: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    true_cfg_scale: float | None = None
    boundary_ratio: float | None = None
    flow_shift: float | None = None
    seed: int | None = None
    num_images: int | None = None
    layers: int | None = None
    extra_params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    trace: bool = False

    @property
    def task(self) -> Task:
        """The task this request belongs to, by what it asks for and whether it brings an image."""
        if self.medium is Medium.IMAGE:
            return Task.IMAGE_TO_IMAGE if self.images else Task.TEXT_TO_IMAGE
        return Task.IMAGE_TO_VIDEO if self.images else Task.TEXT_TO_VIDEO

    @property
    def runs(self) -> int:
        """How often the pipeline runs for it: once for a clip, once for each image."""
        return self.num_images or 1

    @property
    def pictures(self) -> int | None:
        """Pictures that one run makes: frames of a clip, layers of an image, or the one image."""
        return self.num_frames if self.medium is Medium.VIDEO else self.layers or 1


@dataclasses.dataclass(frozen=True, slots=True)
class Audio:
    """The sound of a clip, as the model made it: it may be somewhat longer or shorter than the frames.

    Attributes:
        samples: ``(channels, n)`` float32, -1 to 1.
        rate: Samples per second of each channel.
    """

    samples: Samples
    rate: int


@dataclasses.dataclass(frozen=True, slots=True)
class VaeUse:
    """What the autoencoders cost one rank in one job, all calls of one operation and strategy together.

    Attributes:
        rank: The rank.
        operation: ``encode`` or ``decode``.
        strategy: What ran, such as ``tile`` or ``direct``.
        seconds: From the beginning of each call on this rank to its end, waiting for other ranks included.
        tiles: Tiles that this rank ran; 0 where no tiles run.
        sent_bytes: Bytes that it sent to other ranks: messages, what it broadcast, counted once, and what it brought to
            sums.
    """

    rank: int
    operation: str
    strategy: str
    seconds: float
    tiles: int
    sent_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """A finished clip, or finished images.

    Attributes:
        frames: ``(T, H, W, 3)`` uint8 RGB. Of images: one after the other, each with its layers, bottom first;
            ``(T, H, W, 4)`` RGBA from a model that makes transparency.
        fps: Frames per second; None of images.
        audio: Its sound; None from a model that makes none.
        seed: The seed that was used; the same request with it gives the same pixels.
        stage_durations: Seconds per stage on the output rank (`Stage` values as keys).
        decisions: The VAE strategies that ran, one JSON-ready mapping for each distinct decision.
        peak_memory_mb: Peak memory per rank in MiB: of the accelerator, or of the process where there is none.
        vae_use: What the autoencoders cost each rank that called them, in the order of the ranks.
        traces: Names of the ranks' traces within the folder for them; empty where none was asked for.
    """

    frames: Frames
    fps: int | None = None
    audio: Audio | None = None
    seed: int
    stage_durations: Mapping[str, float]
    decisions: tuple[Mapping[str, Any], ...]
    peak_memory_mb: tuple[float, ...]
    vae_use: tuple[VaeUse, ...] = ()
    traces: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """A model's own values for what a request leaves open."""

    width: int
    height: int
    num_frames: int | None = None
    fps: int | None = None
    num_inference_steps: int
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    num_images: int | None = None
    layers: int | None = None


OPTIONAL: Mapping[str, str] = {
    "negative_prompt": "models with classifier-free guidance",
    "guidance_scale": "models that are guided by it",
    "guidance_scale_2": "models with two experts",
    "true_cfg_scale": "image models with classifier-free guidance besides their guidance_scale",
    "boundary_ratio": "models with two experts",
    "flow_shift": "models whose schedule a number shifts",
    "mask": "image models that fill in a part",
    "layers": "models of layered images",
}
"""Fields of a `GenerationRequest` that not every model has a use for, and whose they are."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What can be known of a checkpoint from its JSON files alone.

    Attributes:
        pipeline_class: ``_class_name`` of ``model_index.json``.
        tasks: What it can be asked for.
        spatial_multiple: Width and height must be multiples of this many pixels.
        temporal_ratio: Frames of a clip must be ``1 + k * temporal_ratio``.
        defaults: Values for what a request leaves open.
        takes: Which of `OPTIONAL` have a meaning.
        max_references: Reference images that it looks at, at most.
        transparency: Whether pixels, in and out, have an alpha channel.
        spatial_minimum: Width and height must be at least this many pixels.
        blocks: Blocks of the denoiser, where a request may name some of them; else 0.
        fixed_steps: Denoising steps of a model that was made for one schedule; else 0.
    """

    pipeline_class: str
    tasks: frozenset[Task]
    spatial_multiple: int
    temporal_ratio: int
    defaults: SamplingDefaults
    takes: frozenset[str] = frozenset({"negative_prompt", "guidance_scale"})
    max_references: int = 1
    transparency: bool = False
    spatial_minimum: int = 1
    blocks: int = 0
    fixed_steps: int = 0

    @property
    def medium(self) -> Medium:
        """What it makes."""
        return next(iter(self.tasks)).medium


@dataclasses.dataclass(frozen=True, slots=True)
class ComponentReport:
    """One line of the start-up table: what happened to one autoencoder.

    Attributes:
        path: Where it was found, e.g. ``vae`` or ``upsample_pipeline.vae``.
        kind: Its diffusers class.
        parallel: Whether its work is shared among ranks.
        detail: The strategy and ranks, or why it is off.
        selftest: What the self-test at load found; empty where there was none.
    """

    path: str
    kind: str
    parallel: bool
    detail: str
    selftest: str = ""
