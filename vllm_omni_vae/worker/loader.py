# SPDX-License-Identifier: Apache-2.0
"""Load what one rank needs: the whole pipeline on denoiser ranks, only the autoencoders on the others."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import diffusers
import torch

from .. import checkpoint
from ..autoencoders import FAMILIES, families_by_name
from ..autoencoders.checks import check_merge, check_mode, check_splits
from ..config import EngineConfig
from ..errors import UnsupportedError
from ..pipelines.components import distribute_vaes, find_vaes, repeated, self_test
from ..pipelines.profile import PipelineProfile, index_class, read_json
from ..pipelines.request import ComponentReport
from .meeting import ranks_share_devices
from .uneven import uneven_joins

logger = logging.getLogger(__name__)

_SOUND = "audio: decoded once, on the output rank"

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "float": torch.float32,
}


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedModel:
    """What one rank holds.

    Attributes:
        profile: How the pipeline is called.
        pipeline: The diffusers pipeline, or None on a rank that only has the autoencoders.
        vaes: Autoencoders by path, without those of the sound.
        sound: Components that make the sound, by name; none on a rank that only has the autoencoders.
        reports: What happened to each autoencoder.
        device: Where the modules are.
        dtype: Type of the denoiser, for the start-up table.
        check_latents: Whether denoiser ranks compare what an encode gave.
    """

    profile: PipelineProfile
    pipeline: Any
    vaes: dict[str, Any]
    sound: dict[str, Any]
    reports: tuple[ComponentReport, ...]
    device: torch.device
    dtype: str
    check_latents: bool = False

    @property
    def denoisers(self) -> tuple[Any, ...]:
        """The networks that denoise; none on a rank that only has the autoencoders."""
        return () if self.pipeline is None else tuple(_present(self.pipeline, self.profile.denoisers).values())


def rank_device(place: int) -> torch.device:
    """The accelerator of the rank number ``place`` of this machine, or the CPU where there is none."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, place % torch.accelerator.device_count())


def load(config: EngineConfig, rank: int, timeout: timedelta | None = None, *, place: int | None = None) -> LoadedModel:
    """Collective over the world. Load this rank's part of the checkpoint and share its autoencoders.

    Args:
        config: What to load, and how.
        rank: This rank.
        timeout: How long ranks wait for each other.
        place: Number of this rank among those of its machine. Default: ``rank``.

    Raises:
        ConfigurationError: the checkpoint or the parallelism cannot be used as asked.
    """
    found = checkpoint.require(config.model, revision=config.revision, cache_dir=config.download_dir)
    profile = found.profile(config.model_class_name)
    entries = _vae_entries(found.folder, profile)
    _check_modes(entries, config)
    device = rank_device(rank if place is None else place)
    dtype = _dtypes(config, device, profile)
    source: dict[str, Any] = {"revision": config.revision, "cache_dir": config.download_dir}
    mesh = _mesh(config, device)

    def load_part(kind: Any, folder: str) -> Any:
        part = kind.from_pretrained(config.model, subfolder=folder, dtype=_dtype_of(folder, dtype), **source)
        return part.to(device).eval()

    if rank < config.parallel.dit_world_size:
        kind, left_out = _pipeline_kind(found.folder, profile)
        pipeline = kind.from_pretrained(
            config.model, dtype=dtype, trust_remote_code=config.trust_remote_code, **left_out, **source
        )
        pipeline.set_progress_bar_config(disable=True)
        _parallelize(pipeline, profile, config, device, mesh)
        pipeline = profile.complete(pipeline, load_part)
        vaes = {path: vae for path, vae in find_vaes(pipeline).items() if path not in profile.sound}
    else:
        pipeline, vaes = None, {name: load_part(kind, name) for name, kind in entries.items()}
    for vae in vaes.values():
        vae.eval()
    reports = distribute_vaes(vaes, config.vae, config.parallel, timeout)
    sound = {} if pipeline is None else _present(pipeline, profile.sound)
    if config.vae.vae_selftest:
        reports = self_test(vaes, reports)
    reports += [] if pipeline is None else repeated(pipeline, reports)
    reports += [ComponentReport(name, type(part).__name__, False, _SOUND) for name, part in sound.items()]
    shown = dtype.get("default", torch.float32) if isinstance(dtype, dict) else dtype
    name = str(shown).removeprefix("torch.")
    return LoadedModel(profile, pipeline, vaes, sound, tuple(reports), device, name, config.vae.vae_check_latents)


def _pipeline_kind(folder: Path, profile: PipelineProfile) -> tuple[Any, dict[str, None]]:
    """The class to load the pipeline with, and what keeps it from loading the components that stay unused."""
    if not profile.unused:
        return diffusers.DiffusionPipeline, {}
    # Only the class itself knows its optional components, and leaves out those that are given as None.
    kind = getattr(diffusers, index_class(read_json(folder / checkpoint.INDEX)))
    return kind, dict.fromkeys(name for name in profile.unused if name in kind._optional_components)


def _check_modes(entries: dict[str, Any], config: EngineConfig) -> None:
    """Refuse a mode, a merge of tiles or a split before any weight is read."""
    for family in FAMILIES:
        if family.spec.base_class in entries.values():
            check_mode(family.spec, config.parallel.vae_parallel_mode)
            check_merge(family, config.parallel.vae_tile_merge)
            check_splits(family.spec, config.parallel.vae_splits)


def _vae_entries(folder: Path, profile: PipelineProfile) -> dict[str, Any]:
    """Components of ``model_index.json`` whose class is a known autoencoder, with that class."""
    by_name = {name: family.spec.base_class for name, family in families_by_name().items()}
    index = read_json(folder / checkpoint.INDEX)
    entries = {name: entry for name, entry in index.items() if isinstance(entry, list) and name not in profile.unused}
    return {name: by_name[entry[1]] for name, entry in entries.items() if entry[-1] in by_name}


def _dtypes(
    config: EngineConfig, device: torch.device, profile: PipelineProfile
) -> torch.dtype | dict[str, torch.dtype]:
    """``auto``: float32 on the CPU; elsewhere bfloat16, and float32 for what the profile says."""
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    if device.type == "cpu":
        return torch.float32
    full = dict.fromkeys(profile.full_precision, torch.float32)
    return {**full, "default": torch.bfloat16} if full else torch.bfloat16


def _dtype_of(name: str, dtype: torch.dtype | dict[str, torch.dtype]) -> torch.dtype:
    return dtype.get(name, dtype["default"]) if isinstance(dtype, dict) else dtype


def _mesh(config: EngineConfig, device: torch.device) -> Any:
    """Collective over the world, followers included. The mesh of the denoiser ranks, if they need one."""
    from torch.distributed.device_mesh import DeviceMesh

    parallel = config.parallel
    ranks = torch.arange(parallel.dit_world_size)
    if len(ranks) == 1:
        return None
    if device.type != "cpu" and ranks_share_devices():
        raise UnsupportedError(
            f"{len(ranks)} denoiser ranks need a device each, and here ranks share one; give them more devices, or "
            "denoise on one rank: only VAE ranks can share a device"
        )
    if parallel.use_hsdp:
        return DeviceMesh(device.type, ranks.view(parallel.hsdp_mesh), mesh_dim_names=("replicate", "shard"))
    if parallel.tensor_parallel_size > 1:
        return DeviceMesh(device.type, ranks, mesh_dim_names=("tp",))
    shape = (parallel.ring_degree, parallel.ulysses_degree)
    mesh = DeviceMesh(device.type, ranks.view(shape), mesh_dim_names=("ring", "ulysses"))
    mesh["ring", "ulysses"]._flatten()  # diffusers does so too, but only on denoiser ranks, and it makes groups
    return mesh


def _parallelize(
    pipeline: Any, profile: PipelineProfile, config: EngineConfig, device: torch.device, mesh: Any
) -> None:
    """Collective over the denoiser ranks. Apply torch FSDP2 or diffusers' parallelism; place the modules."""
    denoisers = list(_present(pipeline, profile.denoisers).values())
    parallel = config.parallel
    if mesh is not None and parallel.use_hsdp:
        _shard_weights([*denoisers, *_present(pipeline, profile.text_encoders).values()], mesh)
    elif mesh is not None and parallel.tensor_parallel_size > 1:
        _divide_weights(denoisers, mesh)
    pipeline.to(device)
    if mesh is not None and parallel.ulysses_degree * parallel.ring_degree > 1:
        _share_sequence(profile, denoisers, device, parallel.ulysses_degree, parallel.ring_degree, mesh)


def _present(pipeline: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: part for name in names if (part := getattr(pipeline, name, None)) is not None}


def _shard_weights(modules: list[Any], mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for module in modules:
        names = set(module._no_split_modules or getattr(module, "_repeated_blocks", None) or ())
        for block in module.modules():
            if type(block).__name__ in names:
                fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
        _keep_recordable(module)


def _keep_recordable(module: Any) -> None:
    """Transformers looks up by the name of a class what it can record, and FSDP2 gives a module a class of its own."""
    from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

    if hasattr(module, "_can_record_outputs"):
        _CAN_RECORD_REGISTRY[str(type(module))] = module._can_record_outputs


def _divide_weights(modules: list[Any], mesh: Any) -> None:
    """Collective over the ranks of ``mesh``. Each keeps its part of the weights that diffusers' plan divides."""
    for module in modules:
        with _at_least_one_device(), _tensor_parallel_anywhere():
            module.enable_parallelism(config=diffusers.TensorParallelConfig(mesh=mesh))


def _share_sequence(
    profile: PipelineProfile, modules: list[Any], device: torch.device, ulysses: int, ring: int, mesh: Any
) -> None:
    if ring > 1 and device.type == "cpu":
        raise UnsupportedError("--ring-degree: the CPU's attention does not return what ring attention needs")
    heads = {int(module.config.num_attention_heads) for module in modules}
    if any(count % ulysses for count in heads):
        raise UnsupportedError(f"--ulysses-degree {ulysses}: the denoiser's {sorted(heads)} heads do not divide by it")
    for module in modules:
        config = diffusers.ContextParallelConfig(
            ring_degree=ring, ulysses_degree=ulysses, ulysses_anything=ring == 1, ring_anything=ulysses == 1, mesh=mesh
        )
        with _at_least_one_device(), uneven_joins(device):
            profile.share_sequence(module, config)


@contextlib.contextmanager
def _at_least_one_device() -> Iterator[None]:
    """Diffusers 0.42 divides by the number of accelerators, which is 0 on the CPU."""
    count = torch.accelerator.device_count
    torch.accelerator.device_count = lambda: max(1, count())
    try:
        yield
    finally:
        torch.accelerator.device_count = count


@contextlib.contextmanager
def _tensor_parallel_anywhere() -> Iterator[None]:
    """Diffusers 0.42 divides weights on the accelerators that it lists; on the CPU it works as well."""
    from diffusers.hooks import tensor_parallel

    devices = tensor_parallel._SUPPORTED_TP_DEVICES
    tensor_parallel._SUPPORTED_TP_DEVICES = (*devices, "cpu")
    try:
        yield
    finally:
        tensor_parallel._SUPPORTED_TP_DEVICES = devices
