# SPDX-License-Identifier: Apache-2.0
"""Tiny random VAEs with a tile geometry of a few latents, their inputs, and ranks that are threads."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from diffusers import AutoencoderKLWan

from vllm_omni_vae.autoencoders import Decision, DistributedAutoencoderKLWan, ParallelState
from vllm_omni_vae.config import VaeParallelMode
from vllm_omni_vae.distributed import LocalCommunicator, LocalWorld, VaeGroups
from vllm_omni_vae.tiny.common import randomize

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class TinyVae:
    """One configuration of `AutoencoderKLWan`: layers, and (tile height, tile width, stride height, stride width)."""

    layers: Mapping[str, Any]
    tile: tuple[int, int, int, int]


_NARROW = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}

VAES: Mapping[str, TinyVae] = {
    "wan2.1": TinyVae(_NARROW, (32, 32, 24, 24)),
    "wan2.2-a14b": TinyVae(
        _NARROW | {"z_dim": 6, "dim_mult": [1, 2, 2, 1], "temperal_downsample": [True, False, True]}, (32, 48, 24, 40)
    ),
    "wan2.2-ti2v-5b": TinyVae(
        _NARROW
        | {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16},
        (64, 64, 48, 48),
    ),
    "half time": TinyVae(
        _NARROW | {"temperal_downsample": [False, False, True], "scale_factor_temporal": 2}, (32, 32, 24, 24)
    ),
}


def tiny_vae(name: str = "wan2.1", dtype: torch.dtype = torch.float32, *, tiled: bool = True) -> AutoencoderKLWan:
    """The VAE ``name`` with the same random weights in every process."""
    made = randomize(AutoencoderKLWan(**VAES[name].layers), torch.Generator().manual_seed(0))
    torch.nn.Module.to(made, dtype)  # diffusers' own `to` writes a line for every cast
    if tiled:
        made.enable_tiling(*VAES[name].tile)
    return made


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal noise, the same in every process."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def latents(
    vae: AutoencoderKLWan, time: int, height: int, width: int, *, batch: int = 1, seed: int = 0
) -> torch.Tensor:
    """Latents that ``vae`` decodes."""
    return noise(batch, vae.config.z_dim, time, height, width, seed=seed, dtype=vae.dtype)


def pixels(
    vae: AutoencoderKLWan, frames: int, height: int, width: int, *, batch: int = 1, seed: int = 0
) -> torch.Tensor:
    """Pixels from -1 to 1 that ``vae`` encodes."""
    return noise(batch, 3, frames, height, width, seed=seed).mul(0.5).clamp(-1, 1).to(vae.dtype)


def local_groups(
    comm: LocalCommunicator, workers: tuple[int, ...] = (), output: int = 0, work_world: LocalWorld | None = None
) -> VaeGroups:
    """Groups of a rank that is a thread; all ranks work unless ``workers`` names some, which meet in ``work_world``."""
    if not workers:
        return VaeGroups(comm, comm, tuple(range(comm.size)), output)
    work = None
    if work_world is not None and comm.rank in workers:
        work = LocalCommunicator(work_world, workers.index(comm.rank))
    return VaeGroups(work, comm, workers, output)


def on_ranks(
    size: int,
    vae: AutoencoderKLWan,
    call: Callable[[Any, int], T],
    *,
    mode: VaeParallelMode = VaeParallelMode.TILE,
    workers: tuple[int, ...] = (),
    output: int = 0,
    broadcast: bool = False,
    kind: type = DistributedAutoencoderKLWan,
) -> list[T]:
    """Return what ``call(copy of vae, rank)`` returns on each of ``size`` ranks that are threads.

    Every rank has its own copy, because a diffusers module keeps the cache of the running call. Gradients are off.
    """
    work_world = LocalWorld(len(workers)) if workers else None

    def body(comm: LocalCommunicator) -> T:
        mine = copy.deepcopy(vae)
        mine.__class__ = kind
        mine._vae_parallel = ParallelState(local_groups(comm, workers, output, work_world), mode, broadcast)
        with torch.no_grad():
            return call(mine, comm.rank)

    return LocalWorld(size).run(body)


def decisions(vae: Any) -> list[Decision]:
    """A list that from now on receives every decision of the distributed ``vae``."""
    taken: list[Decision] = []
    vae._vae_parallel.on_decision = taken.append
    return taken


def count_calls(module: torch.nn.Module) -> list[tuple[int, ...]]:
    """A list that from now on receives the shape of every first argument of ``module``."""
    seen: list[tuple[int, ...]] = []
    module.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape)))
    return seen
