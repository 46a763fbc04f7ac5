# SPDX-License-Identifier: Apache-2.0
"""How the ranks divide the work: the one request that every layer below reads."""

from __future__ import annotations

import dataclasses
from enum import StrEnum

from ..errors import ConfigurationError
from .option import named, option
from .splits import OPERATIONS, VaeSplit, VaeSplits, resolve


class VaeParallelMode(StrEnum):
    """Which strategy divides one VAE encode or decode among the ranks.

    ``tile`` deals overlapping tiles to ranks and gives what diffusers' sequential tiles give, bit for bit.
    ``auto`` lets the family choose among the strategies it has. The ``spatial_shard_*`` modes keep one feature map
    spread over the ranks; a family that does not have them refuses them at start-up.
    """

    TILE = "tile"
    AUTO = "auto"
    SPATIAL_SHARD_HEIGHT = "spatial_shard_height"
    SPATIAL_SHARD_WIDTH = "spatial_shard_width"
    SPATIAL_SHARD_GRID = "spatial_shard_grid"

    @classmethod
    def parse(cls, value: str | VaeParallelMode) -> VaeParallelMode:
        """Return the mode named ``value``.

        Raises:
            ConfigurationError: no such mode; the message lists those there are.
        """
        return named(cls, "vae_parallel_mode", value)


class VaeTileMerge(StrEnum):
    """How the ranks' tiles become one result.

    ``blend``: every tile travels to one rank, which blends them in diffusers' order, bit for bit as one rank does.
    ``sum``: each rank adds its own tiles up, times their weights, and one reduction adds the ranks' sums. That is the
    same up to the order of additions.
    """

    BLEND = "blend"
    SUM = "sum"

    @classmethod
    def parse(cls, value: str | VaeTileMerge) -> VaeTileMerge:
        """Return the merge named ``value``.

        Raises:
            ConfigurationError: no such merge; the message lists those there are.
        """
        return named(cls, "vae_tile_merge", value)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionParallelConfig:
    """The parallelism that was asked for, validated once, with no knowledge of any model.

    Raises:
        ConfigurationError: a size below one, an unknown mode, or sizes that contradict each other.
    """

    vae_patch_parallel_size: int = option(
        1, "Ranks that share one VAE encode or decode. More than 1 switches VAE tiling on."
    )
    vae_parallel_mode: VaeParallelMode = option(
        VaeParallelMode.TILE,
        "How ranks divide the VAE's work. A mode that the model's VAE does not have is refused at start-up.",
        parse=VaeParallelMode.parse,
    )
    vae_tile_merge: VaeTileMerge = option(
        VaeTileMerge.BLEND,
        "How the ranks' tiles become one result: blended on one rank, bit-equal to one rank's tiles; or a sum over the "
        "ranks, equal up to the order of additions, for which no rank holds the tiles of others.",
        parse=VaeTileMerge.parse,
    )
    vae_encode_split: VaeSplit | None = option(
        None,
        "What an encode is cut into for the ranks: tile, overlapping tiles; or rank, one piece for each rank with a "
        "margin of context that is dropped afterwards, which is approximate. Default: tile.",
        parse=VaeSplit.parse,
    )
    vae_encode_margin: int | None = option(
        None,
        "Latent rows and columns of context on each inner edge of a piece of vae-encode-split rank; 0 is less accurate "
        "than tiles. Default: 2.",
    )
    vae_decode_split: VaeSplit | None = option(
        None, "As vae-encode-split, for a decode: tile or rank. Default: tile.", parse=VaeSplit.parse
    )
    vae_decode_margin: int | None = option(
        None, "As vae-encode-margin, for a piece of vae-decode-split rank. Default: 2."
    )
    num_gpus: int | None = option(
        None,
        "Ranks of all replicas (devices, or CPU processes where there is no accelerator). Default: as many as needed.",
    )
    tensor_parallel_size: int = option(1, "Tensor parallel ranks of the denoiser.", aliases=("-tp",), shared=True)
    ulysses_degree: int = option(1, "Ulysses sequence parallel ranks of the denoiser.", aliases=("--usp",))
    ring_degree: int = option(1, "Ring attention ranks of the denoiser.", aliases=("--ring",))
    cfg_parallel_size: int = option(1, "Ranks that share the branches of classifier-free guidance.")
    use_hsdp: bool = option(False, "Shard the denoiser's and text encoders' weights over the ranks (torch FSDP2).")
    hsdp_shard_size: int = option(-1, "Ranks that one copy of the weights is sharded over; -1: all denoiser ranks.")
    hsdp_replicate_size: int = option(1, "Copies of the sharded weights.")
    data_parallel_size: int = option(
        1,
        "Replicas of the model, each on ranks of its own; as many jobs run at a time.",
        aliases=("-dp",),
        shared=True,
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "vae_parallel_mode", VaeParallelMode.parse(self.vae_parallel_mode))
        object.__setattr__(self, "vae_tile_merge", VaeTileMerge.parse(self.vae_tile_merge))
        for name in (
            "vae_patch_parallel_size",
            "tensor_parallel_size",
            "ulysses_degree",
            "ring_degree",
            "cfg_parallel_size",
            "hsdp_replicate_size",
            "data_parallel_size",
        ):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it counts ranks and must be at least 1")
        if self.vae_tile_merge is not VaeTileMerge.BLEND and self.vae_patch_parallel_size == 1:
            raise ConfigurationError(
                f"vae_tile_merge {self.vae_tile_merge} does nothing on one VAE rank; give a vae_patch_parallel_size of "
                "2 or more"
            )
        for operation in OPERATIONS:
            split, margin = (getattr(self, f"vae_{operation}_{what}") for what in ("split", "margin"))
            split, margin = resolve(operation, split, margin, self.vae_patch_parallel_size)
            object.__setattr__(self, f"vae_{operation}_split", split)
            object.__setattr__(self, f"vae_{operation}_margin", margin)
        if self.vae_tile_merge is VaeTileMerge.SUM and None not in (self.vae_encode_margin, self.vae_decode_margin):
            raise ConfigurationError(
                "vae_tile_merge sum is for tiles, and both encode and decode are split by rank, whose pieces do not "
                "overlap; drop it, or leave one of them in tiles"
            )
        if self.hsdp_shard_size != -1 and self.hsdp_shard_size < 1:
            raise ConfigurationError(f"hsdp_shard_size is {self.hsdp_shard_size}; give at least 1, or -1 for all ranks")
        if not self.use_hsdp and (self.hsdp_shard_size != -1 or self.hsdp_replicate_size != 1):
            raise ConfigurationError("hsdp_shard_size and hsdp_replicate_size do nothing without use_hsdp; add it")
        if self.use_hsdp and self.hsdp_shard_size == -1 and self._sequence_ranks % self.hsdp_replicate_size:
            raise ConfigurationError(
                f"{self._sequence_ranks} denoiser ranks cannot hold {self.hsdp_replicate_size} copies of the weights; "
                "give hsdp_shard_size"
            )
        if self._hsdp_ranks > 1 and self._sequence_ranks > 1 and self._hsdp_ranks != self._sequence_ranks:
            raise ConfigurationError(
                f"HSDP covers {self._hsdp_ranks} ranks and the denoiser's other parallelism {self._sequence_ranks}; "
                "they use the same ranks, so make both the same"
            )
        if self.num_gpus is not None and self.num_gpus % self.data_parallel_size:
            raise ConfigurationError(
                f"num_gpus is {self.num_gpus}, which {self.data_parallel_size} replicas (data_parallel_size) cannot "
                "share evenly; give a multiple"
            )
        if self.num_gpus is not None and self.world_size < self.dit_world_size:
            raise ConfigurationError(
                f"num_gpus is {self.num_gpus} but the denoiser's parallelism needs "
                f"{self.dit_world_size * self.data_parallel_size} ranks"
            )

    @property
    def vae_splits(self) -> VaeSplits:
        """The splits by rank, the environment's included."""
        return VaeSplits(self.vae_encode_margin, self.vae_decode_margin)

    @property
    def _sequence_ranks(self) -> int:
        return self.tensor_parallel_size * self.ulysses_degree * self.ring_degree * self.cfg_parallel_size

    @property
    def _hsdp_ranks(self) -> int:
        if not self.use_hsdp:
            return 1
        shard = self.hsdp_shard_size if self.hsdp_shard_size != -1 else self._sequence_ranks // self.hsdp_replicate_size
        return shard * self.hsdp_replicate_size

    @property
    def dit_world_size(self) -> int:
        """Ranks that run the denoiser; they are the first ranks of the world."""
        return max(self._sequence_ranks, self._hsdp_ranks)

    @property
    def hsdp_mesh(self) -> tuple[int, int]:
        """(replicate, shard) sizes of the FSDP2 mesh."""
        return self.hsdp_replicate_size, self.dit_world_size // self.hsdp_replicate_size

    @property
    def world_size(self) -> int:
        """Ranks of one replica: its share of ``num_gpus`` if given, else as many as the denoiser or the VAE needs."""
        if self.num_gpus is not None:
            return self.num_gpus // self.data_parallel_size
        return max(self.dit_world_size, self.vae_patch_parallel_size)

    @property
    def vae_ranks(self) -> int:
        """Ranks that share the VAE's work: as many as asked for, or all of the world where it is smaller."""
        return min(self.vae_patch_parallel_size, self.world_size)
