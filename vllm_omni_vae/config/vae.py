# SPDX-License-Identifier: Apache-2.0
"""Diffusers' own VAE switches, and the tile geometry in pixels."""

from __future__ import annotations

import dataclasses
import re

from ..errors import ConfigurationError
from .option import option


@dataclasses.dataclass(frozen=True, slots=True)
class TileExtent:
    """A tile size or stride: height and width in pixels, and frames where a family tiles time."""

    height: int
    width: int
    frames: int | None = None

    @classmethod
    def parse(cls, text: str | TileExtent) -> TileExtent:
        """Read ``HxW`` or ``HxWxT``.

        Raises:
            ConfigurationError: the text has another form or a number below one.
        """
        if isinstance(text, cls):
            return text
        match = re.fullmatch(r"(\d+)x(\d+)(?:x(\d+))?", str(text).strip().lower())
        numbers = [int(n) for n in match.groups() if n is not None] if match else []
        if not numbers or min(numbers) < 1:
            raise ConfigurationError(f"{text!r} is no tile extent; write HxW in pixels such as 256x256, or HxWxT")
        return cls(*numbers)

    def __str__(self) -> str:
        return "x".join(str(n) for n in (self.height, self.width, self.frames) if n is not None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VaeConfig:
    """How the VAE of a pipeline is switched, before any parallelism."""

    vae_use_tiling: bool | None = option(
        None, "Encode and decode in overlapping tiles. Default: on when vae-patch-parallel-size is above 1, else off."
    )
    vae_use_slicing: bool = option(False, "Encode and decode the items of a batch one by one.")
    vae_tile_size: TileExtent | None = option(
        None,
        "Tile size in pixels, HxW, or HxWxT with frames for a family that cuts time. Default: the model family's.",
        parse=TileExtent.parse,
        metavar="HxW",
    )
    vae_tile_stride: TileExtent | None = option(
        None,
        "Distance between the starts of neighbouring tiles in pixels, HxW, or HxWxT with frames; at most the tile "
        "size. Default: the model family's.",
        parse=TileExtent.parse,
        metavar="HxW",
    )
    vae_selftest: bool = option(
        True,
        "At load, compare each way in which ranks may share the VAE with one rank, on small noise; one that does not "
        "give what it promises ends the start.",
    )
    vae_check_latents: bool = option(
        False,
        "For debugging: compare by checksum what each encode gave on the denoiser's ranks, and fail the job where they "
        "differ.",
    )

    def __post_init__(self) -> None:
        for name in ("vae_tile_size", "vae_tile_stride"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, TileExtent.parse(value))
