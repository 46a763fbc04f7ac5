# SPDX-License-Identifier: Apache-2.0
"""The step ``tests``: those of the project's tests that ask for this hardware."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .clock import Clock
from .results import Status, Step

ROOT = Path(__file__).resolve().parents[2]
_GUESS = 120.0
_NONE_SELECTED = 5
_CARDS = (1, 2, 4, 8)


def run_tests(machine: dict[str, Any], clock: Clock) -> Step:
    """Run the tests with the marks of this platform and of as many cards as there are, or fewer."""
    cards = len(machine["cards"])
    counts = " or ".join(f"cards_{count}" for count in _CARDS if count <= cards)
    selection = f"{machine['platform']} and ({counts})"
    lack = clock.lacks("tests", _GUESS) if cards else "there is no card"
    if lack:
        return Step("tests", selection if cards else "pytest", Status.LEFT_OUT, lack)
    begun = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "tests/helpers", "tests/e2e", "-m", selection]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=max(1.0, clock.left))
    except subprocess.TimeoutExpired:
        return Step("tests", selection, Status.LEFT_OUT, "given up: the time was over", time.monotonic() - begun)
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    result = {"selection": selection, "exit_code": done.returncode, "summary": lines[-1], "failed": failed}
    well = done.returncode in (0, _NONE_SELECTED)
    status, reason = (Status.DONE, "") if well else (Status.FAILED, "; ".join(failed) or "\n".join(lines[-20:]))
    return Step("tests", selection, status, reason, time.monotonic() - begun, result)
