# SPDX-License-Identifier: Apache-2.0
"""The run for machines with accelerators, here on processes and narrow VAEs: what it writes, and how it ends."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.clock import Clock, OutOfTime
from benchmarks.gpu.families import SIZES, config_of, families
from benchmarks.gpu.machine import describe_machine
from benchmarks.gpu.results import Results, Status, Step
from benchmarks.gpu.run import HIDDEN, main
from benchmarks.gpu.vae import Case
from tests.helpers.broken_halo import ENVIRONMENT
from vllm_omni_vae.cli.full_size import FULL_SIZE

ROOT = Path(__file__).resolve().parents[2]


def _run(out: Path, *words: str, environment: Mapping[str, str] | None = None) -> tuple[int, Any, str]:
    """Exit code, results and page of one run on the CPU."""
    command = [sys.executable, "benchmarks/gpu/run.py", "--device", "cpu", "--out", str(out), *words]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | dict(environment or {}), capture_output=True, text=True)
    assert (out / "results.json").is_file(), done.stderr
    assert sorted(path.name for path in out.iterdir()) == ["results.json", "results.md"]
    return done.returncode, json.loads((out / "results.json").read_text()), (out / "results.md").read_text()


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_family_keeps_its_promises(tmp_path: Path) -> None:
    code, told, page = _run(tmp_path / "results", "--steps", "verify", "--budget", "280")
    assert (code, told["schema"], told["complete"], told["broken"], told["failed"]) == (0, 1, True, [], [])
    assert told["machine"]["platform"] == "cpu" and told["machine"]["cards"] == []
    assert [(step["kind"], step["status"]) for step in told["steps"]] == [("verify", "done")] * len(families())
    assert [step["result"]["family"] for step in told["steps"]] == list(families())
    for step in told["steps"]:
        made = step["result"]
        assert (made["weights"], made["dtype"], made["ranks"], made["backend"]) == ("narrow", "float32", 2, "gloo")
        assert list(made["operations"]) == ["encode", "decode"]
        for operation in made["operations"].values():
            arms = operation["arms"]
            assert {"tile", "tile/sum", "spatial_shard_height", "spatial_shard_width"} < set(arms)
            assert (arms["tile"]["comparison"]["error"], arms["tile"]["comparison"]["limit"]) == (0.0, 0.0)
            shared = [arm["comparison"] for arm in arms.values() if arm["decision"] is not None]
            assert {one["promise"] for one in shared if one["against"] is not None} == {"holds"}
        assert f"| {made['family']} | narrow | float32 | 2 | gloo | decode | tile | 0 | 0 | holds |" in page


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_times_and_a_clip_over_http(tmp_path: Path) -> None:
    code, told, page = _run(
        tmp_path / "results", "--steps", "bench", "serve", "--families", "flux.1", "--budget", "280"
    )
    assert (code, [(step["kind"], step["status"]) for step in told["steps"]]) == (
        0,
        [("serve", "done"), ("bench", "done")],
    )
    served, timed = (step["result"] for step in told["steps"])
    assert (served["max_difference"], served["exit_codes"], served["left_processes"]) == (0, [0, 0], 0)
    assert [(one["operation"], one["strategy"]) for one in served["vae"]] == [("decode", "tile")]
    arms = timed["operations"]["decode"]["arms"]
    assert list(arms)[:2] == ["direct", "sequential_tiles"]
    assert {"tile", "spatial_shard_width", "spatial_shard_width/no_messages"} < set(arms)
    assert timed["warmup"] == 1 and timed["repeats"] == 2
    assert sum(arms["spatial_shard_width"]["messages"]) > 0 == sum(arms["spatial_shard_width/no_messages"]["messages"])
    assert "## Time and memory" in page and "## Over HTTP" in page


@pytest.mark.distributed
def test_a_broken_promise_ends_with_code_1(tmp_path: Path) -> None:
    words = ("--steps", "verify", "--families", "sdxl", "--budget", "100")
    code, told, page = _run(tmp_path / "results", *words, environment=ENVIRONMENT)
    assert (code, told["broken"], told["complete"]) == (1, ["sdxl (narrow), float32, 2 ranks"], True)
    shards = {f"{way} spatial_shard_{axis}" for way in ("encode", "decode") for axis in ("height", "width")}
    assert set(told["steps"][0]["result"]["broken"]) == shards
    assert "## Not well, or not run" in page


@pytest.mark.distributed
def test_what_there_is_no_time_for_is_named(tmp_path: Path) -> None:
    code, told, _ = _run(tmp_path / "results", "--budget", "1")
    assert (code, told["complete"], told["asked"]["budget"]) == (0, True, 1.0)
    kinds = ["verify"] * len(families()) + ["serve"] + ["bench"] * len(families()) + ["tests"]
    assert [(step["kind"], step["status"]) for step in told["steps"]] == [(kind, "left_out") for kind in kinds]
    assert "s of 1 s are left" in told["steps"][0]["reason"]
    assert told["steps"][-1]["reason"] == "there is no card"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "there is no accelerator that torch can use; --device cpu runs"),
        (("--device", "cpu", "--families", "sdxl", "vae"), "--families vae is not known; choose from flux.1, flux.2, "),
        (("--device", "cpu", "--ranks", "2", "1"), "--ranks 1: one rank has nobody to share with"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_written(
    words: tuple[str, ...],
    why: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in HIDDEN:
        monkeypatch.setenv(name, "")
    assert main(["--out", str(tmp_path / "results"), *words]) == 2
    assert capsys.readouterr().err.startswith(f"error: {why}")
    assert not (tmp_path / "results").exists()


def test_a_run_that_is_killed_leaves_what_it_had(tmp_path: Path) -> None:
    results = Results(tmp_path, Clock(9.0), describe_machine(), {"budget": 9.0})
    results.add(Step("bench", "sdxl", Status.LEFT_OUT, "no | time"))
    told, page = json.loads((tmp_path / "results.json").read_text()), (tmp_path / "results.md").read_text()
    assert (told["complete"], [step["name"] for step in told["steps"]]) == (False, ["sdxl"])
    assert "The run is cut off" in page and "| bench: sdxl | left_out | no / time |" in page


def test_a_clock_learns_how_long_steps_are() -> None:
    clock = Clock(100.0)
    assert clock.lacks("verify", 90.0) is None
    assert clock.lacks("verify", 90.0, reserve=20.0) is not None
    clock.learn("verify", 5.0)
    clock.learn("verify", 4.0)
    assert clock.lacks("verify", 1000.0) is None
    assert clock.lacks("bench", 1000.0) is not None
    clock.check()
    with pytest.raises(OutOfTime, match="0 s of the run"):
        Clock(0.0).check()


def test_every_named_family_has_a_size_and_a_narrow_twin() -> None:
    assert set(SIZES) == set(families())
    configs = [FULL_SIZE[name] for name in families()]
    assert all(config in configs for config in FULL_SIZE.values())


@pytest.mark.parametrize("family", families())
def test_what_is_timed_in_full_size_is_shared_in_every_way(family: str) -> None:
    request = Case("bench", family, "bfloat16", 2, False, 5).request()
    assert request.found.config == config_of(family, narrow=False)
    for work in request.job.works:
        names = {arm.name for arm in work.arms}
        assert {"tile", "tile/sum", "spatial_shard_height", "spatial_shard_width"} < names
        assert set(request.left_out[work.operation]) <= {"spatial_shard_grid"}
