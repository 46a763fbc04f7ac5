# SPDX-License-Identifier: Apache-2.0
"""Tiny random VAEs with a tile geometry of a few latents, their inputs, and ranks that are threads."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLLTX2Video,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
)

from vllm_omni_vae.autoencoders import Decision, Operation, ParallelState, distributed_class
from vllm_omni_vae.config import IN_TILES, VaeParallelMode, VaeSplits, VaeTileMerge
from vllm_omni_vae.distributed import LocalCommunicator, LocalWorld, VaeGroups
from vllm_omni_vae.tiny.common import randomize
from vllm_omni_vae.tiny.ltx2 import DECODER_2_3

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class TinyVae:
    """One configuration of a diffusers autoencoder.

    Attributes:
        base: The diffusers class.
        layers: What it is made with.
        tile: What `enable_tiling` is given.
        grid: Height and width of a tile and its strides in pixels, where `enable_tiling` is not given them.
        pixels, latents: Channels of its public input and of its latents.
        ratio: Pixels that make a latent, along height and width.
        step: Frames for each latent frame after the first; 0 for pictures.
        unit: Heights and widths in pixels that it can encode are multiples of this.
        arguments: Further arguments of a public call.
        finish: What is done with diffusers' merged tiles of a decode, where it does less than for an un-tiled sample.
        thinnest: Latents along height and width that diffusers needs to decode a tile; it crashes on thinner ones.
    """

    base: Any
    layers: Mapping[str, Any]
    tile: tuple[int | None, ...]
    latents: int
    pixels: int = 3
    ratio: int = 8
    step: int = 4
    unit: int = 1
    arguments: Mapping[Operation, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    finish: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach
    grid: tuple[int, ...] = ()
    thinnest: int = 1

    def frames(self, time: int) -> tuple[int, ...]:
        """Frames of ``time`` latent frames, as the shape of a tensor has them."""
        return (1 + (time - 1) * self.step,) if self.step else ()

    def given(self, operation: Operation) -> dict[str, Any]:
        """Further arguments of a public call of ``operation``."""
        return dict(self.arguments.get(operation, {}))


def _clamp(sample: torch.Tensor) -> torch.Tensor:
    return sample.clamp(-1, 1)


_NARROW = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}

_FOUR_LEVELS = {
    "block_out_channels": (8, 8, 8, 8),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 1,
    "norm_num_groups": 2,
    "sample_size": 32,
}
"""A tile of AutoencoderKL and FLUX.2 is as large as a sample; a quarter of it overlaps."""

_LTX_2 = {
    "block_out_channels": (8, 8, 8, 8),
    "decoder_block_out_channels": (8, 16, 32),
    "latent_channels": 8,
    "layers_per_block": (1, 1, 1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1, 1),
    "patch_size": 1,
    "decoder_causal": False,
    "spatial_compression_ratio": 8,
    "temporal_compression_ratio": 8,
}

VAES: Mapping[str, TinyVae] = {
    "wan2.1": TinyVae(AutoencoderKLWan, _NARROW, (32, 32, 24, 24), latents=4),
    "wan2.2-a14b": TinyVae(
        AutoencoderKLWan,
        _NARROW | {"z_dim": 6, "dim_mult": [1, 2, 2, 1], "temperal_downsample": [True, False, True]},
        (32, 48, 24, 40),
        latents=6,
    ),
    "wan2.2-ti2v-5b": TinyVae(
        AutoencoderKLWan,
        _NARROW
        | {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16},
        (64, 64, 48, 48),
        latents=4,
        ratio=16,
        unit=16,
    ),
    "qwen-image": TinyVae(
        AutoencoderKLQwenImage, _NARROW | {"input_channels": 3}, (32, 32, 24, 24), latents=4, finish=_clamp
    ),
    "qwen-image rgba": TinyVae(
        AutoencoderKLQwenImage,
        _NARROW | {"input_channels": 4},
        (32, 48, 24, 40),
        latents=4,
        pixels=4,
        finish=_clamp,
    ),
    "flux.1": TinyVae(
        AutoencoderKL,
        _FOUR_LEVELS | {"latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False},
        (),
        latents=16,
        step=0,
        grid=(32, 32, 24, 24),
    ),
    "sdxl": TinyVae(
        AutoencoderKL,
        _FOUR_LEVELS | {"latent_channels": 4, "use_quant_conv": True, "use_post_quant_conv": True},
        (),
        latents=4,
        step=0,
        grid=(32, 32, 24, 24),
    ),
    "flux.2": TinyVae(
        AutoencoderKLFlux2,
        _FOUR_LEVELS | {"latent_channels": 4},
        (),
        latents=4,
        step=0,
        grid=(32, 32, 24, 24),
    ),
    "ltx-2": TinyVae(
        AutoencoderKLLTX2Video,
        _LTX_2 | {"decoder_spatial_padding_mode": "reflect"},
        (32, 32, None, 24, 24),
        latents=8,
        step=8,
        unit=8,
        grid=(32, 32, 24, 24),
        thinnest=2,
    ),
    "ltx-2.3": TinyVae(
        AutoencoderKLLTX2Video,
        _LTX_2 | dict(DECODER_2_3),
        (32, 48, None, 24, 40),
        latents=8,
        step=8,
        unit=8,
        grid=(32, 48, 24, 40),
    ),
    "ltx-2 timestep": TinyVae(
        AutoencoderKLLTX2Video,
        _LTX_2 | {"timestep_conditioning": True, "decoder_causal": True, "decoder_spatial_padding_mode": "reflect"},
        (32, 32, None, 24, 24),
        latents=8,
        step=8,
        unit=8,
        grid=(32, 32, 24, 24),
        thinnest=2,
    ),
    "ltx-2 noise": TinyVae(
        AutoencoderKLLTX2Video,
        _LTX_2 | {"decoder_inject_noise": (True, True, True, True), "decoder_spatial_padding_mode": "zeros"},
        (32, 32, None, 24, 24),
        latents=8,
        step=8,
        unit=8,
        grid=(32, 32, 24, 24),
    ),
    "half time": TinyVae(
        AutoencoderKLWan,
        _NARROW | {"temperal_downsample": [False, False, True], "scale_factor_temporal": 2},
        (32, 32, 24, 24),
        latents=4,
    ),
}
"""Every configuration that is tested, by name."""

RELEASED = tuple(name for name in VAES if name not in ("half time", "ltx-2 timestep", "ltx-2 noise"))
"""Those with the structure of a published autoencoder."""


def tiny_vae(name: str = "wan2.1", dtype: torch.dtype = torch.float32, *, tiled: bool = True) -> Any:
    """The VAE ``name`` with the same random weights in every process."""
    tiny = VAES[name]
    made = randomize(tiny.base(**tiny.layers), torch.Generator().manual_seed(0))
    torch.nn.Module.to(made, dtype)  # diffusers' own `to` writes a line for every cast
    if tiled:
        made.enable_tiling(*tiny.tile)
    return made


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal noise, the same in every process."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def latents(vae: Any, time: int, height: int, width: int, *, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Latents that ``vae`` decodes; a VAE of pictures takes no ``time``."""
    tiny = _of(vae)
    extents = (time, height, width) if tiny.step else (height, width)
    return noise(batch, tiny.latents, *extents, seed=seed, dtype=vae.dtype)


def pixels(vae: Any, frames: int, height: int, width: int, *, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Pixels from -1 to 1 that ``vae`` encodes; a VAE of pictures takes no ``frames``."""
    tiny = _of(vae)
    extents = (frames, height, width) if tiny.step else (height, width)
    return noise(batch, tiny.pixels, *extents, seed=seed).mul(0.5).clamp(-1, 1).to(vae.dtype)


def _of(vae: Any) -> TinyVae:
    """The configuration that ``vae`` was made with."""
    return next(
        tiny
        for tiny in VAES.values()
        if isinstance(vae, tiny.base) and all(_plain(vae.config[k]) == _plain(v) for k, v in tiny.layers.items())
    )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value


def run_public(vae: Any, operation: Operation, x: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """Sample or moments of ``x`` by the public method of ``vae``."""
    if operation is Operation.DECODE:
        return vae.decode(x, **arguments).sample
    return vae.encode(x, **arguments).latent_dist.parameters


def local_groups(
    comm: LocalCommunicator, workers: tuple[int, ...] = (), output: int = 0, work_world: LocalWorld | None = None
) -> VaeGroups:
    """Groups of a rank that is a thread; all ranks work unless ``workers`` names some, which meet in ``work_world``."""
    if not workers:
        return VaeGroups.over(comm, output)
    work = None
    if work_world is not None and comm.rank in workers:
        work = LocalCommunicator(work_world, workers.index(comm.rank))
    return VaeGroups(work, comm, workers, output)


def on_ranks(
    size: int,
    vae: Any,
    call: Callable[[Any, int], T],
    *,
    mode: VaeParallelMode = VaeParallelMode.TILE,
    merge: VaeTileMerge = VaeTileMerge.BLEND,
    splits: VaeSplits = IN_TILES,
    workers: tuple[int, ...] = (),
    output: int = 0,
    broadcast: bool = False,
    kind: type | None = None,
) -> list[T]:
    """Return what ``call(copy of vae, rank)`` returns on each of ``size`` ranks that are threads.

    Every rank has its own copy, because a diffusers module keeps the cache of the running call. Gradients are off.
    """
    work_world = LocalWorld(len(workers)) if workers else None

    def body(comm: LocalCommunicator) -> T:
        mine = copy.deepcopy(vae)
        mine.__class__ = kind or distributed_class(vae)
        groups = local_groups(comm, workers, output, work_world)
        mine._vae_parallel = ParallelState(groups, mode, broadcast, merge=merge, splits=splits)
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


class _TiledPath(Exception):
    """Raised in place of the tiled path."""


def takes_the_tiled_path(vae: Any, operation: Operation, x: torch.Tensor, *methods: str) -> bool:
    """Whether diffusers comes to one of its tiled ``methods`` with the public input ``x``."""

    def stop(*_: object, **__: object) -> None:
        raise _TiledPath

    vars(vae).update(dict.fromkeys(methods, stop))
    try:
        run_public(vae, operation, x)
    except _TiledPath:
        return True
    finally:
        for method in methods:
            delattr(vae, method)
    return False
