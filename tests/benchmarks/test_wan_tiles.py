# SPDX-License-Identifier: Apache-2.0
"""The benchmark of tiles counts what it should and compares what it should; what it times is nobody's promise."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Twelve tiles of 4, 4, 2 by 4, 4, 4, 3 latents.
TINY = ("--size", "64x96", "--frames", "1", "--tile-size", "32x32", "--tile-stride", "24x24", "--warmup", "0")

pytestmark = pytest.mark.distributed


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.wan_tiles", *TINY, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)


def test_integers_and_equality_of_every_arm() -> None:
    done = run("--repeats", "1", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["plan"]["config"], found["plan"]["ranks"]) == ("small", 2)
    rows = {(row["operation"], row["arm"]): row for row in found["rows"]}
    for operation in ("encode", "decode"):
        whole, alone, shared = (
            rows[operation, arm] for arm in ("un-tiled, one rank", "tiles, one rank", "tiles, all ranks")
        )
        assert (whole["grid"], whole["tiles_per_rank"], whole["sent"]) == ([1, 1, 1], [1], 0)
        assert (alone["grid"], alone["tiles_per_rank"], alone["sent"]) == ([1, 3, 4], [12], 0)
        assert (shared["grid"], shared["tiles_per_rank"]) == ([1, 3, 4], [6, 6])
        assert shared["to_tiles"] == alone["to_tiles"] == whole["to_whole"] == 0.0
        assert shared["to_whole"] == alone["to_whole"] == whole["to_tiles"] > 0
        for row in (whole, alone, shared):
            assert 0 < row["p10"] <= row["seconds"] <= row["p90"]
    # The second rank's tiles are 74 latents, of 8 moments or of 8x8 pixels of three colours, in float32. All moments,
    # 8x12 of them, then go to the second rank.
    assert rows["encode", "tiles, all ranks"]["sent"] == (74 + 8 * 12) * 8 * 4
    assert rows["decode", "tiles, all ranks"]["sent"] == 74 * 8 * 8 * 3 * 4


def test_the_table() -> None:
    done = run("--repeats", "2", "--operation", "decode")
    assert done.returncode == 0, done.stderr
    head, _, columns, _, *lines = done.stdout.splitlines()
    assert head.startswith("small, 64x96 pixels, 1 frames; tiles of 32x32 every 24x24 pixels; 2 ranks")
    assert len(lines) == 3 and all(len(line) <= len(columns) for line in lines)
    words = lines[2].split()
    assert words[:7] == ["decode", "tiles,", "all", "ranks", "1x3x4", "6,", "6"]
    assert words[-2] == "0.0"


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["--size", "60x96"], 2, "makes multiples of 8 pixels"),
        (["--frames", "4"], 2, "makes 1 + 4k frames"),
        (["--size", "32x32"], 2, "not larger than one tile"),
        (["--tile-size", "wide"], 2, "'wide' is no extent"),
        (["--ranks", "1"], 2, "give at least 2"),
        (["--timeout", "0.2"], 1, "gave no answer within 0.2 s"),
        (["--tile-stride", "40x40"], 1, "tile stride 40 is larger than the tile size 32"),
    ],
)
def test_a_run_that_cannot_be_made_ends_with_the_reason(arguments: list[str], code: int, reason: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert reason in done.stderr
