# SPDX-License-Identifier: Apache-2.0
"""Median and percentiles of repeated measurements."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """The middle of some values, and between which of them four fifths lie.

    Attributes:
        median, p10, p90: Interpolated between values, as `statistics.quantiles` does with the method ``inclusive``.
    """

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        tenths = statistics.quantiles(values, n=10, method="inclusive")
        return cls(statistics.median(values), tenths[0], tenths[-1])


def slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """The largest value of any rank, for each repeat.

    Args:
        ranks: For each rank its values, one for each repeat.
    """
    return [max(repeat) for repeat in zip(*ranks, strict=True)]
