# SPDX-License-Identifier: Apache-2.0
"""What ``bench`` and ``verify`` have in common: flags, what is measured, and the ranks that measure it."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..config import VaeConfig, VaeParallelMode, VaeSplits
from ..config.splits import RANK_SPLIT
from ..errors import GeometryError, UnsupportedError
from ..measure.arms import arms_of
from ..measure.messages import Job, Progress, RankSeen, Source, Work
from ..measure.result import OperationResult, gather_arms
from .asked import add_margins, add_model, add_operation, add_tiles, margins_of, merges_of, operations_of
from .blank import Found, make_blank, public_shapes
from .full_size import FULL_SIZE
from .terminal import tell

if TYPE_CHECKING:
    from ..autoencoders.cost import Forecaster

MODES = tuple(mode for mode in VaeParallelMode if mode is not VaeParallelMode.AUTO)
WAYS = (*(mode.value for mode in MODES), RANK_SPLIT)
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What is measured of one autoencoder, found to be possible; no process has been started for it.

    Attributes:
        found: Which autoencoder.
        size: Frames, height and width in pixels.
        job: What the ranks are told.
        made: Shape of each operation's output.
        left_out: Why a mode is not run, by operation and mode.
        auto: What ``auto`` takes, by operation.
    """

    found: Found
    size: tuple[int, int, int]
    job: Job
    made: Mapping[str, tuple[int, ...]]
    left_out: Mapping[str, Mapping[str, str]]
    auto: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Measurement:
    """What came out.

    Attributes:
        request: What was measured.
        device, backend: Of rank 0.
        threads: Of each rank, also where one runs alone.
        weight_bytes: That every rank holds.
        operations: One or two.
    """

    request: Request
    device: str
    backend: str
    threads: int
    weight_bytes: int
    operations: tuple[OperationResult, ...]

    @property
    def broken(self) -> list[str]:
        """Promises that were not kept, in words."""
        return [
            f"{self.request.found.path}: {operation.operation} {one.arm.name}"
            for operation in self.operations
            for one in operation.broken
        ]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready values."""
        job = self.request.job
        frames, height, width = self.request.size
        return {
            "path": self.request.found.path,
            "autoencoder": self.request.found.kind,
            "frames": frames,
            "height": height,
            "width": width,
            "ranks": job.ranks,
            "dtype": job.dtype,
            "device": self.device,
            "backend": self.backend,
            "threads": self.threads,
            "weight_bytes": self.weight_bytes,
            "warmup": job.warmup,
            "repeats": job.repeats,
            "operations": {one.operation: one.to_json() for one in self.operations},
        }


def add_arguments(parser: argparse.ArgumentParser, *, warmup: int, repeats: int) -> None:
    """Add the flags that both commands take; those that say how large the input is are each command's own."""
    families = ", ".join(FULL_SIZE)
    what = f"Folder or hub name of a diffusers checkpoint, or, for random weights of full size, one of {families}."
    add_model(parser, what)
    add_operation(parser, "measure")
    parser.add_argument(
        "--modes",
        nargs="+",
        metavar="MODE",
        choices=WAYS,
        help=f"Which ways to share: {', '.join(WAYS)}. Default: all that the family has.",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="Default: float32.")
    add_tiles(parser)
    add_margins(parser)
    parser.add_argument(
        "--warmup", type=int, default=warmup, metavar="N", help=f"Rounds that are not timed. Default: {warmup}."
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=repeats,
        metavar="N",
        help=f"Rounds that are timed; each runs everything once. Default: {repeats}.",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=1800.0,
        metavar="S",
        help="Seconds without a step forward after which the ranks are given up. Default: 1800.",
    )
    parser.add_argument("--json", action="store_true", help="Print JSON, with every number of every rank.")


def plan_request(
    found: Found,
    args: argparse.Namespace,
    size: tuple[int, int, int],
    tiles: VaeConfig,
    *,
    timing: bool,
) -> Request:
    """Find out what would be run; nothing is started.

    Args:
        found: Which autoencoder.
        args: Flags of the command.
        size: Frames, height and width in pixels.
        tiles: Tile size and stride.
        timing: Whether times are what matters: then each shard also runs without messages, and no shard is judged,
            which takes a run in float64.

    Raises:
        GeometryError: the autoencoder cannot do this size, or nothing of it would be shared.
        UnsupportedError: a mode that was named and that the family does not have.
    """
    from ..autoencoders.checks import check_merge, check_mode, check_splits
    from ..autoencoders.cost import Forecaster

    chunk = getattr(args, "chunk", None)
    vae = make_blank(found.config, args.dtype, args.ranks, tiles.vae_tile_size, tiles.vae_tile_stride)
    named = [VaeParallelMode(mode) for mode in args.modes or () if mode != RANK_SPLIT]
    for mode in named:
        check_mode(vae.spec, mode)
    merges = merges_of(args)
    for merge in merges:
        check_merge(type(vae), merge)
    modes = list(dict.fromkeys(named))
    margins = margins_of(args) if not args.modes or RANK_SPLIT in args.modes else []
    if not args.modes:
        modes = [mode for mode in MODES if mode in vae.spec.modes]
    elif margins:
        check_splits(vae.spec, VaeSplits(margins[0], margins[0]))
    works, made, left_out, auto = [], {}, {}, {}
    for operation in operations_of(args, vae.spec):
        shape, made[operation.value] = public_shapes(vae, operation, size)
        runs, pieces, left_out[operation.value], auto[operation.value] = _choose(
            Forecaster(vae, operation, shape, chunk), modes, margins, args.ranks
        )
        works.append(Work(operation.value, shape, arms_of(runs, bounds=timing, merges=merges, margins=pieces)))
    job = Job(
        source=Source(found.kind, found.config, found.model, found.path.replace(".", "/")),
        works=tuple(works),
        ranks=args.ranks,
        dtype=args.dtype,
        tile_size=tiles.vae_tile_size,
        tile_stride=tiles.vae_tile_stride,
        chunk=chunk,
        warmup=args.warmup,
        repeats=args.repeats,
        exact=not timing,
        timeout=args.timeout,
    )
    return Request(found, size, job, made, left_out, auto)


def _choose(
    forecaster: Forecaster, modes: list[VaeParallelMode], margins: list[int], ranks: int
) -> tuple[list[VaeParallelMode], list[int], dict[str, str], str]:
    """Modes and margins that run as themselves and unlike others, why the rest does not, and what ``auto`` takes."""
    runs: dict[tuple[int, int], VaeParallelMode] = {}
    left_out: dict[str, str] = {}
    for mode in modes:
        try:
            decision = forecaster.decide(mode, ranks)
        except UnsupportedError as error:
            left_out[mode.value] = str(error)
            continue
        if decision.strategy.value != mode.value:
            left_out[mode.value] = f"falls back to {decision.strategy} ({decision.reason})"
        elif decision.rank_grid in runs:
            left_out[mode.value] = f"the same as {runs[decision.rank_grid]} on {ranks} ranks"
        else:
            runs[decision.rank_grid] = mode
    pieces = []
    for margin in margins:
        reason = _no_pieces(forecaster, margin, ranks)
        if reason:
            left_out[f"{RANK_SPLIT}/{margin}"] = reason
        else:
            pieces.append(margin)
    if not runs and not pieces:
        why = "; ".join(f"{mode}: {reason}" for mode, reason in left_out.items())
        raise GeometryError(
            f"nothing of this {forecaster.operation} would be shared: {why}; give a larger picture, smaller tiles "
            "(--tile-size and --tile-stride) or fewer ranks"
        )
    return list(runs.values()), pieces, left_out, _auto(forecaster, ranks)


def _no_pieces(forecaster: Forecaster, margin: int, ranks: int) -> str:
    """Why there is no piece for each rank; empty: there is."""
    from ..autoencoders.checks import check_splits

    splits = VaeSplits(margin, margin)
    try:
        check_splits(forecaster.spec, splits)
        decision = forecaster.decide(VaeParallelMode.TILE, ranks, splits=splits)
    except UnsupportedError as error:
        return str(error)
    return "" if decision.margin is not None else f"falls back to {decision.strategy} ({decision.reason})"


def _auto(forecaster: Forecaster, ranks: int) -> str:
    try:
        decision = forecaster.decide(VaeParallelMode.AUTO, ranks)
    except UnsupportedError as error:
        return f"auto is refused: {error}"
    return f"auto takes {str(decision).removeprefix(f'{forecaster.operation}: ')}"


def run_request(request: Request) -> Measurement:
    """Start the ranks, have them measure, and end them. Progress is shown on a terminal.

    Raises:
        EngineError: a rank failed, died or stalled; none is left.
        SystemExit: by Ctrl-C, with the code that shells give it.
    """
    from ..measure.processes import run_job

    try:
        ranks = run_job(request.job, _show)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    finally:
        tell("")
    return measured(request, ranks)


def measured(request: Request, ranks: Sequence[RankSeen]) -> Measurement:
    """What the ranks of ``request`` saw, in rank order, as one."""
    operations = tuple(
        OperationResult(
            work.operation,
            work.shape,
            request.made[work.operation],
            gather_arms(work, ranks),
            request.left_out[work.operation],
            request.auto[work.operation],
        )
        for work in request.job.works
    )
    first = ranks[0]
    return Measurement(request, first.device, first.backend, first.threads, first.weight_bytes, operations)


_BAR = 20
_INTERRUPTED = 130


def _show(progress: Progress) -> None:
    full = round(_BAR * progress.done / progress.total)
    tell(f"[{'#' * full}{'.' * (_BAR - full)}] {progress.what}")
