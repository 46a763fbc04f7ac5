# SPDX-License-Identifier: Apache-2.0
"""A plan as tables and drawings for a person, and as JSON for a script."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .drawing import Panel, draw_text
from .table import align

if TYPE_CHECKING:
    from ..autoencoders import Operation
    from ..autoencoders.cost import Forecast

_COLUMNS = ("strategy", "parts", "share", "imbalance", "work", "limit", "calls", "messages", "MB", "all MB", "peak MiB")
_LEGEND = """\
share     input positions of the busiest rank, over those of the whole; imbalance: over the mean rank's
work      input positions of all ranks, over those of the whole: what is above 1 is computed more than once
limit     speed against `direct` if time goes with work and sending is free
calls     exchanges of rows with neighbours, on the rank that has most, as are messages and MB (10^6 bytes sent)
MB        halo + attention's keys and values + result, or a rank's sum of tiles; all MB: of all ranks together
peak MiB  tensors that exist at one time, on the rank that holds most; not in it: weights, what operators take while
          they run, what the allocator rounds up or keeps"""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One strategy for one operation.

    Attributes:
        strategy: Its name; ``auto`` too.
        status: ``runs``; ``refused`` by the family at start-up; ``falls back`` or ``fails`` with this request.
        reason: Why.
        forecast: What it costs, if it runs.
        panels: Who has which pixels, if it runs.
    """

    strategy: str
    status: str
    reason: str
    forecast: Forecast | None = None
    panels: tuple[Panel, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class OperationPlan:
    """One operation.

    Attributes:
        operation: Encode or decode.
        shape: Public input, ``(B, C, T, H, W)``, or ``(B, C, H, W)`` of a picture.
        result: What comes out, likewise.
        rows: One for each strategy; ``auto`` is the last.
        split: Whether it can be split by rank.
        exact_margin: The margin with which that is the un-tiled result; None: no margin is enough.
    """

    operation: Operation
    shape: tuple[int, ...]
    result: tuple[int, ...]
    rows: tuple[Row, ...]
    split: bool
    exact_margin: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What was asked, and the answer.

    Attributes:
        model: Checkpoint or family as it was named.
        autoencoder: The diffusers class.
        height, width: Pixels.
        frames: Frames.
        ranks: Ranks that share the work.
        dtype: Type of the autoencoder.
        weight_bytes: Its weights, which every rank holds.
        operations: One or two.
    """

    model: str
    autoencoder: str
    height: int
    width: int
    frames: int
    ranks: int
    dtype: str
    weight_bytes: int
    operations: tuple[OperationPlan, ...]

    def panels(self) -> list[Panel]:
        """Every division of the picture that occurs, once; the whole, if it is never divided."""
        found = dict.fromkeys(panel for plan in self.operations for row in plan.rows for panel in row.panels)
        whole = Panel("direct: all of it on one rank", ((0, self.height),), ((0, self.width),), (0,))
        return list(found) or [whole]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready values, for each strategy and rank."""
        return {
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "operations"},
            "operations": {
                plan.operation.value: {
                    "input": plan.shape,
                    "output": plan.result,
                    "exact_margin": plan.exact_margin,
                    "strategies": {row.strategy: _row_json(row) for row in plan.rows},
                }
                for plan in self.operations
            },
        }

    def to_text(self) -> str:
        """Tables, then the drawings."""
        return "\n\n".join(self._sections())

    def _sections(self) -> Iterator[str]:
        frames = "1 frame" if self.frames == 1 else f"{self.frames} frames"
        yield (
            f"{self.model}: {self.autoencoder}, {frames} of {self.height}x{self.width} on {self.ranks} "
            f"ranks, {self.dtype}; weights {self.weight_bytes / 2**20:.0f} MiB on each rank"
        )
        for plan in self.operations:
            shapes = " to ".join("x".join(map(str, shape)) for shape in (plan.shape, plan.result))
            yield f"{plan.operation}: {shapes}\n\n{_costs(plan.rows)}\n\n{_auto(plan)}{_exact(plan)}"
            yield f"{plan.operation}: share and peak MiB of each rank\n\n{_shares(plan.rows, self.ranks)}"
        yield _LEGEND
        yield from map(draw_text, self.panels())


def _auto(plan: OperationPlan) -> str:
    row = plan.rows[-1]
    if row.forecast is None:
        return f"auto: {row.status}: {row.reason}"
    return f"auto takes {str(row.forecast.decision).removeprefix(f'{plan.operation}: ')}"


def _exact(plan: OperationPlan) -> str:
    if not plan.split:
        return ""
    if plan.exact_margin is None:
        return "\nrank_split is approximate with any margin: the network looks at the whole map"
    return f"\nrank_split is approximate with a margin below {plan.exact_margin}, and un-tiled from there on"


def _costs(rows: Sequence[Row]) -> str:
    width = max(len(row.strategy) for row in rows)
    table = [cells(row.strategy.ljust(width), row.forecast) for row in rows if row.forecast]
    head, rule, *lines = align([_COLUMNS, *table])
    counted = iter(lines)
    told = (
        next(counted) if row.forecast else f"{row.strategy.ljust(width)}  {row.status}: {row.reason}" for row in rows
    )
    return "\n".join([head, rule, *told])


def cells(strategy: str, forecast: Forecast) -> tuple[str, ...]:
    """A row of the table of costs."""
    decision, cost, uses = forecast.decision, forecast.cost, forecast.uses
    parts = "whole"
    if decision.sharded:
        parts = f"{decision.rank_grid[0]}x{decision.rank_grid[1]} ranks"
    elif decision.tiles_per_rank:
        parts = f"{sum(decision.tiles_per_rank)} {'tiles' if decision.margin is None else 'pieces'}"
    halo, attention, result = (
        max(use.halo_bytes for use in uses),
        max(use.attention_bytes for use in uses),
        max(use.result_bytes + use.broadcast_bytes + use.reduced_bytes for use in uses),
    )
    return (
        strategy,
        parts,
        f"{cost.largest_share:.1%}",
        f"{cost.imbalance:.2f}",
        f"{cost.coverage:.2f}x",
        f"{cost.speed_up_limit:.1f}x",
        str(max(use.halo_calls for use in uses)),
        str(max(use.messages for use in uses)),
        f"{halo / 1e6:.1f} + {attention / 1e6:.1f} + {result / 1e6:.1f}",
        f"{(cost.bytes + cost.broadcast_bytes + cost.reduced_bytes) / 1e6:.1f}",
        f"{forecast.peak_bytes / 2**20:.0f}",
    )


def _shares(rows: Sequence[Row], ranks: int) -> str:
    table = [("strategy", *(f"rank {rank}" for rank in range(ranks)))]
    for row in rows:
        if row.forecast:
            pairs = zip(row.forecast.cost.ranks, row.forecast.uses, strict=True)
            whole = row.forecast.cost.whole
            shares = [f"{cost.work / whole:.1%} {use.peak_bytes / 2**20:5.0f}" for cost, use in pairs]
            table.append((row.strategy, *shares, *[""] * (ranks - len(shares))))
    return "\n".join(align(table))


def _row_json(row: Row) -> dict[str, Any]:
    told: dict[str, Any] = {"status": row.status, "reason": row.reason}
    if row.forecast is None:
        return told
    cost = row.forecast.cost
    ranks = [
        dataclasses.asdict(use) | {"collectives": dict(use.collectives)} | dataclasses.asdict(one)
        for use, one in zip(row.forecast.uses, cost.ranks, strict=True)
    ]
    return told | {
        "decision": row.forecast.decision.to_json(),
        "work": cost.work,
        "coverage": cost.coverage,
        "redundant_share": cost.redundant_share,
        "imbalance": cost.imbalance,
        "largest_share": cost.largest_share,
        "speed_up_limit": cost.speed_up_limit,
        "messages": cost.messages,
        "bytes": cost.bytes,
        "broadcast_bytes": cost.broadcast_bytes,
        "reduced_bytes": cost.reduced_bytes,
        "peak_bytes": row.forecast.peak_bytes,
        "ranks": ranks,
        "parts": [panel.to_json() for panel in row.panels],
    }
