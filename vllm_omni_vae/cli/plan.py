# SPDX-License-Identifier: Apache-2.0
"""``vllm-omni-vae plan``: what each way to share an encode or decode among ranks would cost, without weights."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import IN_TILES, VaeConfig, VaeParallelMode, VaeSplits, VaeTileMerge
from ..config.splits import RANK_SPLIT
from ..errors import ConfigurationError, RankError, UnsupportedError
from ..geometry import deal
from .asked import (
    add_margins,
    add_model,
    add_operation,
    add_size,
    add_tiles,
    check_numbers,
    margins_of,
    merges_of,
    operations_of,
)
from .blank import find_autoencoders, make_blank, public_shapes
from .drawing import Panel, Span, draw_png
from .full_size import FULL_SIZE
from .plan_report import OperationPlan, Plan, Row
from .terminal import tell

if TYPE_CHECKING:
    from ..autoencoders import Decision, Operation
    from ..autoencoders.cost import Forecaster

_MODES = (
    VaeParallelMode.TILE,
    VaeParallelMode.SPATIAL_SHARD_HEIGHT,
    VaeParallelMode.SPATIAL_SHARD_WIDTH,
    VaeParallelMode.SPATIAL_SHARD_GRID,
    VaeParallelMode.AUTO,
)


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the subcommand to ``commands``."""
    families = ", ".join(FULL_SIZE)
    parser = commands.add_parser(
        "plan",
        help="show what each VAE parallel mode would cost, without weights",
        description="Show for every VAE parallel mode which rank does what part of an encode or decode, what it "
        "sends and how much memory it takes, and what `auto` chooses. Reads JSON only; no weights, no accelerator.",
    )
    add_model(parser, f"Folder or hub name of a diffusers checkpoint, or one of {families}.")
    add_size(parser)
    add_operation(parser, "plan")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="Default: bfloat16."
    )
    add_tiles(parser, "Default: the family's.")
    add_margins(parser)
    parser.add_argument("--json", action="store_true", help="Print JSON, with every number of every rank.")
    parser.add_argument("--png", type=Path, metavar="FILE", help="Also draw which rank has which part.")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print the plan.

    Raises:
        ConfigurationError: the model, the size, the tiles or the ranks cannot be used.
    """
    check_numbers(args)
    found = next(one for one in find_autoencoders(args.model) if one.known)
    tiles = VaeConfig(vae_tile_size=args.tile_size, vae_tile_stride=args.tile_stride)
    vae = make_blank(found.config, args.dtype, args.ranks, tiles.vae_tile_size, tiles.vae_tile_stride)
    plan = Plan(
        args.model,
        vae.spec.name,
        args.height,
        args.width,
        args.frames,
        args.ranks,
        args.dtype,
        sum(tensor.nbytes for tensor in (*vae.parameters(), *vae.buffers())),
        tuple(_plan(vae, operation, args) for operation in operations_of(args, vae.spec)),
    )
    if args.png:
        draw_png(plan.panels(), args.png)
    print(json.dumps(plan.to_json(), indent=2) if args.json else plan.to_text())


def _plan(vae: Any, operation: Operation, args: argparse.Namespace) -> OperationPlan:
    from ..autoencoders.cost import Forecaster
    from ..autoencoders.receptive import exact_margin

    shape, result = public_shapes(vae, operation, (args.frames, args.height, args.width))
    forecaster = Forecaster(vae, operation, shape)
    tell(f"{operation}: direct")
    direct = forecaster.direct()
    rows = [Row("direct", "runs", direct.decision.reason, direct)]
    merges, margins = merges_of(args), margins_of(args)
    for mode in _MODES:
        tell(f"{operation}: {mode}")
        for merge in merges if mode is VaeParallelMode.TILE else merges[:1]:
            rows.append(_row(forecaster, mode, merge, IN_TILES, args))
        for margin in margins if mode is VaeParallelMode.TILE else ():
            rows.append(_row(forecaster, mode, VaeTileMerge.BLEND, VaeSplits(margin, margin), args))
    split = any(row.strategy.startswith(RANK_SPLIT) and row.status == "runs" for row in rows)
    exact = exact_margin(vae, operation) if split else None
    tell("")
    return OperationPlan(operation, shape, result, tuple(rows), split, exact)


def _row(
    forecaster: Forecaster, mode: VaeParallelMode, merge: VaeTileMerge, splits: VaeSplits, args: argparse.Namespace
) -> Row:
    from ..autoencoders.checks import check_merge, check_mode, check_splits

    margin = splits.margin(forecaster.operation)
    summed = mode is VaeParallelMode.TILE and merge is VaeTileMerge.SUM
    name = f"{mode}/{merge}" if summed else mode.value
    if margin is not None:
        name = f"{RANK_SPLIT}/{margin}"
    try:
        check_mode(forecaster.spec, mode)
        check_merge(type(forecaster.vae), merge)
        check_splits(forecaster.spec, splits)
    except UnsupportedError as error:
        return Row(name, "refused", str(error))
    decision = forecaster.decide(mode, args.ranks, merge, splits)
    meant = mode.value if margin is None else RANK_SPLIT
    if meant not in (VaeParallelMode.AUTO, decision.strategy):
        return Row(name, "falls back", f"to {decision.strategy} ({decision.reason})")
    try:
        forecast = forecaster.forecast(mode, args.ranks, merge, splits)
    except RankError as error:
        if not isinstance(error.__cause__, ConfigurationError):
            raise
        return Row(name, "fails", str(error.__cause__))
    return Row(name, "runs", decision.reason, forecast, _panels(forecaster, decision, args))


def _panels(forecaster: Forecaster, decision: Decision, args: argparse.Namespace) -> tuple[Panel, ...]:
    """Who has which pixels: of tiles and pieces those that remain of each, in one panel for each stretch of time."""
    if decision.sharded:
        layout = forecaster.layout(decision, 0)
        ranks = f"{layout.grid.rows}x{layout.grid.cols} ranks"
        title = f"{decision.strategy}: {ranks}, at the first pixel row and column of each"
        rows = _spans(layout.height.starts, layout.height.extent, args.height)
        cols = _spans(layout.width.starts, layout.width.extent, args.width)
        return (Panel(title, rows, cols, tuple(range(args.ranks))),)
    if not decision.tiles_per_rank:
        return ()
    grid = forecaster.grid(decision)
    time, high, wide = grid.shape
    parts = f"tile: rank of each of {high}x{wide} tiles"
    if decision.margin is not None:
        parts = f"{RANK_SPLIT}: rank of each of {high}x{wide} pieces"
    owners = deal([grid.workload(coord) for coord in grid.coords()], args.ranks).owners
    _, out_height, out_width = grid.out_extents
    rows = _spans([window.out_start for window in grid.windows[1]], out_height, args.height)
    cols = _spans([window.out_start for window in grid.windows[2]], out_width, args.width)
    panels = []
    for number in range(time):
        when = f", stretch {number + 1} of {time}" if time > 1 else ""
        title = f"{parts}, at the first pixel row and column it keeps{when}"
        panels.append(Panel(title, rows, cols, owners[number * high * wide : (number + 1) * high * wide]))
    return tuple(panels)


def _spans(starts: Sequence[int], extent: int, pixels: int) -> tuple[Span, ...]:
    """First pixel, and the pixel after the last, of parts that begin at ``starts`` of ``extent`` units."""
    scaled = [start * (pixels // extent) for start in starts]
    return tuple(zip(scaled, [*scaled[1:], pixels], strict=True))
