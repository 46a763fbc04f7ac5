# SPDX-License-Identifier: Apache-2.0
"""What the engine is started with: the model, its parallelism, its VAE switches and its supervision."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from ..errors import ConfigurationError
from .option import option
from .parallel import DiffusionParallelConfig, VaeParallelMode
from .vae import VaeConfig

DTYPES = ("auto", "bfloat16", "float16", "float32", "half", "float")


class ExecutorBackend(StrEnum):
    """How the ranks of a model are started."""

    MP = "mp"
    RAY = "ray"
    EXTERNAL_LAUNCHER = "external_launcher"

    @classmethod
    def parse(cls, value: str | ExecutorBackend) -> ExecutorBackend:
        """Return the backend named ``value``.

        Raises:
            ConfigurationError: no such backend; the message lists those there are.
        """
        try:
            return cls(value)
        except ValueError:
            raise ConfigurationError(
                f"distributed_executor_backend {value!r} is not available; choose one of {', '.join(cls)}"
            ) from None


def _json_object(text: str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(text, Mapping):
        return dict(text)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{text!r} is not JSON ({error}); write an object such as '{{\"fps\": 16}}'") from None
    if not isinstance(value, dict):
        raise ConfigurationError(f"{text!r} is not a JSON object; write one such as '{{\"fps\": 16}}'")
    return value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that the worker processes need to know, fixed for the life of the engine.

    Raises:
        ConfigurationError: an unknown value, or a combination that cannot work.
    """

    model: str
    parallel: DiffusionParallelConfig = dataclasses.field(default_factory=DiffusionParallelConfig)
    vae: VaeConfig = dataclasses.field(default_factory=VaeConfig)
    dtype: str = option("auto", "Weights and activations: auto, bfloat16, float16 or float32.", shared=True)
    seed: int | None = option(
        None, "Seed of requests that give none. Default: a new one for each such request.", shared=True
    )
    revision: str | None = option(None, "Branch, tag or commit of a model from the hub.", shared=True)
    download_dir: str | None = option(None, "Where models from the hub are kept.", shared=True)
    trust_remote_code: bool = option(False, "Allow code that comes with the checkpoint.", shared=True)
    distributed_executor_backend: ExecutorBackend | None = option(
        None,
        "How ranks are started: as processes of this machine (mp), as actors of a Ray cluster (ray), or, for Omni, by "
        "torchrun (external_launcher). Default: mp.",
        parse=ExecutorBackend.parse,
        shared=True,
    )
    enforce_eager: bool = option(False, "Accepted for compatibility; models always run eagerly.", shared=True)
    model_class_name: str | None = option(
        None,
        "Pipeline class to run the checkpoint as, such as LTX2TwoStagesPipeline. "
        "Default: the one that its model_index.json names.",
    )
    boundary_ratio: float | None = option(
        None, "Share of the noise schedule at which the second expert takes over, 0 to 1. Default: the checkpoint's."
    )
    flow_shift: float | None = option(None, "Shift of the flow-matching schedule. Default: the checkpoint's.")
    default_sampling_params: Mapping[str, Any] = option(
        dict,
        "JSON object of request fields used where a request gives none, e.g. '{\"num_inference_steps\": 30}'.",
        parse=_json_object,
        metavar="JSON",
    )
    torch_profiler_dir: str | None = option(
        None,
        "Folder for traces of torch's profiler, one for each rank, of requests that ask for it by the field trace.",
    )
    worker_timeout: float = option(
        600.0, "Seconds without any sign of progress after which a running job fails and the workers restart."
    )
    startup_timeout: float = option(1800.0, "Seconds that the workers may take to load the model.")

    def __post_init__(self) -> None:
        object.__setattr__(self, "default_sampling_params", _json_object(self.default_sampling_params))
        if self.dtype not in DTYPES:
            raise ConfigurationError(f"dtype {self.dtype!r} is not known; choose one of {', '.join(DTYPES)}")
        if self.distributed_executor_backend is not None:
            backend = ExecutorBackend.parse(self.distributed_executor_backend)
            object.__setattr__(self, "distributed_executor_backend", backend)
            if backend is ExecutorBackend.EXTERNAL_LAUNCHER and self.parallel.data_parallel_size > 1:
                raise ConfigurationError(
                    f"data_parallel_size is {self.parallel.data_parallel_size}, but with external_launcher all ranks "
                    "that torchrun starts are one replica; start torchrun once for each"
                )
        if self.boundary_ratio is not None and not 0 <= self.boundary_ratio <= 1:
            raise ConfigurationError(f"boundary_ratio is {self.boundary_ratio}; it is a share from 0 to 1")
        for name in ("worker_timeout", "startup_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; give seconds above 0")
        if self.vae.vae_check_latents and self.parallel.dit_world_size == 1:
            raise ConfigurationError(
                "vae_check_latents compares denoiser ranks, and there is one; leave it out, or share the denoiser"
            )
        if self.parallel.vae_patch_parallel_size == 1 and not self.vae.vae_use_tiling:
            for name in ("vae_tile_size", "vae_tile_stride"):
                if getattr(self.vae, name) is not None:
                    raise ConfigurationError(f"{name} does nothing without tiling; add vae_use_tiling")
        if self.parallel.vae_patch_parallel_size > 1 and self.vae.vae_use_tiling is False:
            mode = self.parallel.vae_parallel_mode
            if mode in (VaeParallelMode.TILE, VaeParallelMode.AUTO):
                raise ConfigurationError(
                    f"vae_parallel_mode {mode.value} on {self.parallel.vae_patch_parallel_size} ranks works in tiles, "
                    "but VAE tiling was switched off; drop --no-vae-use-tiling or set --vae-patch-parallel-size 1"
                )
