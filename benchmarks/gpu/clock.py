# SPDX-License-Identifier: Apache-2.0
"""The time that a run has, and what a step will probably take of it."""

from __future__ import annotations

import time


class OutOfTime(Exception):
    """A step was given up because the run's time was over."""


class Clock:
    """Counts down from ``budget`` seconds, and learns from steps that are done how long the next of their kind is.

    Args:
        budget: Seconds in all.
    """

    def __init__(self, budget: float):
        self.budget = budget
        self._begun = time.monotonic()
        self._longest: dict[str, float] = {}

    @property
    def spent(self) -> float:
        """Seconds since the begin."""
        return time.monotonic() - self._begun

    @property
    def left(self) -> float:
        """Seconds that remain; below 0 when the time is over."""
        return self.budget - self.spent

    def learn(self, kind: str, seconds: float) -> None:
        """A step of ``kind`` took so long."""
        self._longest[kind] = max(seconds, self._longest.get(kind, 0.0))

    def lacks(self, kind: str, guess: float, reserve: float = 0.0) -> str | None:
        """Why a step of ``kind`` must not begin, if so.

        Args:
            kind: What it has in common with steps before it, of which the longest counts.
            guess: Seconds that it takes where there was none.
            reserve: Seconds that steps of another kind after it need.
        """
        need = self._longest.get(kind, guess)
        if need <= self.left - reserve:
            return None
        kept = f", {reserve:.0f} s of which are kept for what follows" if reserve else ""
        return f"takes about {need:.0f} s, and {max(0.0, self.left):.0f} s of {self.budget:.0f} s are left{kept}"

    def check(self) -> None:
        """Give up the step that runs if the time is over.

        Raises:
            OutOfTime: it is.
        """
        if self.left <= 0:
            raise OutOfTime(f"the {self.budget:.0f} s of the run were over")
