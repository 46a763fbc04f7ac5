# SPDX-License-Identifier: Apache-2.0
"""What all ranks together saw of one operation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from .arms import Arm
from .messages import Comparison, RankSeen, Work
from .statistics import Spread, slowest


@dataclasses.dataclass(frozen=True, slots=True)
class ArmResult:
    """One arm. Of tuples there is one item for each rank.

    Attributes:
        arm: Which.
        wall_s: Of the slowest rank of each repeat.
        cpu_s: Of the rank that computed most in each repeat.
        peak_bytes: Most bytes at one time, from the input on and without weights.
        input_bytes: Bytes of the input; 0 where it had nothing to do.
        messages, bytes: Point-to-point messages of one run, by their sender.
        broadcast_bytes: Bytes of results sent to all, by their sender.
        reduced_bytes: Bytes brought to sums over the ranks.
        collectives: Collectives of one run on the first rank, by name.
        decision: What the autoencoder decided, JSON-ready; None on one rank.
        comparison: How far from the baselines it is; None where what comes out has no meaning.
    """

    arm: Arm
    wall_s: Spread
    cpu_s: Spread
    peak_bytes: tuple[int, ...]
    input_bytes: tuple[int, ...]
    messages: tuple[int, ...]
    bytes: tuple[int, ...]
    broadcast_bytes: tuple[int, ...]
    reduced_bytes: tuple[int, ...]
    collectives: Mapping[str, int]
    decision: Mapping[str, Any] | None
    comparison: Comparison | None

    @property
    def incremental_peak_bytes(self) -> tuple[int, ...]:
        """Most bytes at one time beyond what is there before the run: weights and input."""
        return tuple(peak - given for peak, given in zip(self.peak_bytes, self.input_bytes, strict=True))

    def to_json(self, untiled: ArmResult) -> dict[str, Any]:
        """JSON-ready values, and the speed against ``untiled``."""
        told = dataclasses.asdict(self) | {
            "incremental_peak_bytes": self.incremental_peak_bytes,
            "speed": untiled.wall_s.median / self.wall_s.median,
        }
        del told["arm"]
        if self.comparison is not None:
            told["comparison"] = self.comparison.to_json()
        return told


@dataclasses.dataclass(frozen=True, slots=True)
class OperationResult:
    """One operation.

    Attributes:
        operation: ``encode`` or ``decode``.
        shape, made: Shapes of public input and output.
        arms: Un-tiled on one rank is the first, tiles on one rank the second.
        left_out: Why a mode was not run, by mode.
        auto: What ``auto`` takes.
    """

    operation: str
    shape: tuple[int, ...]
    made: tuple[int, ...]
    arms: tuple[ArmResult, ...]
    left_out: Mapping[str, str]
    auto: str

    @property
    def untiled(self) -> ArmResult:
        """The whole on one rank."""
        return self.arms[0]

    @property
    def broken(self) -> tuple[ArmResult, ...]:
        """Arms that do not keep what is promised."""
        return tuple(one for one in self.arms if one.comparison is not None and one.comparison.broken)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "input": self.shape,
            "output": self.made,
            "arms": {one.arm.name: one.to_json(self.untiled) for one in self.arms},
            "left_out": dict(self.left_out),
            "auto": self.auto,
        }


def gather_arms(work: Work, ranks: Sequence[RankSeen]) -> tuple[ArmResult, ...]:
    """Bring together what the ranks saw of ``work``.

    Args:
        work: One operation of a job.
        ranks: In rank order.
    """
    return tuple(_gather(arm, work.operation, ranks) for arm in work.arms)


def _gather(arm: Arm, operation: str, ranks: Sequence[RankSeen]) -> ArmResult:
    seen = [rank.arms[operation][arm.name] for rank in ranks]
    return ArmResult(
        arm,
        Spread.of(slowest([one.wall_s for one in seen])),
        Spread.of(slowest([one.cpu_s for one in seen])),
        tuple(one.peak_bytes for one in seen),
        tuple(one.input_bytes for one in seen),
        tuple(one.messages for one in seen),
        tuple(one.bytes for one in seen),
        tuple(one.broadcast_bytes for one in seen),
        tuple(one.reduced_bytes for one in seen),
        seen[0].collectives,
        seen[0].decision,
        seen[0].comparison,
    )
