# SPDX-License-Identifier: Apache-2.0
"""Which tests pytest itself selects for a call, and what is wrong between the steps and the tests.

Run as a program it reads a JSON list of calls (lists of pytest's arguments) and prints, for each, the tests' names with
their marks.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.ci.steps import Step
from tests.helpers.mark import CARDS, HARDWARE

ROOT = Path(__file__).resolve().parents[2]
ACCELERATORS = tuple(platform for platform in HARDWARE if platform != "cpu")

Selected = Mapping[str, frozenset[str]]
"""Names of tests, each with all its marks."""


class _Recorder:
    def __init__(self) -> None:
        self.selected: dict[str, list[str]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.selected = {item.nodeid: sorted({m.name for m in item.iter_markers()}) for item in session.items}


def collect(calls: Sequence[Sequence[str]], folder: Path = ROOT) -> list[Selected]:
    """Ask pytest, in one process of its own, what each call would run in ``folder``.

    Raises:
        AssertionError: pytest could not collect, with what it said.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.ci.selection"],
        input=json.dumps([str(folder), [list(call) for call in calls]]),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return [{name: frozenset(marks) for name, marks in answer.items()} for answer in json.loads(done.stdout)]


def faults(steps: Iterable[Step], selected: Sequence[Sequence[Selected]], everything: Selected) -> list[str]:
    """What is wrong, each with the names it concerns; empty when all is well.

    Args:
        steps: The suites' steps.
        selected: For each step, what each of its calls selects.
        everything: All tests.
    """
    found = []
    reached: set[str] = set()
    for step, answers in zip(steps, selected, strict=True):
        for arguments, tests in zip(step.arguments, answers, strict=True):
            if not tests:
                found.append(f"{step}: selects no test: pytest {' '.join(arguments)}")
            for name, marks in tests.items():
                found += [f"{step}: {name} {why}" for why in _contradictions(step, marks)]
                reached.add(name)
    return found + [f"no step selects {name}" for name in sorted(set(needing_a_step(everything)) - reached)]


def needing_a_step(tests: Selected) -> list[str]:
    """Those that some step must select: every end-to-end test and every test with a mark of an accelerator."""
    return [name for name, marks in tests.items() if "e2e" in marks or marks & set(ACCELERATORS)]


def _contradictions(step: Step, marks: frozenset[str]) -> Iterable[str]:
    platforms = marks & set(HARDWARE)
    if step.platform not in platforms and (platforms or step.platform != "cpu"):
        yield f"is for {' or '.join(sorted(platforms)) or 'no platform'}, not for {step.platform}"
        return
    kinds = marks & set(HARDWARE[step.platform])
    if kinds and step.hardware not in kinds:
        yield f"needs {' or '.join(sorted(kinds))}, not {step.hardware or 'any GPU'}"
    cards = next((n for n in CARDS if f"cards_{n}" in marks), None)
    if step.platform != "cpu" and cards != step.cards:
        yield f"needs {cards} cards, its step has {step.cards}"


def _main() -> None:
    folder, calls = json.load(sys.stdin)
    answers = []
    for call in calls:
        recorder, said = _Recorder(), io.StringIO()
        options = [
            "--rootdir",
            folder,
            "-c",
            str(ROOT / "pyproject.toml"),
            "--collect-only",
            "-q",
            "-p",
            "no:cacheprovider",
        ]
        with contextlib.redirect_stdout(said), contextlib.chdir(folder):
            code = pytest.main([*options, *call], plugins=[recorder])
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            sys.exit(f"pytest {' '.join(call)} ended with {code}:\n{said.getvalue()}")
        answers.append(recorder.selected)
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    _main()
