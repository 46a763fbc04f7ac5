# SPDX-License-Identifier: Apache-2.0
"""How far each way to share a VAE is from the un-tiled result, with random weights; and pictures of where.

    python tools/accuracy.py [--families wan2.1 ltx-2] [--pictures FOLDER]

The networks have the depth of the released ones and a fraction of their channels, the input is a smooth random picture,
and everything runs on one rank but the shard, whose ranks are threads. What trained weights make of it is another
matter: `vllm-omni-vae verify` says that of a checkpoint.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw

from vllm_omni_vae.autoencoders import Decision, Operation, Strategy, families_by_name
from vllm_omni_vae.autoencoders.compare import Trial, run, run_alone, run_pieces_alone
from vllm_omni_vae.autoencoders.receptive import exact_margin
from vllm_omni_vae.autoencoders.state import ParallelState
from vllm_omni_vae.autoencoders.twin import twin_of
from vllm_omni_vae.cli.full_size import FULL_SIZE
from vllm_omni_vae.cli.table import align
from vllm_omni_vae.config import IN_TILES, TileExtent, VaeParallelMode, VaeSplits
from vllm_omni_vae.distributed import LocalCommunicator, LocalWorld, NullCommunicator, VaeGroups
from vllm_omni_vae.tiny.common import randomize

RANKS = 4
MARGINS = (0, 1, 2, 4, 8)
SHARD = VaeParallelMode.SPATIAL_SHARD_GRID
EXACT = ", exact"


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """A released structure with fewer channels, and what it is run on.

    Attributes:
        family: Name in `FULL_SIZE`.
        narrower: What of its configuration is changed.
        size: Height and width of the picture.
        tile, stride: Of its tiles, in pixels.
    """

    family: str
    narrower: Mapping[str, Any]
    size: tuple[int, int] = (288, 480)
    tile: int = 256
    stride: int = 192


_CHANNELS = {"block_out_channels": (16, 16, 32, 32), "norm_num_groups": 4}
SUBJECTS = (
    Subject("wan2.1", {"base_dim": 8}),
    Subject("wan2.2-ti2v-5b", {"base_dim": 8, "decoder_base_dim": 8}),
    Subject("qwen-image", {"base_dim": 8}),
    Subject("sdxl", _CHANNELS),
    Subject("flux.2", _CHANNELS),
    Subject(
        "ltx-2",
        {
            "block_out_channels": (8, 16, 32, 64),
            "decoder_block_out_channels": (8, 16, 32),
            "latent_channels": 16,
        },
        (544, 960),
        512,
        448,
    ),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One way: its name, its work over that of the whole, and how far it is from un-tiled, everywhere."""

    name: str
    work: float
    apart: torch.Tensor
    whole: torch.Tensor

    @property
    def relative(self) -> float:
        """Root of the mean square of the difference, over that of the un-tiled result."""
        return float(self.apart.norm() / self.whole.norm())

    @property
    def largest(self) -> float:
        """Largest difference over the largest value."""
        return float(self.apart.abs().max() / self.whole.abs().max())


def smooth(channels: int, size: tuple[int, int], seed: int) -> torch.Tensor:
    """A picture of soft shapes with some grain, from -1 to 1: ``(1, C, H, W)``."""
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for cells, share in ((6, 1.0), (24, 0.4), (96, 0.1)):
        coarse = torch.randn(1, channels, cells, cells * 2, generator=generator)
        layers.append(share * F.interpolate(coarse, size, mode="bicubic", align_corners=False))
    picture = sum(layers)
    assert isinstance(picture, torch.Tensor)
    return picture / picture.abs().max()


def make(subject: Subject) -> Any:
    """The distributed autoencoder with random weights, tiled."""
    config = dict(FULL_SIZE[subject.family]) | dict(subject.narrower)
    kind = families_by_name()[config.pop("_class_name")]
    vae = randomize(kind.spec.base_class(**config), torch.Generator().manual_seed(0)).eval()
    vae.__class__ = kind
    vae.spec.set_tiling(vae, *(TileExtent(n, n) for n in (subject.tile, subject.stride)))
    return vae


def inputs(vae: Any, size: tuple[int, int]) -> Iterator[tuple[Operation, torch.Tensor]]:
    """Pixels; and the latents that they become, with a mean square of 1."""
    frames = (1,) if vae.spec.has_time else ()
    pixels = smooth(3, size, seed=1)
    pixels = pixels.reshape(1, 3, *frames, *size)
    yield Operation.ENCODE, pixels
    mean = run_alone(copy.deepcopy(vae), Operation.ENCODE, pixels, {}, tiled=False).chunk(2, dim=1)[0]
    yield Operation.DECODE, mean / mean.square().mean().sqrt()


def rows(vae: Any, operation: Operation, x: torch.Tensor) -> Iterator[Row]:
    """Tiles, pieces with each margin, and the shard."""
    whole = run_alone(copy.deepcopy(vae), operation, x, {}, tiled=False)
    tiles = run_alone(copy.deepcopy(vae), operation, x, {}, tiled=True)
    yield Row("tile", _decision(vae, operation, x, IN_TILES).coverage, tiles - whole, whole)
    exact = exact_margin(twin_of(vae), operation)
    for margin in (*MARGINS, *([] if exact is None or exact in MARGINS else [exact])):
        decision = _decision(vae, operation, x, VaeSplits(margin, margin))
        if decision.strategy is not Strategy.RANK_SPLIT:
            continue
        pieces = run_pieces_alone(copy.deepcopy(vae), operation, x, {}, decision)
        name = f"rank_split, margin {margin}" + (EXACT if margin == exact else "")
        yield Row(name, decision.coverage, pieces - whole, whole)
    yield Row("spatial_shard_grid", 1.0, _shard(vae, operation, x) - whole, whole)


def _decision(vae: Any, operation: Operation, x: torch.Tensor, splits: VaeSplits) -> Decision:
    comm = NullCommunicator(0, RANKS)
    state = ParallelState(VaeGroups.over(comm), VaeParallelMode.TILE, False)
    seen = vae.spec.seen_extents(vae, operation, tuple(x.shape))
    decision: Decision = vae.decide(Trial(state, VaeParallelMode.TILE, splits), operation, seen)
    return decision


def _shard(vae: Any, operation: Operation, x: torch.Tensor) -> torch.Tensor:
    def one_rank(comm: LocalCommunicator) -> torch.Tensor:
        mine = copy.deepcopy(vae)
        state = ParallelState(VaeGroups.over(comm), SHARD, False)
        mine._vae_parallel = Trial(state, SHARD)
        with torch.no_grad():
            return run(mine, operation, x, {})

    return LocalWorld(RANKS).run(one_rank)[0]


PANEL, GAP, TITLE = 200, 12, 18
SHOWN = ("tile", "rank_split, margin 0", "rank_split, margin 2", "rank_split, margin 8")
FAINTEST, STRONGEST = -4.0, 0.0
"""Powers of ten of the largest value: what is below the first is black, what is above the second white."""


def draw(found: Mapping[Operation, Sequence[Row]], file: Path) -> None:
    """Write where the difference lies: encode above decode, one panel for each way."""
    first = next(iter(found.values()))[0].apart
    height = round(PANEL * first.shape[-2] / first.shape[-1])
    width = GAP + len(SHOWN) * (PANEL + GAP)
    image = Image.new("RGB", (width, GAP + len(found) * (TITLE + height + GAP)), "white")
    canvas = ImageDraw.Draw(image)
    top = GAP
    for operation, ways in found.items():
        shown = [row for name in SHOWN for row in ways if row.name.removesuffix(EXACT) == name]
        for place, row in enumerate(shown):
            left = GAP + place * (PANEL + GAP)
            canvas.text((left, top), f"{operation}: {row.name}", fill="black")
            image.paste(_heat(row).resize((PANEL, height), Image.Resampling.BOX), (left, top + TITLE))
        top += TITLE + height + GAP
    image.quantize(128).save(file, format="PNG", optimize=True)


def _heat(row: Row) -> Image.Image:
    scale = row.apart.abs().amax(tuple(range(row.apart.dim() - 2))) / row.whole.abs().max()
    level = ((scale.clamp_min(1e-30).log10() - FAINTEST) / (STRONGEST - FAINTEST)).clamp(0, 1)
    colours = torch.tensor([[0, 0, 0], [70, 20, 110], [200, 60, 80], [250, 160, 40], [255, 255, 255]]) / 255
    place = level * (len(colours) - 1)
    below = place.floor().long().clamp_max(len(colours) - 2)
    part = (place - below).unsqueeze(-1)
    mixed = colours[below] * (1 - part) + colours[below + 1] * part
    return Image.fromarray((mixed * 255).round().to(torch.uint8).numpy())


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description="Compare every way to share a VAE with the un-tiled result.")
    names = [subject.family for subject in SUBJECTS]
    parser.add_argument("--families", nargs="+", choices=names, default=names, metavar="FAMILY")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="Also draw where the differences lie.")
    return parser.parse_args()


def main() -> int:
    """Print a table for each family and operation."""
    args = arguments()
    for subject in (one for one in SUBJECTS if one.family in args.families):
        with torch.no_grad():
            vae = make(subject)
            found = {operation: list(rows(vae, operation, x)) for operation, x in inputs(vae, subject.size)}
        for operation, ways in found.items():
            table = [("", "work", "rms error", "largest error")]
            table += [(row.name, f"{row.work:.2f}x", f"{row.relative:.1e}", f"{row.largest:.1e}") for row in ways]
            print(f"{subject.family}: {operation} of {subject.size[0]}x{subject.size[1]}, {RANKS} ranks\n")
            print("\n".join(align(table)), end="\n\n", flush=True)
        if args.pictures:
            draw(found, args.pictures / f"accuracy-{subject.family}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
