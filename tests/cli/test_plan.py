# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni-vae plan`: what it prints, draws and refuses."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.helpers.vaes import VAES
from vllm_omni_vae.autoencoders import DistributedAutoencoderKLWan
from vllm_omni_vae.autoencoders.cost import Forecaster
from vllm_omni_vae.autoencoders.wan import WanSpec
from vllm_omni_vae.cli.drawing import Panel, draw_text
from vllm_omni_vae.cli.main import main
from vllm_omni_vae.config import VaeParallelMode
from vllm_omni_vae.errors import RankError, UnsupportedError

SHARDS = ("spatial_shard_height", "spatial_shard_width", "spatial_shard_grid")
SPLIT = "rank_split/2"
ALL = ("direct", "tile", SPLIT, *SHARDS, "auto")
FULL = ("plan", "wan2.1", "--height", "720", "--width", "1280", "--frames", "81", "--ranks", "8")
SMALL = ("--height", "48", "--width", "64", "--frames", "5", "--ranks", "3")


@pytest.fixture
def every_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WanSpec, "modes", frozenset(VaeParallelMode))


@pytest.fixture
def tiles_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WanSpec, "modes", frozenset({VaeParallelMode.TILE, VaeParallelMode.AUTO}))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[str]:
    """A tiny Wan checkpoint without its weights."""
    index = {"_class_name": "WanPipeline", "vae": ["diffusers", "AutoencoderKLWan"], "boundary_ratio": None}
    config = {"base_dim": 8, "z_dim": 4, "num_res_blocks": 1, "_class_name": "AutoencoderKLWan"}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text(json.dumps(config))
    yield str(tmp_path)


TILES = ("--tile-size", "32x32", "--tile-stride", "24x24")


def _json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    main([*words, "--json"])
    return json.loads(capsys.readouterr().out)


def _refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.usefixtures("every_mode")
def test_a_full_size_decode_in_integers(capsys: pytest.CaptureFixture[str]) -> None:
    plan = _json(capsys, *FULL, "--operation", "decode")
    assert {name: plan[name] for name in ("autoencoder", "ranks", "dtype", "weight_bytes")} == {
        "autoencoder": "AutoencoderKLWan",
        "ranks": 8,
        "dtype": "bfloat16",
        "weight_bytes": 2 * 126892531,
    }
    decode = plan["operations"]["decode"]
    assert (decode["input"], decode["output"]) == ([1, 16, 21, 90, 160], [1, 3, 81, 720, 1280])
    rows = decode["strategies"]
    assert tuple(rows) == ALL
    assert {row["status"] for row in rows.values()} == {"runs"}

    tile = rows["tile"]
    assert sum(tile["decision"]["tiles_per_rank"]) == len(tile["parts"][0]["owners"]) == 28
    assert round(tile["coverage"], 2) == 1.65
    assert round(tile["speed_up_limit"], 1) == 4.6
    assert (tile["messages"], tile["bytes"]) == (7, 641986560)
    assert sum(rank["network_calls"] for rank in tile["ranks"]) == 28 * 21

    totals = {"work", "coverage", "redundant_share", "imbalance", "largest_share", "speed_up_limit", "peak_bytes"}
    assert (
        set(tile)
        == {"status", "reason", "decision", "messages", "bytes", "broadcast_bytes", "reduced_bytes", "ranks", "parts"}
        | totals
    )
    flows = {f"{purpose}_{unit}" for purpose in ("halo", "attention", "result") for unit in ("messages", "bytes")}
    counted = {"work", "messages", "bytes", "broadcast_bytes", "reduced_bytes", "collectives", "network_calls"}
    assert set(tile["ranks"][0]) == flows | counted | {"peak_bytes", "halo_calls"}

    # One decode of an inner rank: 33 exchanges for each of 21 latent frames, and keys and values for 7 others.
    # The halo of a causal convolution holds the rows of its two cached frames too: without them it would be 486 MB
    # along the width, 860 MB along the height and 352 MB on the grid.
    width, height, grid = (rows[name]["ranks"][1] for name in SHARDS[1::-1] + SHARDS[2:])
    assert (width["halo_calls"], width["halo_messages"], width["halo_bytes"]) == (693, 1386, 742118400)
    assert (height["halo_calls"], height["halo_messages"], height["halo_bytes"]) == (693, 1386, 1310515200)
    assert (grid["halo_calls"], grid["halo_messages"], grid["halo_bytes"]) == (1386, 2079, 537849600)
    assert (width["attention_messages"], width["attention_bytes"]) == (7 * 21, 406425600)
    assert width["network_calls"] == 21
    for name in SHARDS:
        assert rows[name]["coverage"] == 1.0
        assert rows[name]["peak_bytes"] < rows["tile"]["peak_bytes"] < rows["direct"]["peak_bytes"]
    assert rows["auto"] == rows["spatial_shard_grid"] | {
        "reason": rows["auto"]["reason"],
        "decision": rows["auto"]["decision"],
    }


@pytest.mark.usefixtures("every_mode")
def test_both_operations_of_a_checkpoint_as_text(capsys: pytest.CaptureFixture[str], checkpoint: str) -> None:
    main(["plan", checkpoint, *SMALL, *TILES])
    text = capsys.readouterr().out
    assert "encode: 1x3x5x48x64 to 1x4x2x6x8\n" in text
    assert "decode: 1x4x2x6x8 to 1x3x5x48x64\n" in text
    for name in ALL[:-1]:
        assert text.count(f"\n{name} ") == 4  # what it costs and each rank's share, of both operations
    assert text.count("auto takes spatial_shard_width on 1x3 ranks") == 2
    assert text.count("tile: rank of each of 2x3 tiles") == 1
    assert text.count("spatial_shard_height: 3x1 ranks") == 1


@pytest.mark.usefixtures("tiles_only")
def test_a_strategy_that_the_family_lacks_is_refused_and_not_counted(
    capsys: pytest.CaptureFixture[str], checkpoint: str
) -> None:
    words = ("plan", checkpoint, *SMALL, *TILES, "--operation", "decode")
    main(words)
    text = capsys.readouterr().out
    rows = _json(capsys, *words)["operations"]["decode"]["strategies"]
    for name in SHARDS:
        reason = f"AutoencoderKLWan cannot run vae_parallel_mode {name}; it has tile, auto"
        assert rows[name] == {"status": "refused", "reason": reason}
        assert f"refused: {reason}" in text
    assert rows["auto"]["decision"]["strategy"] == "tile"
    assert "auto takes tile 1x2x3 (time x height x width)" in text


@pytest.mark.usefixtures("every_mode")
def test_a_request_that_cannot_be_shared_falls_back(capsys: pytest.CaptureFixture[str], checkpoint: str) -> None:
    words = ("plan", checkpoint, "--height", "48", "--width", "64", "--frames", "1", "--operation", "decode")
    rows = _json(capsys, *words, *TILES, "--ranks", "7")["operations"]["decode"]["strategies"]
    assert rows["spatial_shard_height"] == {
        "status": "falls back",
        "reason": "to tile (spatial_shard_height: 6x8 latents cannot give each of 7 ranks a row or column)",
    }
    assert rows["spatial_shard_width"]["status"] == "runs"
    rows = _json(capsys, *words, "--ranks", "2")["operations"]["decode"]["strategies"]
    assert {rows[name]["status"] for name in ("tile", *SHARDS)} == {"falls back"}
    assert rows["auto"]["decision"]["strategy"] == "direct"
    assert len(rows["auto"]["ranks"]) == 2


@pytest.mark.usefixtures("every_mode")
def test_a_strategy_that_would_fail_says_why(
    capsys: pytest.CaptureFixture[str], checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forecast(*_: Any) -> Any:
        raise RankError(0, "UnsupportedError: too thin") from cause

    monkeypatch.setattr(Forecaster, "forecast", forecast)
    cause: Exception = UnsupportedError("too thin")
    rows = _json(capsys, "plan", checkpoint, *SMALL, *TILES)["operations"]["encode"]["strategies"]
    assert rows["auto"] == {"status": "fails", "reason": "too thin"}
    cause = ZeroDivisionError()
    with pytest.raises(SystemExit) as end:
        main(["plan", checkpoint, *SMALL, *TILES])
    assert end.value.code == 1


@pytest.mark.usefixtures("every_mode")
def test_both_merges_of_tiles_side_by_side(capsys: pytest.CaptureFixture[str], checkpoint: str) -> None:
    words = ("plan", checkpoint, *SMALL, *TILES, "--tile-merge", "blend", "sum")
    for name, operation in _json(capsys, *words)["operations"].items():
        rows = operation["strategies"]
        assert tuple(rows) == ("direct", "tile", "tile/sum", SPLIT, *SHARDS, "auto")
        blended, summed = rows["tile"], rows["tile/sum"]
        assert (blended["decision"]["merge"], summed["decision"]["merge"]) == ("blend", "sum")
        assert (blended["reduced_bytes"], summed["messages"], summed["bytes"]) == (0, 0, 0)
        moments = 2 if name == "encode" else 1  # for each latent a mean and a variance
        assert summed["decision"]["sent_bytes"] == moments * math.prod(operation["output"]) * 2
        assert summed["parts"] == blended["parts"]
        assert rows["spatial_shard_width"]["decision"]["merge"] == "blend"
    main(words)
    text = capsys.readouterr().out
    assert text.count("\ntile/sum ") == 4


@pytest.mark.usefixtures("every_mode")
def test_a_piece_for_each_rank_with_several_margins(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*FULL, "--operation", "encode", "--split-margin", "0", "2", "0")
    encode = _json(capsys, *words)["operations"]["encode"]
    rows = encode["strategies"]
    assert tuple(rows) == ("direct", "tile", "rank_split/0", SPLIT, *SHARDS, "auto")
    assert encode["exact_margin"] is None
    for name, margin, coverage in (("rank_split/0", 0, 1.0), (SPLIT, 2, 1.1228)):
        row = rows[name]
        told = {part: row["decision"][part] for part in ("strategy", "margin", "grid", "tiles_per_rank")}
        assert told == {"strategy": "rank_split", "margin": margin, "grid": [1, 2, 4], "tiles_per_rank": [1] * 8}
        assert row["decision"]["coverage"] == coverage == round(row["coverage"], 4)
        # Margins stay where they were made: what travels is 7 pieces of 32 channels of 21 x 45 x 40 latents.
        assert (row["messages"], row["bytes"]) == (7, 7 * 32 * 21 * 45 * 40 * 2)
        assert (sorted(row["parts"][0]["owners"]), row["parts"][0]["cols"][1]) == (list(range(8)), [320, 640])
    assert rows["rank_split/0"]["peak_bytes"] < rows[SPLIT]["peak_bytes"] < rows["direct"]["peak_bytes"]


def test_the_margin_that_is_exact_is_told_where_there_is_one(
    capsys: pytest.CaptureFixture[str], checkpoint: str, tmp_path: Path
) -> None:
    sizes = ("--height", "64", "--width", "128", "--frames", "1", "--ranks", "2", *TILES)
    main(["plan", checkpoint, *sizes])
    assert capsys.readouterr().out.count("\nrank_split is approximate with any margin: the network looks at the") == 2
    config = dict(VAES["ltx-2.3"].layers) | {"_class_name": "AutoencoderKLLTX2Video"}
    (tmp_path / "vae" / "config.json").write_text(json.dumps(config))
    index = {"_class_name": "LTX2Pipeline", "vae": ["diffusers", "AutoencoderKLLTX2Video"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    main(["plan", checkpoint, *sizes])
    text = capsys.readouterr().out
    for margin in (7, 8):
        assert f"\nrank_split is approximate with a margin below {margin}, and un-tiled from there on" in text


def test_tiles_that_cannot_be_summed_are_refused(
    capsys: pytest.CaptureFixture[str], checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = DistributedAutoencoderKLWan.tile_merge
    monkeypatch.setattr(DistributedAutoencoderKLWan, "tile_merge", lambda *given: own(*given))
    words = ("plan", checkpoint, *SMALL, *TILES, "--operation", "decode", "--tile-merge", "sum")
    row = _json(capsys, *words)["operations"]["decode"]["strategies"]["tile/sum"]
    assert row["status"] == "refused"
    assert "merges tiles by its own tile_merge" in row["reason"]


@pytest.mark.usefixtures("every_mode")
def test_the_drawing_has_a_colour_for_every_rank(
    capsys: pytest.CaptureFixture[str], checkpoint: str, tmp_path: Path
) -> None:
    file = tmp_path / "plan.drawing"
    main(["plan", checkpoint, *SMALL, *TILES, "--operation", "encode", "--png", str(file)])
    with Image.open(file) as image:
        assert image.format == "PNG"
        colours = image.convert("RGB").getcolors(2**16)
    large = [colour for count, colour in colours if count > 1000 and colour not in ((255, 255, 255), (0, 0, 0))]
    assert len(large) == 3


def test_a_drawing_in_characters() -> None:
    panel = Panel("two by two", ((0, 96), (96, 100)), ((0, 8), (8, 16)), (0, 1, 10, 0))
    assert draw_text(panel).splitlines() == [
        "two by two",
        "    0    8",
        "   +----+----+",
        " 0 | 0  | 1  |",
        "   +----+----+",
        "96 | 10 | 0  |",
        "   +----+----+",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ranks", "1"), "one rank has nobody to share with"),
        (("--height", "0"), "--height is 0; it must be at least 1"),
        (("--frames", "-1"), "--frames is -1"),
        (("--frames", "6"), "would ignore the rest of 6; give 5 or 9"),
        (("--frames", "6", "--operation", "decode"), "cannot decode to 6 frames of 48x64"),
        (("--height", "50", "--operation", "decode"), "next to that is 5 frames of 48x64"),
        (("--height", "4"), "too short"),
        (("--tile-size", "16x16"), "larger than the tile size"),
        (("--tile-size", "30x32", "--tile-stride", "24x24"), "tile size 30 is not a multiple"),
        (("--vae-tile-size", "wide"), "'wide' is no tile extent"),
        (("--split-margin", "2", "-1"), "--split-margin is -1; it counts latent rows"),
        (("--tile-size", "32x32x8"), "is not tiled in time"),
        (("--dtype", "int8"), "invalid choice: 'int8'"),
        (("--operation", "all"), "invalid choice: 'all'"),
        (("--png", "/no/such/folder/plan.png"), "cannot write /no/such/folder/plan.png: No such file"),
    ],
)
@pytest.mark.usefixtures("tiles_only")
def test_bad_input_is_refused(
    capsys: pytest.CaptureFixture[str], checkpoint: str, words: tuple[str, ...], message: str
) -> None:
    assert message in _refusal(capsys, "plan", checkpoint, *SMALL, *words)


def test_a_model_that_cannot_be_planned_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "name one of the families flux.1, " in _refusal(capsys, "plan", str(tmp_path), *SMALL)
    (tmp_path / "model_index.json").write_text('{"_class_name": "P", "vae": ["diffusers", "AutoencoderTiny"]}')
    assert "no autoencoder that can be shared" in _refusal(capsys, "plan", str(tmp_path), *SMALL)
    (tmp_path / "model_index.json").write_text('{"_class_name": "P", "vae": ["diffusers", "AutoencoderKLWan"]}')
    assert "is this a complete diffusers checkpoint?" in _refusal(capsys, "plan", str(tmp_path), *SMALL)
    assert "the following arguments are required" in _refusal(capsys, "plan", "wan2.1")


@pytest.mark.usefixtures("tiles_only")
@pytest.mark.parametrize("family", ["wan2.2-a14b", "wan2.2-ti2v-5b"])
def test_families_are_known_without_a_checkpoint(capsys: pytest.CaptureFixture[str], family: str) -> None:
    size = ("--height", "704", "--width", "1280", "--frames", "1", "--ranks", "2")
    plan = _json(capsys, "plan", family, *size, "--operation", "decode")
    ratio = 16 if family == "wan2.2-ti2v-5b" else 8
    assert plan["operations"]["decode"]["input"][2:] == [1, 704 // ratio, 1280 // ratio]


@pytest.mark.parametrize("family", ["flux.1", "flux.2", "sdxl", "z-image"])
def test_pictures_have_no_frames(capsys: pytest.CaptureFixture[str], family: str) -> None:
    words = ("plan", family, "--height", "1152", "--width", "1152", "--ranks", "2", "--tile-size", "512x512")
    (plan,) = _json(capsys, *words, "--frames", "1", "--operation", "decode")["operations"].values()
    channels = {"flux.2": 32, "sdxl": 4}.get(family, 16)
    assert (plan["input"], plan["output"]) == ([1, channels, 144, 144], [1, 3, 1152, 1152])
    rows = plan["strategies"]
    assert {row["status"] for row in rows.values()} == {"runs"}
    assert rows["tile"]["decision"]["grid"] == [1, 3, 3]
    assert rows["spatial_shard_height"]["decision"]["chunk"] == 1
    assert "is for pictures, not for 5 frames; give 1" in _refusal(capsys, *words, "--frames", "5")


def test_a_plan_of_a_picture_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "sdxl", "--height", "1152", "--width", "1032", "--frames", "1", "--ranks", "4"])
    text = capsys.readouterr().out
    assert text.startswith(
        "sdxl: AutoencoderKL, 1 frame of 1152x1032 on 4 ranks, bfloat16; weights 160 MiB on each rank"
    )
    assert "encode: 1x3x1152x1032 to 1x4x144x129\n" in text
    assert "decode: 1x4x144x129 to 1x3x1152x1032\n" in text
    assert text.count("auto takes spatial_shard_grid on 2x2 ranks (height x width), imbalance ") == 2
    assert "latent frame" not in text


def test_tiles_of_a_clip_that_is_cut_in_time(
    capsys: pytest.CaptureFixture[str], checkpoint: str, tmp_path: Path
) -> None:
    config = dict(VAES["ltx-2.3"].layers) | {"_class_name": "AutoencoderKLLTX2Video"}
    (tmp_path / "vae" / "config.json").write_text(json.dumps(config))
    index = {"_class_name": "LTX2Pipeline", "vae": ["diffusers", "AutoencoderKLLTX2Video"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    words = ("plan", checkpoint, "--height", "72", "--width", "72", "--frames", "49", "--ranks", "8")
    words += ("--tile-size", "32x32x24", "--tile-stride", "24x24x16")
    for operation, row in _json(capsys, *words)["operations"].items():
        tile = row["strategies"]["tile"]
        assert (tile["status"], tile["decision"]["grid"]) == ("runs", [3, 3, 3])
        assert sum(tile["decision"]["tiles_per_rank"]) == 27
        assert tile["decision"]["imbalance"] == {"encode": 1.0934, "decode": 1.1059}[operation]
        owners = [rank for part in tile["parts"] for rank in part["owners"]]
        assert [owners.count(rank) for rank in range(8)] == tile["decision"]["tiles_per_rank"]
        assert [len(part["owners"]) for part in tile["parts"]] == [9, 9, 9]
    main(words)
    shown = capsys.readouterr().out
    assert all(
        f"rank of each of 3x3 tiles, at the first pixel row and column it keeps, stretch {n} of 3" in shown
        for n in (1, 2, 3)
    )
    for extra, says in (
        (("--tile-size", "32x32x20"), "tile time size of 20 frames must be a multiple of the compression ratio 8"),
        (("--tile-stride", "24x24x32"), "stride of 32 frames is larger than the tile time size of 24"),
    ):
        assert says in " ".join(_refusal(capsys, *words, *extra).split())
