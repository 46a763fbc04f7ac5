# SPDX-License-Identifier: Apache-2.0
"""Turn a loaded diffusers autoencoder into its distributed class."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..config import IN_TILES, VaeParallelMode, VaeSplits, VaeTileMerge
from ..errors import ConfigurationError, UnsupportedError
from .checks import check_merge, check_mode, check_splits
from .flux2 import DistributedAutoencoderKLFlux2
from .kl import DistributedAutoencoderKL
from .ltx2 import DistributedAutoencoderKLLTX2Video
from .ltx2_diffusion import DistributedLTX2VideoDiffusionDecoderModel
from .mixin import DistributedVaeMixin
from .qwen_image import DistributedAutoencoderKLQwenImage, DistributedAutoencoderKLQwenImage21
from .untiled import untiled_class
from .untiled_classes import CLASSES
from .wan import DistributedAutoencoderKLWan

if TYPE_CHECKING:
    import torch.distributed as dist

FAMILIES: tuple[type[DistributedVaeMixin], ...] = (
    DistributedAutoencoderKLWan,
    DistributedAutoencoderKL,
    DistributedAutoencoderKLFlux2,
    DistributedAutoencoderKLLTX2Video,
    DistributedLTX2VideoDiffusionDecoderModel,
    DistributedAutoencoderKLQwenImage,
    DistributedAutoencoderKLQwenImage21,
)
"""One distributed class per family."""


def families_by_name() -> dict[str, type[DistributedVaeMixin]]:
    """The distributed class of each family by the name of its diffusers class."""
    return {family.spec.base_class.__name__: family for family in FAMILIES}


def distributed_class(vae: object) -> type[DistributedVaeMixin] | None:
    """The distributed class for ``vae``, or None when its family is not known here.

    A subclass of a diffusers class has overrides that would be lost; it becomes a family by mixing
    `DistributedVaeMixin` in itself.
    """
    if isinstance(vae, DistributedVaeMixin):
        return type(vae)
    return next((family for family in FAMILIES if type(vae) is family.spec.base_class), None)


def distribute(
    vae: Any,
    *,
    size: int,
    mode: str | VaeParallelMode = VaeParallelMode.TILE,
    merge: str | VaeTileMerge = VaeTileMerge.BLEND,
    splits: VaeSplits = IN_TILES,
    group: dist.ProcessGroup | Sequence[int] | None = None,
    output_rank: int = 0,
    broadcast_result: bool | None = None,
    timeout: timedelta | None = None,
) -> Any:
    """Collective. Share encode and decode of a loaded diffusers autoencoder among ranks, in place.

    Weights, state-dict keys and configuration stay as they are; only the class changes. Every rank must hold the same
    weights and make the same calls with the same inputs, under an initialised `torch.distributed`. With ``size`` 1
    nothing is changed at all.

    Afterwards `encode` returns whole moments on every calling rank. `decode` returns the sample on the output rank, or
    on every calling rank with ``broadcast_result=True``; elsewhere it returns zeros of shape ``(B, C, 1, 1, 1)``, or
    ``(B, C, 1, 1)`` for pictures, which the tail of a diffusers pipeline accepts.

    Args:
        vae: A loaded diffusers autoencoder of a known family.
        size: Ranks that share the work. More than there are fall back to all of them, with one warning.
        mode: ``tile`` or another `VaeParallelMode` that the family has.
        merge: ``blend`` or ``sum``, a `VaeTileMerge`: how tiles become one result.
        splits: Which operations are split by rank instead of in tiles, and with how much context. The environment is
            not asked here.
        group: None: the first ``size`` ranks of the world. A process group: its first ``size`` ranks, only its members
            call. A sequence of global ranks: these work and every rank of the world calls.
        output_rank: Rank, within the working ranks, that owns decoded samples.
        broadcast_result: Give decoded samples to every calling rank. Default: no.
        timeout: How long a rank waits for another. Default: torch's.

    Returns:
        ``vae`` itself.

    Raises:
        UnsupportedError: the family is not known, does not have the mode, or cannot sum its tiles or be split.
        ConfigurationError: the size or the ranks cannot be used, or torch.distributed is not initialised.
    """
    family = distributed_class(vae) or untiled_class(vae)
    if family is None:
        known = ", ".join(f.spec.name for f in FAMILIES)
        others = ", ".join(facts.name for facts in CLASSES)
        raise UnsupportedError(
            f"{type(vae).__name__} cannot be distributed; families that can: {known}; without tiles: {others}"
        )
    mode, merge = VaeParallelMode.parse(mode), VaeTileMerge.parse(merge)
    check_mode(family.spec, mode)
    check_merge(family, merge)
    check_splits(family.spec, splits)
    if size < 1:
        raise ConfigurationError(f"VAE parallel size is {size}; it counts ranks and must be at least 1")
    if size == 1:
        return vae
    before = type(vae)
    vae.__class__ = family
    try:
        vae.set_parallel_size(
            size,
            mode=mode,
            merge=merge,
            splits=splits,
            group=group,
            output_rank=output_rank,
            broadcast_result=broadcast_result,
            timeout=timeout,
        )
    finally:
        if not vae.is_distributed_enabled():
            vae.__class__ = before
    return vae
