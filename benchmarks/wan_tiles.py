# SPDX-License-Identifier: Apache-2.0
"""Time encode and decode of a Wan VAE with random weights: whole, in tiles one after the other, and in shared tiles.

    python -m benchmarks.wan_tiles --config wan2.1 --ranks 2

Nothing else of a pipeline runs. Every rank is a process with one thread. In each round all three arms run, one after
another and in another order than in the round before; ranks that an arm does not use wait. Of each round the slowest
rank counts. On machines with fewer free cores than ranks only the CPU seconds say something about speed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from .ranks import RanksFailed, run_on_ranks

Extent = tuple[int, int]
TIME_RATIO = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """A VAE by the arguments of `diffusers.AutoencoderKLWan`, and what it is given unless the command line says so.

    Attributes:
        layers: Arguments.
        ratio: Pixels to a latent.
        size, tile, stride: Height and width, pixels.
        frames: ``1 + 4k``.
        repeats: Rounds that count.
    """

    layers: Mapping[str, Any]
    ratio: int = 8
    size: Extent = (128, 128)
    tile: Extent = (64, 64)
    stride: Extent = (48, 48)
    frames: int = 5
    repeats: int = 3


_PATCHIFIED = {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16}

CONFIGS: Mapping[str, Config] = {
    "small": Config({"base_dim": 16, "z_dim": 4}, repeats=9),
    "wan2.1": Config({}),
    "wan2.2-5b": Config(
        {"base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, **_PATCHIFIED},
        ratio=16,
        size=(192, 192),
        tile=(128, 128),
        stride=(96, 96),
    ),
}


class Arm(StrEnum):
    """What is compared."""

    WHOLE = "un-tiled, one rank"
    SEQUENTIAL = "tiles, one rank"
    SHARED = "tiles, all ranks"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run of the benchmark; extents are height and width in pixels."""

    config: str
    size: Extent
    frames: int
    tile: Extent
    stride: Extent
    ranks: int
    operations: tuple[str, ...]
    warmup: int
    repeats: int

    @property
    def latents(self) -> tuple[int, int, int]:
        """Time, height and width of what is decoded."""
        ratio = CONFIGS[self.config].ratio
        return 1 + (self.frames - 1) // TIME_RATIO, self.size[0] // ratio, self.size[1] // ratio


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One arm of one operation.

    Attributes:
        seconds, p10, p90: Median and percentiles over the rounds, of the slowest rank.
        cpu_seconds: Median over the rounds, of the rank that computed most.
        sent: Bytes that the ranks sent in one round; one that is broadcast counts once for each receiver.
        grid: Tiles along time, height and width.
        tiles_per_rank: Tiles that each rank ran.
        to_tiles, to_whole: Largest difference to the other arms' result.
    """

    operation: str
    arm: Arm
    seconds: float
    p10: float
    p90: float
    cpu_seconds: float
    sent: int
    grid: tuple[int, ...]
    tiles_per_rank: tuple[int, ...]
    to_tiles: float
    to_whole: float


@dataclasses.dataclass(slots=True)
class Observed:
    """What one rank saw of one operation, by arm: (wall, CPU) seconds of each round, and bytes sent in the last."""

    times: dict[Arm, list[tuple[float, float]]]
    sent: int
    grid: tuple[int, ...] = ()
    tiles_per_rank: tuple[int, ...] = ()
    to_tiles: dict[Arm, float] = dataclasses.field(default_factory=dict)
    to_whole: dict[Arm, float] = dataclasses.field(default_factory=dict)


def observe(rank: int, plan: Plan) -> dict[str, Observed]:
    """Collective. Run every round on this rank; differences and tiles are known on rank 0."""
    import copy

    import torch
    from diffusers import AutoencoderKLWan

    from vllm_omni_vae import distribute

    torch.manual_seed(0)
    alone = AutoencoderKLWan(**CONFIGS[plan.config].layers).eval()
    shared = copy.deepcopy(alone, {id(weight): weight for weight in alone.parameters()})
    for vae in (alone, shared):
        vae.enable_tiling(*plan.tile, *plan.stride)
    distribute(shared, size=plan.ranks)
    inputs = {
        "encode": torch.rand(1, 3, plan.frames, *plan.size) * 2 - 1,
        "decode": torch.randn(1, alone.config.z_dim, *plan.latents),
    }
    with torch.no_grad():
        return {name: _observe(rank, plan, name, inputs[name], alone, shared) for name in plan.operations}


def _observe(rank: int, plan: Plan, operation: str, x: Any, alone: Any, shared: Any) -> Observed:
    import torch.distributed as dist

    arms = list(Arm)
    seen = Observed({arm: [] for arm in arms}, 0)
    decisions: list[Any] = []
    shared.parallel_state.on_decision = decisions.append
    results = {}
    for turn in range(plan.warmup + plan.repeats):
        for arm in arms[turn % len(arms) :] + arms[: turn % len(arms)]:
            alone.use_tiling = arm is Arm.SEQUENTIAL
            before = _sent(shared)
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            if arm is Arm.SHARED or rank == 0:
                results[arm] = _run(shared if arm is Arm.SHARED else alone, operation, x)
            took = time.perf_counter() - wall, time.process_time() - cpu
            if turn >= plan.warmup:
                seen.times[arm].append(took)
            if arm is Arm.SHARED:
                seen.sent = _sent(shared) - before
    if rank == 0:
        seen.grid, seen.tiles_per_rank = decisions[-1].grid, decisions[-1].tiles_per_rank
        for arm in arms:
            seen.to_tiles[arm] = _difference(results[arm], results[Arm.SEQUENTIAL])
            seen.to_whole[arm] = _difference(results[arm], results[Arm.WHOLE])
    return seen


def _run(vae: Any, operation: str, x: Any) -> Any:
    return vae.encode(x).latent_dist.parameters if operation == "encode" else vae.decode(x).sample


def _sent(vae: Any) -> int:
    groups = vae.parallel_state.groups
    communicators = {id(comm): comm for comm in (groups.domain, groups.work) if comm is not None}.values()
    return sum(comm.traffic.bytes + comm.traffic.broadcast_bytes * (comm.size - 1) for comm in communicators)


def _difference(one: Any, other: Any) -> float:
    return float((one.double() - other.double()).abs().max())


def rows(plan: Plan, ranks: Sequence[Mapping[str, Observed]]) -> list[Row]:
    """Bring together what the ranks saw."""
    return [_row(operation, arm, [rank[operation] for rank in ranks]) for operation in plan.operations for arm in Arm]


def _row(operation: str, arm: Arm, seen: Sequence[Observed]) -> Row:
    rounds = list(zip(*(one.times[arm] for one in seen), strict=True))
    slowest = [max(wall for wall, _ in ranks) for ranks in rounds]
    busiest = [max(cpu for _, cpu in ranks) for ranks in rounds]
    p10, p90 = _percentiles(slowest)
    first = seen[0]
    grid, tiles = first.grid, first.tiles_per_rank
    if arm is not Arm.SHARED:
        grid, tiles = (grid, (sum(tiles),)) if arm is Arm.SEQUENTIAL else ((1, 1, 1), (1,))
    return Row(
        operation=operation,
        arm=arm,
        seconds=statistics.median(slowest),
        p10=p10,
        p90=p90,
        cpu_seconds=statistics.median(busiest),
        sent=sum(one.sent for one in seen) if arm is Arm.SHARED else 0,
        grid=grid,
        tiles_per_rank=tiles,
        to_tiles=first.to_tiles[arm],
        to_whole=first.to_whole[arm],
    )


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return tenths[0], tenths[-1]


def report(plan: Plan, table: Sequence[Row]) -> str:
    """The rows as a table for a person."""
    size, tile, stride = (f"{height}x{width}" for height, width in (plan.size, plan.tile, plan.stride))
    head = (
        f"{plan.config}, {size} pixels, {plan.frames} frames; tiles of {tile} every {stride} pixels; "
        f"{plan.ranks} ranks of one thread; {plan.repeats} rounds after {plan.warmup} of warm-up"
    )
    columns = (
        *("", "arm", "grid", "tiles per rank", "median s", "P10 - P90 s", "CPU s", "sent bytes"),
        *("max diff to tiles", "to un-tiled"),
    )
    cells = [columns] + [
        (
            row.operation,
            str(row.arm),
            "x".join(map(str, row.grid)),
            ", ".join(map(str, row.tiles_per_rank)),
            f"{row.seconds:.3f}",
            f"{row.p10:.3f} - {row.p90:.3f}",
            f"{row.cpu_seconds:.3f}",
            f"{row.sent:,}",
            f"{row.to_tiles:.3g}" if row.to_tiles else "0.0",
            f"{row.to_whole:.3g}" if row.to_whole else "0.0",
        )
        for row in table
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join([head, "", lines[0], "-" * len(lines[0]), *lines[1:]])


def _extent(text: str) -> Extent:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no extent; write HEIGHTxWIDTH in pixels, such as 128x128")
    return int(match[1]), int(match[2])


def _count(least: int) -> Any:
    def integer(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is too few; give at least {least}")
        return value

    return integer


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wan_tiles", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--config", choices=CONFIGS, default="small", help="channels of the VAE; the others take minutes")
    add("--size", type=_extent, metavar="HxW", help="pixels of the picture")
    add("--frames", type=_count(1), help="frames of the clip, 1 + 4k")
    add("--tile-size", type=_extent, metavar="HxW", help="pixels of a tile")
    add("--tile-stride", type=_extent, metavar="HxW", help="pixels between the starts of neighbouring tiles")
    add("--ranks", type=_count(2), default=2, help="processes that share the work")
    add("--operation", choices=("encode", "decode"), help="only this one")
    add("--repeats", type=_count(1), help="rounds that count")
    add("--warmup", type=_count(0), default=1, help="rounds before these")
    add("--timeout", type=float, default=3600.0, help="seconds after which every process is ended")
    add("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _plan(parser: argparse.ArgumentParser) -> tuple[Plan, argparse.Namespace]:
    args = parser.parse_args()
    config = CONFIGS[args.config]
    plan = Plan(
        config=args.config,
        size=args.size or config.size,
        frames=args.frames or config.frames,
        tile=args.tile_size or config.tile,
        stride=args.tile_stride or config.stride,
        ranks=args.ranks,
        operations=(args.operation,) if args.operation else ("encode", "decode"),
        warmup=args.warmup,
        repeats=args.repeats or config.repeats,
    )
    if any(side % config.ratio for side in plan.size):
        parser.error(f"--size {plan.size[0]}x{plan.size[1]}: {plan.config} makes multiples of {config.ratio} pixels")
    if (plan.frames - 1) % TIME_RATIO:
        parser.error(f"--frames {plan.frames}: {plan.config} makes 1 + {TIME_RATIO}k frames")
    if all(side <= tile for side, tile in zip(plan.size, plan.tile, strict=True)):
        parser.error("the picture is not larger than one tile; give a larger --size or a smaller --tile-size")
    return plan, args


def main() -> None:
    """Run the benchmark of the command line.

    Raises:
        SystemExit: with code 2 for arguments that cannot work, and with code 1 when a rank failed, or when shared tiles
            are not bit-equal to tiles one after the other.
    """
    plan, args = _plan(_parser())
    try:
        table = rows(plan, run_on_ranks(observe, plan.ranks, plan, seconds=args.timeout))
    except RanksFailed as error:
        sys.exit(f"error: {error}")
    if args.json:
        print(json.dumps({"plan": dataclasses.asdict(plan), "rows": [dataclasses.asdict(row) for row in table]}))
    else:
        print(report(plan, table))
    if any(row.to_tiles for row in table if row.arm is Arm.SHARED):
        sys.exit("error: shared tiles gave other values than tiles one after the other")


if __name__ == "__main__":
    main()
