# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni-vae verify`: what it compares, how it ends, and that it finds a halo that is missing."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.processes import children
from tests.helpers.broken_halo import ENVIRONMENT
from tests.helpers.vaes import tiny_vae
from vllm_omni_vae import tiny
from vllm_omni_vae.cli import verify
from vllm_omni_vae.cli.main import main
from vllm_omni_vae.cli.measuring import Request

pytestmark = pytest.mark.distributed

ONCE = ("--warmup", "0", "--repeats", "1")
TWO = ("--vae-patch-parallel-size", "2")
SHARDS = ["spatial_shard_height", "spatial_shard_width"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint that names a second autoencoder, of an unknown family."""
    folder = tiny.build("wan2.2-i2v", tmp_path_factory.mktemp("wan"))
    _name(folder, "audio_vae", "AutoencoderOobleck")
    return folder


def _name(folder: Path, component: str, kind: str) -> None:
    file = folder / "model_index.json"
    index = json.loads(file.read_text()) if file.is_file() else {"_class_name": "P"}
    file.write_text(json.dumps(index | {component: ["diffusers", kind]}))


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = children()
    yield
    assert not children() - before


def _json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    main([*words, "--json"])
    return json.loads(capsys.readouterr().out)


def test_every_promise_of_a_checkpoint(capsys: pytest.CaptureFixture[str], checkpoint: Path) -> None:
    found = _json(capsys, "verify", str(checkpoint), *TWO, *ONCE)
    assert (found["model"], found["broken"]) == (str(checkpoint), [])
    off = {"kind": "AutoencoderOobleck", "parallel": False, "detail": "no distributed class for AutoencoderOobleck"}
    assert found["components"] == [
        {"path": "vae", "kind": "AutoencoderKLWan", "parallel": True, "detail": "on 2 ranks"},
        {"path": "audio_vae"} | off,
    ]
    (one,) = found["autoencoders"]
    assert (one["frames"], one["height"], one["width"]) == (9, 13 * 8, 17 * 8)
    for operation in one["operations"].values():
        arms = operation["arms"]
        assert list(arms) == ["direct", "sequential_tiles", "tile", *SHARDS, "rank_split/2"]
        split = arms["rank_split/2"]["comparison"]
        assert (split["against"], split["promise"], split["error"], split["limit"]) == ("pieces", "holds", 0.0, 0.0)
        assert min(split["to_untiled"]["max"], split["to_tiles"]["max"]) > 1e-4
        assert arms["rank_split/2"]["decision"]["grid"] == [1, 1, 2]
        assert arms["tile"]["decision"]["grid"] == [1, 3, 4]
        told = {name: arms[name]["comparison"] for name in ("tile", *SHARDS)}
        assert {(name, told[name]["against"], told[name]["promise"]) for name in told} == {
            ("tile", "tiles", "holds"),
            *((shard, "untiled", "holds") for shard in SHARDS),
        }
        assert (told["tile"]["error"], told["tile"]["limit"]) == (0.0, 0.0)
        for shard in SHARDS:
            assert arms[shard]["decision"]["strategy"] == shard
            assert told[shard]["to_untiled"]["max"] < 1e-4 < told[shard]["to_tiles"]["max"]
            assert all(0 < peak < arms["direct"]["peak_bytes"][0] * 2 for peak in arms[shard]["peak_bytes"])


def test_the_table_and_float64(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tiny.build("wan2.2-ti2v-5b", tmp_path / "wan")
    words = ("--height", "96", "--width", "128", "--frames", "5", "--tile-size", "64x64", "--tile-stride", "48x48")
    main(["verify", str(folder), *TWO, *ONCE, *words, "--dtype", "float64"])
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[4].split() == ["vae", "AutoencoderKLWan", "on", "on", "2", "ranks"]
    assert lines[-1] == "every promise is kept"
    assert "decode: 1x4x2x6x8 to 1x3x5x96x128; auto takes " in out
    for shard in SHARDS:
        rows = [line for line in lines if line.startswith(shard)]
        assert len(rows) == 2
        assert all("<= 1e-12  holds" in row for row in rows)
    assert sum(line.startswith("tile ") and "tiles: 0 <= 0  holds" in line for line in lines) == 2
    assert sum(line.startswith("rank_split/2 ") and "pieces: 0 <= 0  holds" in line for line in lines) == 2


def test_a_decoder_that_wants_a_timestep_gets_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    vae = tiny_vae("ltx-2 timestep")
    vae.save_pretrained(tmp_path / "vae")
    _name(tmp_path, "vae", "AutoencoderKLLTX2Video")
    words = ("--height", "56", "--width", "72", "--frames", "9", "--tile-size", "32x32", "--tile-stride", "24x24")
    found = _json(capsys, "verify", str(tmp_path), *TWO, *ONCE, *words, "--tile-merge", "blend", "sum")
    assert found["broken"] == []
    for operation in found["autoencoders"][0]["operations"].values():
        arms = operation["arms"]
        assert list(arms) == ["direct", "sequential_tiles", "tile", "tile/sum", *SHARDS, "rank_split/2"]
        told = {name: arms[name]["comparison"] for name in ("tile", "tile/sum", *SHARDS)}
        assert {comparison["promise"] for comparison in told.values()} == {"holds"}
        assert (told["tile"]["error"], told["tile"]["limit"]) == (0.0, 0.0)
        assert (told["tile/sum"]["against"], told["tile/sum"]["limit"]) == ("tiles", 8 * 2**-23)
        assert arms["tile/sum"]["decision"]["merge"] == "sum"
        assert (arms["tile"]["messages"], arms["tile/sum"]["messages"]) == ([0, 1], [0, 0])


def test_a_missing_halo_is_found(checkpoint: Path) -> None:
    words = ["verify", str(checkpoint), *TWO, *ONCE, "--operation", "decode", "--modes", "tile", SHARDS[1]]
    command = [sys.executable, "-m", "vllm_omni_vae.cli.main", *words]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 1
    assert done.stderr == "error: promises that are not kept: vae: decode spatial_shard_width\n"
    assert done.stdout.count("  BROKEN") == 1
    assert done.stdout.count("tiles: 0 <= 0  holds") == 1
    assert "every promise" not in done.stdout


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What would be run, in place of running it."""
    found: list[Request] = []

    def run(request: Request) -> None:
        found.append(request)
        raise SystemExit(0)

    monkeypatch.setattr(verify, "run_request", run)
    return found


def test_autoencoders_of_pipelines_within_are_named_too(
    planned: list[Request], checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _name(tmp_path, "upsampler", "DiffusionPipeline")
    inner = tmp_path / "upsampler"
    inner.mkdir()
    _name(inner, "vae", "AutoencoderKLWan")
    (inner / "vae").symlink_to(checkpoint / "vae")
    with pytest.raises(SystemExit):
        main(["verify", str(tmp_path), *TWO])
    assert capsys.readouterr().out.splitlines()[-1].split()[:3] == ["upsampler.vae", "AutoencoderKLWan", "on"]
    assert (planned[0].job.source.model, planned[0].job.source.subfolder) == (str(tmp_path), "upsampler/vae")


@pytest.mark.parametrize(("ranks", "rows", "cols"), [("2", 13, 17), ("4", 13, 17), ("8", 17, 17), ("10", 23, 23)])
@pytest.mark.parametrize("family", ["wan2.1", "wan2.2-ti2v-5b"])
def test_the_usual_size_gives_every_rank_work(
    planned: list[Request], family: str, ranks: str, rows: int, cols: int
) -> None:
    with pytest.raises(SystemExit):
        main(["verify", family, "--ranks", ranks])
    ratio = 16 if family == "wan2.2-ti2v-5b" else 8
    assert planned[0].size == (9, rows * ratio, cols * ratio)
    assert {work.operation: len(work.arms) for work in planned[0].job.works}["decode"] >= 4
    assert str(planned[0].job.tile_size) == f"{8 * ratio}x{8 * ratio}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ranks", "1"), "--vae-patch-parallel-size is 1; one rank has nobody to share with"),
        (("--ranks", "2", "--height", "64"), "only one of --height and --width is given"),
        (("--ranks", "2", "--height", "64", "--width", "64"), "nothing of this encode would be shared"),
        (("--ranks", "2", "--frames", "4"), "would ignore the rest of 4"),
        ((), "the following arguments are required: --vae-patch-parallel-size"),
    ],
)
def test_bad_input_is_refused(
    planned: list[Request], capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["verify", "wan2.1", *words])
    assert end.value.code == 2
    assert message in capsys.readouterr().err
    assert not planned
