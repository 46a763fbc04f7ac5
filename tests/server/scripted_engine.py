# SPDX-License-Identifier: Apache-2.0
"""An engine without a model, for what only the HTTP layer decides. Tests with real models are in tests/e2e."""

import dataclasses
import queue
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from vllm_omni_vae.config import DiffusionParallelConfig, EngineConfig
from vllm_omni_vae.engine.api import Health, JobHandle, Listener, Progress, Started
from vllm_omni_vae.errors import Cancelled
from vllm_omni_vae.pipelines.profile import PipelineProfile
from vllm_omni_vae.pipelines.request import (
    IMAGE_TASKS,
    VIDEO_TASKS,
    ComponentReport,
    GenerationRequest,
    GenerationResult,
    Medium,
    ModelCard,
    SamplingDefaults,
    Stage,
    VaeUse,
)

CARD = ModelCard(
    pipeline_class="ScriptedPipeline",
    tasks=VIDEO_TASKS,
    spatial_multiple=16,
    temporal_ratio=4,
    defaults=SamplingDefaults(width=64, height=48, num_frames=5, fps=16, num_inference_steps=4, guidance_scale=5.0),
    takes=frozenset({"negative_prompt", "guidance_scale", "guidance_scale_2", "boundary_ratio", "flow_shift"}),
)
IMAGES = ModelCard(
    pipeline_class="ScriptedImagePipeline",
    tasks=IMAGE_TASKS,
    spatial_multiple=16,
    temporal_ratio=1,
    defaults=SamplingDefaults(width=64, height=48, num_inference_steps=4, true_cfg_scale=4.0),
    takes=frozenset({"negative_prompt", "true_cfg_scale", "mask"}),
    max_references=3,
)
LAYERS = dataclasses.replace(
    IMAGES,
    defaults=dataclasses.replace(IMAGES.defaults, layers=2),
    takes=frozenset({"negative_prompt", "true_cfg_scale", "layers"}),
    max_references=1,
    transparency=True,
)
DECISION = {"component": "vae", "operation": "decode", "strategy": "tile"}
USE = (VaeUse(0, "decode", "tile", 0.25, 4, 0), VaeUse(1, "decode", "tile", 0.125, 2, 4096))


class ScriptedProfile(PipelineProfile):
    """Only `PipelineProfile.resolve` is of use here."""

    pipeline_classes = ("ScriptedPipeline",)
    extra_params = PipelineProfile.extra_params | {"shift", "on", "resolution"}

    def card(self, folder: Path) -> ModelCard:
        raise NotImplementedError

    def refusals(self, folder: Path, config: EngineConfig) -> list[str]:
        return []

    def call(self, pipeline: Any, request: GenerationRequest, **arguments: Any) -> Any:
        raise NotImplementedError


@dataclasses.dataclass
class _Item:
    request: GenerationRequest
    listener: Listener
    future: "Future[GenerationResult]"
    cancelled: threading.Event


class ScriptedEngine:
    """Takes one job after the other, as the real engine does, and makes noise of the request's seed.

    It has no model and no ranks: only the HTTP layer is tested with it, and tests/e2e has the tests of the whole.

    Args:
        config: What it says that it was started with.
        card: What it claims to make: clips, or `IMAGES`, or transparent `LAYERS`.

    Attributes:
        may_start: `start` waits for it.
        may_finish: A job waits for it half-way through denoising, unless it is cancelled.
        running: Set while a job waits there.
        fault: Raised by the next job instead of a result.
        output: Replaces the frames of the next job.
        decisions: What every job says of its VAE.
        restarts: How often it claims that its ranks were started again, by code.
        requests: What was submitted.
        cancels: Identifiers of jobs that were cancelled.
    """

    def __init__(self, config: EngineConfig | None = None, *, card: ModelCard = CARD) -> None:
        self.config = config or EngineConfig(
            model="scripted", parallel=DiffusionParallelConfig(vae_patch_parallel_size=2)
        )
        self.card = card
        self.report = (ComponentReport("vae", "AutoencoderKLWan", True, "tile on 2 ranks"),)
        self.device, self.dtype, self.worker_pids = "cpu", "float32", [1, 2]
        self.may_start = threading.Event()
        self.may_start.set()
        self.may_finish = threading.Event()
        self.may_finish.set()
        self.running = threading.Event()
        self.start_fault: Exception | None = None
        self.fault: Exception | None = None
        self.output: np.ndarray | None = None
        self.decisions: tuple[dict[str, Any], ...] = (DECISION,)
        self.restarts: dict[str, int] = {}
        self.state = Health(True)
        self.replicas = [self.state]
        self.requests: list[GenerationRequest] = []
        self.cancels: list[str] = []
        self.closed = False
        self._ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._items: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._work, daemon=True)

    def start(self) -> None:
        self.may_start.wait()
        if self.start_fault is not None:
            raise self.start_fault
        self._worker.start()

    def resolve(self, request: GenerationRequest) -> GenerationRequest:
        resolved = ScriptedProfile().resolve(request, self.card)
        return resolved if resolved.seed is not None else dataclasses.replace(resolved, seed=7)

    def submit(self, request: GenerationRequest, *, job_id: str, listener: Listener | None = None) -> JobHandle:
        item = _Item(request, listener or (lambda event: None), Future(), threading.Event())
        self.requests.append(request)
        self._items.put(item)

        def cancel() -> None:
            self.cancels.append(job_id)
            item.cancelled.set()

        return JobHandle(job_id, item.future, cancel)

    def health(self) -> Health:
        return self.state

    def wait(self) -> Exception | None:
        return self._ended.get()

    def give_up(self, error: Exception) -> None:
        """End as the engine does after too many restarts."""
        self.state = Health(False, str(error))
        self._ended.put(error)

    def close(self) -> None:
        self.closed = True
        self._ended.put(None)
        self.may_start.set()
        self._items.put(None)

    def _work(self) -> None:
        while (item := self._items.get()) is not None:
            try:
                result = self._make(item)
            except Exception as error:
                item.future.set_exception(error)
            else:
                item.future.set_result(result)
            finally:
                self.running.clear()

    def _make(self, item: _Item) -> GenerationResult:
        request = item.request
        if item.cancelled.is_set():
            raise Cancelled("cancelled in the queue")
        item.listener(Started())
        if request.images:
            item.listener(Progress(Stage.ENCODE, 1, 1))
        steps = request.num_inference_steps or 1
        for step in range(steps):
            item.listener(Progress(Stage.DENOISE, step + 1, steps))
            if step == steps // 2:
                self.running.set()
                while not self.may_finish.wait(0.01):
                    if item.cancelled.is_set():
                        raise Cancelled("cancelled while it ran")
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        for tile in range(6):
            item.listener(Progress(Stage.DECODE, tile + 1, 6))
        frames, self.output = self.output, None
        if frames is None:
            frames = noise(request, channels=4 if self.card.transparency else 3)
        return GenerationResult(
            frames=frames,
            fps=request.fps or 16 if self.card.medium is Medium.VIDEO else None,
            seed=request.seed or 0,
            stage_durations={"denoise": 0.5, "decode": 0.25},
            decisions=self.decisions,
            peak_memory_mb=(12.5, 11.0),
            vae_use=USE,
        )


def noise(request: GenerationRequest, *, channels: int = 3) -> np.ndarray:
    """Frames, or images one after the other, that depend on their seed and on nothing else."""
    shape = (request.pictures or 1, request.height or 16, request.width or 16, channels)
    seeds = [(request.seed or 0) + run for run in range(request.runs)]
    return np.concatenate([np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8) for seed in seeds])
