# SPDX-License-Identifier: Apache-2.0
"""A short run of ``benchmarks/soak.py``: no job is lost, no byte is wrong, no file is left."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.soak import KINDS, table

ROOT = Path(__file__).resolve().parents[2]
JOBS = 24

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_nothing_is_lost(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "soak.py"), "--jobs", str(JOBS), "--concurrency", "8"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, timeout=110, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    found = json.loads(out.read_text())
    assert done.stdout.strip() == table(found)
    assert set(found["done"]) == set(KINDS) and sum(found["done"].values()) == JOBS
    assert found["broken"] == dict.fromkeys(found["broken"], 0)
    assert len(found["broken"]) == 7
    assert found["refused"] > 0  # eight clients at once, and room for four to wait
    assert found["health_ms"]["samples"] > 10
    assert set(found["rss_mib"]) == {"server", "rank 0", "rank 1"}
