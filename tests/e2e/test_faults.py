# SPDX-License-Identifier: Apache-2.0
"""The faults of ``benchmarks/faults.py``: with two and with three ranks the client sees what it should, and so on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults import FAULTS, Row, table

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [2, 3])
def test_after_every_fault_the_next_clip_is_right(ranks: int, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "faults.py"), "--ranks", str(ranks)]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "rows.json")], capture_output=True, text=True, timeout=580, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    rows = [Row(**row) for row in json.loads((tmp_path / "rows.json").read_text())]
    assert [(row.fault, row.ranks) for row in rows] == [(fault.name, ranks) for fault in FAULTS]
    for row, fault in zip(rows, FAULTS, strict=True):
        assert row.held and (row.left_out or row.seen == fault.expected)
        assert not row.left_out or fault.name == "disk full"
    assert done.stdout.strip() == table(rows)


def test_a_row_that_does_not_hold_says_what_should_have_been() -> None:
    row = Row("a fault", 2, "job failed, a_code", "job completed", 1.25, 2.0, held=False)
    assert table([row]).splitlines()[-1] == (
        "| a fault | 2 | **job completed**; it should be: job failed, a_code, then the right clip from 2 ranks "
        "| 1.2 | 2.0 |"
    )
