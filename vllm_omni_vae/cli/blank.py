# SPDX-License-Identifier: Apache-2.0
"""Autoencoders of a checkpoint or of a family's name, told from JSON, and made without weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import checkpoint
from ..config import DiffusionParallelConfig, TileExtent, VaeConfig
from ..errors import ConfigurationError, GeometryError, UnsupportedError
from .full_size import FULL_SIZE

if TYPE_CHECKING:
    from ..autoencoders import Operation

FAMILY_PATH = "vae"
"""Where the autoencoder of a family's name counts as being."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """One autoencoder.

    Attributes:
        path: Where it is in the pipeline, e.g. ``vae`` or ``upsample_pipeline.vae``.
        kind: Its diffusers class.
        known: Whether its work can be shared among ranks.
        config: Its ``config.json``; empty where it is not known.
        model: Its checkpoint; None for a family's name.
    """

    path: str
    kind: str
    known: bool
    config: Mapping[str, Any]
    model: str | None


def find_autoencoders(model: str) -> list[Found]:
    """Every autoencoder of ``model``, those in pipelines within it too, in the order of ``model_index.json``.

    What a served pipeline leaves unused is none of its autoencoders.

    Args:
        model: A family's name, or folder or hub name of a diffusers checkpoint.

    Raises:
        ConfigurationError: it is neither, or not complete.
        UnsupportedError: none of them can be shared.
    """
    if model in FULL_SIZE:
        config = FULL_SIZE[model]
        return [Found(FAMILY_PATH, config["_class_name"], True, config, None)]
    try:
        folder = checkpoint.descriptions(checkpoint.require(model))
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}; or name one of the families {', '.join(FULL_SIZE)}") from None
    from ..autoencoders import families_by_name

    families = families_by_name()
    found = list(_walk("", folder, model, families))
    if not any(one.known for one in found):
        raise UnsupportedError(
            f"{model} has no autoencoder that can be shared among ranks; those that can: {', '.join(families)}"
        )
    return found


def _walk(prefix: str, folder: Path, model: str, families: Mapping[str, Any]) -> Iterator[Found]:
    from ..pipelines.profile import read_json
    from ..pipelines.registry import find_profile

    index = read_json(folder / checkpoint.INDEX)
    profile = find_profile(str(index.get("_class_name")))
    unused = profile.unused if profile else ()
    for name, entry in index.items():
        if name in unused or not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[1], str):
            continue
        path, (library, kind) = prefix + name, entry
        if kind in families:
            config = read_json(folder / name / "config.json") | {"_class_name": kind}
            yield Found(path, kind, True, config, model)
        elif library == "diffusers" and _is_autoencoder(kind):
            yield Found(path, kind, False, {}, model)
        elif (folder / name / checkpoint.INDEX).is_file():
            yield from _walk(f"{path}.", folder / name, model, families)


def _is_autoencoder(name: str) -> bool:
    """As `find_vaes` tells them of a loaded pipeline: a module that encodes and decodes."""
    import diffusers
    import torch

    kind = getattr(diffusers, name, None)
    is_module = isinstance(kind, type) and issubclass(kind, torch.nn.Module)
    return is_module and hasattr(kind, "encode") and hasattr(kind, "decode")


def make_blank(
    config: Mapping[str, Any], dtype: str, ranks: int, tile_size: TileExtent | None, tile_stride: TileExtent | None
) -> Any:
    """The distributed autoencoder of ``config`` on `torch.device("meta")`, tiled as asked.

    Raises:
        GeometryError: the tile size and stride cannot be used.
        UnsupportedError: a tile length in time for a family that is not tiled in time.
    """
    import torch

    from ..autoencoders import families_by_name, twin
    from ..pipelines.components import set_up_vae

    vae = twin.make_blank(families_by_name()[config["_class_name"]], config, getattr(torch, dtype))
    tiles = VaeConfig(vae_use_tiling=True, vae_tile_size=tile_size, vae_tile_stride=tile_stride)
    set_up_vae(vae, tiles, DiffusionParallelConfig(vae_patch_parallel_size=ranks))
    return vae


def public_shapes(
    vae: Any, operation: Operation, asked: tuple[int, int, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of what goes in and what comes out.

    Args:
        vae: A distributed autoencoder with tiling set.
        operation: Encode or decode.
        asked: Frames, height and width in pixels.

    Raises:
        GeometryError: the autoencoder does not decode to this size, or is asked for several frames of a picture.
    """
    from ..autoencoders import Operation

    spec = vae.spec
    if asked[0] > 1 and not spec.has_time:
        raise GeometryError(f"{spec.name} is for pictures, not for {asked[0]} frames; give 1")
    colours = spec.finished_shape(vae, spec.shape(1, spec.channels(vae, Operation.DECODE), (1, 1, 1)))[1]
    pixels = spec.shape(1, colours, asked)
    seen = spec.seen_extents(vae, Operation.ENCODE, pixels)
    latents = spec.grid(vae, Operation.ENCODE, seen).out_extents
    made = spec.extents(spec.example(vae, Operation.ENCODE, latents))
    if operation is Operation.DECODE and made != asked:
        raise GeometryError(
            f"{spec.name} cannot decode to {asked[0]} frames of {asked[1]}x{asked[2]}; "
            f"what it can make next to that is {made[0]} frames of {made[1]}x{made[2]}"
        )
    small = spec.example(vae, Operation.DECODE, latents)
    return (pixels, small) if operation is Operation.ENCODE else (small, pixels)
