# SPDX-License-Identifier: Apache-2.0
"""Engines for tests: described by name, started on first use, and shared, because each start takes seconds."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np

from vllm_omni_vae.config import DiffusionParallelConfig, EngineConfig, VaeConfig
from vllm_omni_vae.engine.api import Health, JobEvent, JobHandle, Progress
from vllm_omni_vae.engine.engine import Engine
from vllm_omni_vae.pipelines.request import Frames, GenerationRequest, GenerationResult, Stage, Task

RESULT_SECONDS = 60.0
"""Bound of a wait for a job that runs as it should; it includes a restart of the ranks on a busy machine."""

_MOST_AT_A_TIME = 5
_JOB_NUMBERS = itertools.count(1)


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """A tiny checkpoint and how it is run: parallelism, and further fields of `EngineConfig`."""

    family: str
    parallel: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def config(self, folder: Path) -> EngineConfig:
        """The configuration for the checkpoint in ``folder``; tiling is on, on one rank too, and the self-test off."""
        size, stride = tile(self.family)
        return EngineConfig(
            model=str(folder),
            parallel=DiffusionParallelConfig(**self.parallel),
            vae=VaeConfig(
                vae_use_tiling=True,
                vae_tile_size=f"{size}x{size}",
                vae_tile_stride=f"{stride}x{stride}",
                vae_selftest=False,
            ),
            **self.settings,
        )


SETUPS: Mapping[str, Setup] = {
    "i2v": Setup("wan2.2-i2v", {"vae_patch_parallel_size": 2}),
    "i2v on what one rank there is": Setup("wan2.2-i2v", {"vae_patch_parallel_size": 2, "num_gpus": 1}),
    "i2v, ulysses and a follower": Setup("wan2.2-i2v", {"vae_patch_parallel_size": 3, "ulysses_degree": 2}),
    "i2v without patience": Setup("wan2.2-i2v", {"vae_patch_parallel_size": 2}, {"worker_timeout": 3.0}),
    "i2v, one map on two ranks": Setup(
        "wan2.2-i2v", {"vae_patch_parallel_size": 2, "vae_parallel_mode": "spatial_shard_width"}
    ),
    "t2v on one rank": Setup("wan2.2-t2v"),
    "t2v, two replicas": Setup("wan2.2-t2v", {"data_parallel_size": 2}),
    "t2v on two ranks": Setup("wan2.2-t2v", {"vae_patch_parallel_size": 2}),
    "t2v, ulysses": Setup("wan2.2-t2v", {"vae_patch_parallel_size": 2, "ulysses_degree": 2}),
    "t2v, sharded weights and a follower": Setup(
        "wan2.2-t2v", {"vae_patch_parallel_size": 3, "use_hsdp": True, "hsdp_shard_size": 2}
    ),
    "ti2v with a surplus rank": Setup("wan2.2-ti2v-5b", {"vae_patch_parallel_size": 2, "num_gpus": 3}),
}


def tile(family: str) -> tuple[int, int]:
    """Tile size and stride in pixels: four and three latents."""
    return (64, 48) if family == "wan2.2-ti2v-5b" else (32, 24)


class Engines:
    """Running engines by the name of their setup; the ones used last are kept."""

    def __init__(self, checkpoints: Mapping[str, Path]):
        self._checkpoints = checkpoints
        self._running: dict[str, Engine] = {}

    def config(self, name: str, **changes: Any) -> EngineConfig:
        """The configuration of a setup with some of its fields changed."""
        setup = SETUPS[name]
        return dataclasses.replace(setup.config(self._checkpoints[setup.family]), **changes)

    def __getitem__(self, name: str) -> Engine:
        """A running engine, shared with other tests. It may be restarting its ranks; it then runs jobs afterwards."""
        engine = self._running.pop(name, None)
        if engine is not None and not _serves(engine.health()):
            engine.close()
            engine = None
        while engine is None and len(self._running) >= _MOST_AT_A_TIME:
            self._running.pop(next(iter(self._running))).close()
        if engine is None:
            engine = Engine(self.config(name))
            engine.start()
        self._running[name] = engine
        return engine

    def take(self, name: str) -> Engine:
        """A running engine that the caller may break and has to close."""
        engine = self[name]
        del self._running[name]
        return engine

    def close(self) -> None:
        """End every engine that was not taken."""
        while self._running:
            self._running.popitem()[1].close()


def _serves(health: Health) -> bool:
    return health.healthy or health.reason.startswith("restarting")


class Tape:
    """A listener that keeps every event, and once ``at`` is true of one, does ``do`` on the engine's thread."""

    def __init__(self, at: Callable[[JobEvent], bool] | None = None, do: Callable[[], Any] | None = None):
        self.events: list[JobEvent] = []
        self.reached = Event()
        self._at = at
        self._do = do

    def __call__(self, event: JobEvent) -> None:
        self.events.append(event)
        if self._at is not None and not self.reached.is_set() and self._at(event):
            if self._do is not None:
                self._do()
            self.reached.set()

    @property
    def stages(self) -> list[Stage]:
        """The stages that were heard of, in the order of their first event."""
        return list(dict.fromkeys(event.stage for event in self.events if isinstance(event, Progress)))


def during(stage: Stage, done: int = 1) -> Callable[[JobEvent], bool]:
    """Tell that ``done`` units of ``stage`` are done."""
    return lambda event: isinstance(event, Progress) and event.stage is stage and event.done >= done


def picture(width: int, height: int, seed: int = 0) -> Frames:
    """Coloured noise."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def ask(
    engine: Engine,
    *,
    width: int = 80,
    height: int = 64,
    num_frames: int = 5,
    steps: int = 2,
    seed: int | None = 3,
    image: Frames | None = None,
    **fields: Any,
) -> GenerationRequest:
    """A resolved request; a model that only makes videos of images gets one of the clip's size."""
    if image is None and engine.card.tasks == {Task.IMAGE_TO_VIDEO}:
        image = picture(width, height)
    return engine.resolve(
        GenerationRequest(
            prompt="a boat on a calm lake",
            images=() if image is None else (image,),
            width=width,
            height=height,
            num_frames=num_frames,
            num_inference_steps=steps,
            seed=seed,
            **fields,
        )
    )


def submit(engine: Engine, request: GenerationRequest, listener: Any = None) -> JobHandle:
    """Queue ``request`` under a new name."""
    return engine.submit(request, job_id=f"job-{next(_JOB_NUMBERS)}", listener=listener)


def run(engine: Engine, request: GenerationRequest, listener: Any = None) -> GenerationResult:
    """Queue ``request`` and wait for its result."""
    return submit(engine, request, listener).future.result(RESULT_SECONDS)


def cancel_when(engine: Engine, request: GenerationRequest, at: Callable[[JobEvent], bool]) -> tuple[JobHandle, Tape]:
    """Queue ``request``; it is cancelled on the engine's thread at the first event of which ``at`` is true."""
    submitted: Future[JobHandle] = Future()
    tape = Tape(at, lambda: submitted.result(RESULT_SECONDS).cancel())
    submitted.set_result(submit(engine, request, tape))
    return submitted.result(), tape
