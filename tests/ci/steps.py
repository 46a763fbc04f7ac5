# SPDX-License-Identifier: Apache-2.0
"""The steps of the Buildkite suites, as far as they run pytest: where, on how many cards, and which tests."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import yaml

SUITES = Path(__file__).resolve().parents[2] / ".buildkite"


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One step that runs pytest.

    Attributes:
        suite: The file it is in, below ``.buildkite``.
        label: Its name there.
        platform: What its agents are: ``cpu``, ``cuda`` or ``rocm``.
        hardware: Which GPU they have; empty on the CPU.
        cards: How many of them, by the agents' tag; None without it.
        arguments: What pytest is called with, for each of its calls.
    """

    suite: str
    label: str
    platform: str
    hardware: str
    cards: int | None
    arguments: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        return f"{self.suite}: {self.label}"


def read_steps(folder: Path = SUITES) -> list[Step]:
    """Every step below ``folder`` that runs pytest, in the order of the files' names."""
    steps = []
    for path in sorted(folder.rglob("*.yml")):
        for entry in yaml.safe_load(path.read_text())["steps"]:
            calls = tuple(call for command in _commands(entry) if (call := _pytest_arguments(command)) is not None)
            if calls:
                steps.append(_step(path.relative_to(folder).as_posix(), entry, calls))
    return steps


def uploaded(folder: Path = SUITES) -> set[str]:
    """The suites that ``pipeline.yml`` uploads."""
    steps = yaml.safe_load((folder / "pipeline.yml").read_text())["steps"]
    words = [word for entry in steps for command in _commands(entry) for word in shlex.split(command)]
    return {word.removeprefix(".buildkite/") for word in words if word.endswith(".yml")}


def _commands(entry: dict[str, Any]) -> list[str]:
    given = entry.get("commands", entry.get("command", []))
    return [given] if isinstance(given, str) else list(given)


def _pytest_arguments(command: str) -> tuple[str, ...] | None:
    words = shlex.split(command)
    return tuple(words[words.index("pytest") + 1 :]) if "pytest" in words else None


def _step(suite: str, entry: dict[str, Any], calls: tuple[tuple[str, ...], ...]) -> Step:
    agents = entry["agents"]
    platform, _, hardware = agents["queue"].partition("-")
    cards = agents.get("cards")
    return Step(suite, entry["label"], platform, hardware.upper(), None if cards is None else int(cards), calls)
