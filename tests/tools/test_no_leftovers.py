# SPDX-License-Identifier: Apache-2.0
"""A process that outlives its command is found, named and ended, even when it detached itself."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="the check needs /proc")


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/no_leftovers.py", sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("code", [0, 3])
def test_the_command_s_exit_code_is_passed_on(code: int) -> None:
    done = run(f"raise SystemExit({code})")
    assert (done.returncode, done.stderr) == (code, "")


def test_a_process_that_ends_soon_after_is_no_fault() -> None:
    assert run("import subprocess; subprocess.Popen(['sleep', '0.5'], start_new_session=True)").returncode == 0


def test_a_detached_process_is_named_and_ended() -> None:
    start = "subprocess.Popen(['sleep', '601'], start_new_session=True, stdout=-3, stderr=-3)"
    done = run(f"import subprocess; print({start}.pid)")
    pid = done.stdout.strip()
    assert done.returncode == 1
    assert f"process {pid}: sleep 601" in done.stderr
    status = Path(f"/proc/{pid}/status")
    assert not status.exists() or "zombie" in status.read_text()
