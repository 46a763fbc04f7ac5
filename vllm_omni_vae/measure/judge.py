# SPDX-License-Identifier: Apache-2.0
"""Compare what ranks made with what one rank makes, and with what is promised."""

from __future__ import annotations

import torch

from ..autoencoders import Operation
from ..autoencoders.compare import judge
from ..config import VaeParallelMode, VaeTileMerge
from ..errors import GeometryError
from .arms import Arm, Kind
from .messages import Comparison, Difference
from .subject import Subject

_SAME = Difference(0.0, 0.0)


class Judge:
    """Holds the baselines of one operation, on the rank that has the results.

    Args:
        subject: What makes them.
        operation, x: What is run.
        exact: Whether shards are judged, which takes a run in float64.
    """

    def __init__(self, subject: Subject, operation: Operation, x: torch.Tensor, exact: bool):
        self._subject = subject
        self._operation = operation
        self._x = x
        self._judges_shards = exact
        self._untiled = x
        self._tiles = x
        self._exact: torch.Tensor | None = None

    def judge(self, arm: Arm, result: torch.Tensor) -> dict[Arm, Comparison]:
        """What is known now that ``arm`` gave ``result``; the two baselines come first, in their order.

        Raises:
            GeometryError: the result has another shape than that of one rank.
        """
        if arm.kind is Kind.UNTILED:
            self._untiled = result
            return {}
        if result.shape != self._untiled.shape:
            raise GeometryError(f"{arm.name} makes {tuple(result.shape)} where {tuple(self._untiled.shape)} is due")
        if arm.kind is Kind.SEQUENTIAL:
            self._tiles = result
            apart = _difference(result, self._untiled)
            return {Arm(Kind.UNTILED): Comparison(_SAME, apart), arm: Comparison(apart, _SAME)}
        to_untiled, to_tiles = _difference(result, self._untiled), _difference(result, self._tiles)
        if arm.margin is not None:
            same = self._subject.run_pieces(self._operation, self._x)
            error, limit = judge(result, same, self._run_exactly, sharded=False)
            return {arm: Comparison(to_untiled, to_tiles, "pieces", error, limit)}
        tile = arm.mode is VaeParallelMode.TILE
        if not (tile or self._judges_shards):
            return {arm: Comparison(to_untiled, to_tiles)}
        against, alone = ("tiles", self._tiles) if tile else ("untiled", self._untiled)
        summed = arm.merge is VaeTileMerge.SUM
        error, limit = judge(result, alone, self._run_exactly, sharded=not tile, summed=summed)
        return {arm: Comparison(to_untiled, to_tiles, against, error, limit)}

    def _run_exactly(self) -> torch.Tensor:
        if self._exact is None:
            self._exact = self._subject.run_exactly(self._operation, self._x)
        return self._exact


def _difference(one: torch.Tensor, other: torch.Tensor) -> Difference:
    apart = (one.double() - other.double()).abs()
    return Difference(float(apart.max()), float(apart.mean()))
