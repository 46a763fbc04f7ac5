# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni-vae bench`: its integers are those of the plan; what it times is nobody's promise."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.engine.processes import children, is_running, until
from vllm_omni_vae import tiny
from vllm_omni_vae.autoencoders import FAMILIES, Operation
from vllm_omni_vae.autoencoders.cost import Forecaster
from vllm_omni_vae.cli import blank
from vllm_omni_vae.cli.main import main
from vllm_omni_vae.config import IN_TILES, TileExtent, VaeParallelMode, VaeSplits, VaeTileMerge

pytestmark = pytest.mark.distributed

SIZE = ("--height", "48", "--width", "64", "--frames", "5", "--ranks", "2")
TILES = ("--tile-size", "32x32", "--tile-stride", "24x24")
FEW = ("--warmup", "0", "--repeats", "2")
BASELINES = ["direct", "sequential_tiles"]
SHARDS = ["spatial_shard_height", "spatial_shard_width"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.build("wan2.1-t2v", tmp_path_factory.mktemp("wan")))


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = children()
    yield
    assert not children() - before


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        raise AssertionError("processes were started")

    monkeypatch.setattr("vllm_omni_vae.measure.processes.Ranks._start", start)


def _forecasters(model: str, chunk: int | None = None) -> dict[str, Forecaster]:
    found = blank.find_autoencoders(model)[0]
    vae = blank.make_blank(found.config, "float32", 2, TileExtent(32, 32), TileExtent(24, 24))
    shapes = {op: blank.public_shapes(vae, op, (5, 48, 64))[0] for op in Operation}
    return {op.value: Forecaster(vae, op, shape, chunk) for op, shape in shapes.items()}


def _exit(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[Any, str]:
    with pytest.raises(SystemExit) as end:
        main(words)
    return end.value.code, capsys.readouterr().err


def test_what_is_counted_is_what_the_plan_says(capsys: pytest.CaptureFixture[str], checkpoint: str) -> None:
    ways = ("--tile-merge", "blend", "sum", "--split-margin", "1")
    main(["bench", checkpoint, *SIZE, *TILES, *FEW, "--chunk", "1", *ways, "--json"])
    out, err = capsys.readouterr()
    assert err == ""  # progress is for terminals
    found = json.loads(out)
    about = {
        **{"model": checkpoint, "path": "vae", "autoencoder": "AutoencoderKLWan", "frames": 5, "height": 48},
        **{"width": 64, "ranks": 2, "dtype": "float32", "device": "cpu", "backend": "gloo", "threads": 1},
        **{"warmup": 0, "repeats": 2},
    }
    forecasters = _forecasters(checkpoint, chunk=1)
    weights = found.pop("weight_bytes")
    assert weights == sum(tensor.nbytes for tensor in forecasters["decode"].vae.state_dict().values()) > 0
    assert {name: value for name, value in found.items() if name != "operations"} == about
    for name, operation in found["operations"].items():
        forecaster = forecasters[name]
        assert operation["input"] == list(forecaster.shape)
        assert operation["left_out"] == {"spatial_shard_grid": "the same as spatial_shard_width on 2 ranks"}
        assert operation["auto"].startswith("auto takes spatial_shard_width on 1x2 ranks")
        arms = operation["arms"]
        shared = ["tile", "tile/sum", *SHARDS, "rank_split/1"]
        assert list(arms) == [
            *BASELINES,
            "tile",
            "tile/sum",
            *(f"{shard}{end}" for shard in SHARDS for end in ("", "/no_messages")),
            "rank_split/1",
        ]
        for mode in shared:
            merge = VaeTileMerge.SUM if mode == "tile/sum" else VaeTileMerge.BLEND
            splits, meant = IN_TILES, mode.removesuffix("/sum")
            if mode == "rank_split/1":
                splits, meant = VaeSplits(1, 1), "tile"
            forecast = forecaster.forecast(VaeParallelMode(meant), 2, merge, splits)
            arm = arms[mode]
            assert arm["decision"] == json.loads(json.dumps(forecast.decision.to_json()))
            assert arm["messages"] == [use.messages for use in forecast.uses]
            assert arm["bytes"] == [use.bytes for use in forecast.uses]
            assert arm["broadcast_bytes"] == [use.broadcast_bytes for use in forecast.uses]
            assert arm["reduced_bytes"] == [use.reduced_bytes for use in forecast.uses]
            given = math.prod(forecaster.shape) * 4
            assert arm["incremental_peak_bytes"] == [peak - given for peak in arm["peak_bytes"]]
            assert arm["collectives"] == dict(forecast.uses[0].collectives)
            judged = (None, None) if mode in SHARDS else ("tiles", "holds")
            if mode == "rank_split/1":
                judged = ("pieces", "holds")
                assert (arm["comparison"]["error"], arm["comparison"]["limit"]) == (0.0, 0.0)
                assert min(arm["comparison"][to]["max"] for to in ("to_untiled", "to_tiles")) > 0
            assert (arm["comparison"]["against"], arm["comparison"]["promise"]) == judged
            assert mode not in SHARDS or arm["comparison"]["to_untiled"]["max"] < 1e-4
        assert sum(arms["tile"]["decision"]["tiles_per_rank"]) == 6
        assert arms["tile"]["comparison"]["to_tiles"] == {"max": 0.0, "mean": 0.0}
        assert arms["tile"]["comparison"]["to_untiled"] == arms["sequential_tiles"]["comparison"]["to_untiled"]
        assert arms["tile"]["comparison"]["to_untiled"]["max"] > 0
        assert arms["tile/sum"]["decision"]["merge"] == "sum"
        assert arms["tile/sum"]["comparison"]["limit"] == 8 * 2**-23
        summed = forecaster.forecast(VaeParallelMode.TILE, 2, VaeTileMerge.SUM)
        for peak, use in zip(arms["tile/sum"]["peak_bytes"], summed.uses, strict=True):
            assert 0 <= peak - use.peak_bytes < 1024, "gloo may hold on to the integers of the last agreement"
        assert arms["direct"]["peak_bytes"] == [forecaster.direct().peak_bytes, 0]
        assert arms["direct"]["peak_bytes"][0] > arms["sequential_tiles"]["peak_bytes"][0]
        for arm in (name for name in arms if name not in shared):
            assert not any(arms[arm]["messages"] + arms[arm]["bytes"] + arms[arm]["broadcast_bytes"])
            assert (arms[arm]["collectives"], arms[arm]["comparison"] is None) == ({}, arm.endswith("/no_messages"))
        for arm in arms.values():
            for unit in ("wall_s", "cpu_s"):
                assert 0 < arm[unit]["p10"] <= arm[unit]["median"] <= arm[unit]["p90"]


def test_tables_bars_and_a_picture(capsys: pytest.CaptureFixture[str], checkpoint: str, tmp_path: Path) -> None:
    file = tmp_path / "bench.png"
    words = ("--operation", "decode", "--modes", "tile", "spatial_shard_height", "--png", str(file))
    main(["bench", checkpoint, *SIZE, *TILES, *FEW, *words])
    head, about, table, memory, peaks, bars, legend = (
        part for part in capsys.readouterr().out.split("\n\n") if not part.startswith("encode")
    )
    assert head == (
        f"{checkpoint}: AutoencoderKLWan, 5 frames of 48x64 on 2 ranks of 1 thread each (cpu, gloo), float32\n"
        "2 repeats after 0 of warm-up"
    )
    assert about.startswith("decode: 1x4x2x6x8 to 1x3x5x48x64; auto takes ")
    titles = ["un-tiled, one rank", "tiles, one rank", "tile", "spatial_shard_height", "  without messages"]
    rows = table.splitlines()
    assert rows[0].split("  ")[-1] == "max diff to un-tiled"
    assert [row[: len("spatial_shard_height")].rstrip() for row in rows[2:]] == titles
    assert memory.startswith("decode: MiB of each rank at its peak, ")
    assert [row[: len("spatial_shard_height")].rstrip() for row in peaks.splitlines()[2:]] == titles
    assert len(peaks.splitlines()[2].split("  ")) < len(peaks.splitlines()[4].split("  ")), "one rank, and both"
    assert [line[: len("spatial_shard_height")].rstrip() for line in bars.splitlines()[1:]] == titles
    use = _forecasters(checkpoint)["decode"].forecast(VaeParallelMode.SPATIAL_SHARD_HEIGHT, 2).uses
    assert f" {sum(one.messages for one in use)}  {sum(one.bytes for one in use) / 1e6:.2f}  " in rows[5]
    assert legend.startswith("s  ")
    with Image.open(file) as image:
        assert image.format == "PNG"


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ranks", "1"), "--ranks is 1; one rank has nobody to share with"),
        (("--height", "0"), "--height is 0; it must be at least 1"),
        (("--frames", "6"), "would ignore the rest of 6; give 5 or 9"),
        (("--height", "50", "--operation", "decode"), "next to that is 5 frames of 48x64"),
        (("--tile-size", "16x16"), "larger than the tile size"),
        (("--tile-size", "wide"), "'wide' is no tile extent"),
        (("--tile-size", "512x512", "--tile-stride", "512x512"), "nothing of this encode would be shared: tile: falls"),
        (("--ranks", "9", "--modes", "spatial_shard_width"), "latents cannot give each of 9 ranks a row or column"),
        (("--modes", "fast"), "invalid choice: 'fast'"),
        (("--repeats", "0"), "--repeats is 0; it must be at least 1"),
        (("--warmup", "-1"), "--warmup is -1; it must be at least 0"),
        (("--chunk", "0"), "--chunk is 0; it must be at least 1"),
        (("--timeout", "0"), "--timeout is 0; give a number of seconds above 0"),
        (("--png", "/no/such/folder/bench.png"), "cannot write /no/such/folder/bench.png"),
    ],
)
def test_bad_input_is_refused_before_any_process_starts(
    capsys: pytest.CaptureFixture[str], checkpoint: str, words: tuple[str, ...], message: str
) -> None:
    code, said = _exit(capsys, "bench", checkpoint, *SIZE, *TILES, *words)
    assert code == 2
    assert message in said


@pytest.mark.usefixtures("nothing_starts")
def test_a_model_or_mode_that_cannot_be_is_refused(
    capsys: pytest.CaptureFixture[str], checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "name one of the families" in _exit(capsys, "bench", str(tmp_path), *SIZE)[1]
    (tmp_path / "model_index.json").write_text('{"_class_name": "P", "vae": ["diffusers", "AutoencoderOobleck"]}')
    assert "has no autoencoder that can be shared" in _exit(capsys, "bench", str(tmp_path), *SIZE)[1]
    spec = next(family.spec for family in FAMILIES if family.spec.name == "AutoencoderKLWan")
    monkeypatch.setattr(type(spec), "modes", frozenset({VaeParallelMode.TILE}))
    code, said = _exit(capsys, "bench", checkpoint, *SIZE, *TILES, "--modes", "spatial_shard_width")
    assert (code, "cannot run vae_parallel_mode spatial_shard_width; it has tile" in said) == (2, True)


def test_a_rank_that_fails_ends_the_command_with_its_words(
    capsys: pytest.CaptureFixture[str], checkpoint: str, tmp_path: Path
) -> None:
    without = shutil.copytree(checkpoint, tmp_path / "wan", ignore=shutil.ignore_patterns("*.safetensors"))
    code, said = _exit(capsys, "bench", str(without), *SIZE, *TILES)
    assert code == 1
    assert re.match("error: rank [01] failed: OSError: ", said)
    assert "no file named diffusion_pytorch_model" in said


def test_ranks_that_stall_are_given_up(capsys: pytest.CaptureFixture[str], checkpoint: str) -> None:
    code, said = _exit(capsys, "bench", checkpoint, *SIZE, *TILES, "--timeout", "0.3")
    assert (code, said) == (1, "error: ranks [0, 1] gave no sign for 0.3 s\n")


def _ranks_of(pid: int) -> set[int]:
    pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    found = set()
    for one in pids:
        try:
            parent = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[1]
            words = Path(f"/proc/{one}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent == str(pid) and b"vllm_omni_vae.measure" in words:
            found.add(one)
    return found


@pytest.mark.parametrize(
    ("hit", "sign"),
    [
        ("a rank", signal.SIGKILL),
        ("the command", signal.SIGINT),
        ("the command", signal.SIGKILL),
    ],
)
def test_no_rank_outlives_another_or_the_command(checkpoint: str, hit: str, sign: signal.Signals) -> None:
    words = ["bench", checkpoint, *SIZE, *TILES, "--repeats", "100000"]
    command = subprocess.Popen(
        [sys.executable, "-m", "vllm_omni_vae.cli.main", *words], stderr=subprocess.PIPE, text=True
    )
    ranks: set[int] = set()

    def all_there() -> bool:
        ranks.update(_ranks_of(command.pid))
        assert command.poll() is None
        return len(ranks) == 2

    try:
        until(all_there, 60.0)
        os.kill(max(ranks) if hit == "a rank" else command.pid, sign)
        _, said = command.communicate(timeout=60)
    finally:
        command.kill()
        command.wait()
    until(lambda: not any(map(is_running, ranks)))
    if hit == "a rank":
        assert (command.returncode, "died by signal 9" in said) == (1, True)
    elif sign is signal.SIGINT:
        assert (command.returncode, said) == (130, "")
    else:
        assert command.returncode == -signal.SIGKILL
