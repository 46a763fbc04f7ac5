# SPDX-License-Identifier: Apache-2.0
"""What a run has found so far, as one file that is whole after every step."""

from __future__ import annotations

import dataclasses
import json
import os
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from .clock import Clock
from .tables import markdown

SCHEMA = 1


class Status(StrEnum):
    """How a step ended."""

    DONE = "done"
    BROKEN = "broken"
    FAILED = "failed"
    TOO_LARGE = "too_large"
    LEFT_OUT = "left_out"


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One step.

    Attributes:
        kind: ``verify``, ``bench``, ``serve`` or ``tests``.
        name: What it is about.
        status: ``broken``: something promised is not so. ``failed``: nothing can be said. ``too_large``: it does not
            fit into the memory, and was run again in another size. ``left_out``: it was not begun, or given up.
        reason: Why it did not end well, or what is missing.
        seconds: How long it took.
        result: Every figure, JSON-ready.
    """

    kind: str
    name: str
    status: Status
    reason: str = ""
    seconds: float = 0.0
    result: dict[str, Any] = dataclasses.field(default_factory=dict)


class Results:
    """The files ``results.json`` and ``results.md`` of one folder.

    Args:
        folder: Made where it is not there.
        clock: The run's.
        machine: What `describe_machine` says.
        asked: Flags of the run.
    """

    def __init__(self, folder: Path, clock: Clock, machine: dict[str, Any], asked: dict[str, Any]):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._clock = clock
        self._head = {"schema": SCHEMA, "begun": _now(), "asked": asked, "machine": machine}
        self.steps: list[Step] = []
        self._write(complete=False)

    def add(self, step: Step) -> None:
        """Keep ``step``; it is in the files when this returns."""
        self.steps.append(step)
        print(f"[{self._clock.spent:5.0f} s] {step.status:9} {step.kind}: {step.name}  {step.reason}", flush=True)
        self._write(complete=False)

    def finish(self) -> None:
        """Nothing more comes."""
        self._write(complete=True)

    def having(self, status: Status) -> list[Step]:
        """Steps that ended so."""
        return [step for step in self.steps if step.status is status]

    def _write(self, *, complete: bool) -> None:
        told = self._head | {
            "complete": complete,
            "written": _now(),
            "spent_s": round(self._clock.spent, 1),
            **{status.value: [step.name for step in self.having(status)] for status in (Status.BROKEN, Status.FAILED)},
            "steps": [dataclasses.asdict(step) for step in self.steps],
        }
        _replace(self._folder / "results.json", json.dumps(told, indent=1) + "\n")
        _replace(self._folder / "results.md", markdown(told))


def _replace(path: Path, text: str) -> None:
    """Whoever reads ``path`` finds the text before or the one after, also when this process is killed."""
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(text)
    os.replace(part, path)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
