# SPDX-License-Identifier: Apache-2.0
"""Commands on a checkpoint with a decoder that has no encoder."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.diffusion_decoders import LAYERS
from tests.helpers.vaes import VAES
from vllm_omni_vae.cli.blank import find_autoencoders
from vllm_omni_vae.cli.main import main

SIZE = ("--height", "28", "--width", "36", "--frames", "25", "--ranks", "3")
TILES = ("--tile-size", "16x16x16", "--tile-stride", "12x12x8")
DECODER = "LTX2VideoDiffusionDecoderModel"


def checkpoint(folder: Path, pipeline: str, components: dict[str, tuple[str, Any]]) -> str:
    """A checkpoint without its weights."""
    index = {name: ["diffusers", kind] for name, (kind, _) in components.items()}
    (folder / "model_index.json").write_text(json.dumps({"_class_name": pipeline} | index))
    for name, (_, config) in components.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(dict(config)))
    return str(folder)


def test_plan_counts_the_decode_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = checkpoint(tmp_path, "LTX2VideoDiffusionDecodePipeline", {"diffusion_decoder": (DECODER, LAYERS)})
    main(["plan", model, *SIZE, *TILES, "--json"])
    plan = json.loads(capsys.readouterr().out)
    assert plan["autoencoder"] == DECODER
    (decode,) = plan["operations"].values()
    assert (decode["input"], decode["output"]) == ([1, 4, 4, 7, 9], [1, 3, 25, 28, 36])
    with pytest.raises(SystemExit) as end:
        main(["plan", model, *SIZE, "--operation", "encode"])
    assert end.value.code == 2
    assert f"{DECODER} cannot encode; it has decode" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tiles", "reason"),
    [
        (("--tile-size", "16x16x15"), "tile time size of 15 frames must be a multiple of 2, at least 6"),
        (("--tile-size", "16x16"), "tile height stride of 704 pixels is larger than the tile size of 16"),
    ],
)
def test_tiles_that_cannot_be_used_are_refused(
    tiles: tuple[str, ...], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = checkpoint(tmp_path, "LTX2VideoDiffusionDecodePipeline", {"diffusion_decoder": (DECODER, LAYERS)})
    with pytest.raises(SystemExit) as end:
        main(["plan", model, *SIZE, *tiles])
    assert end.value.code == 2
    assert reason in capsys.readouterr().err


def test_what_a_served_pipeline_leaves_unused_is_none_of_its_autoencoders(tmp_path: Path) -> None:
    parts = {"diffusion_decoder": (DECODER, LAYERS), "vae": ("AutoencoderKLLTX2Video", VAES["ltx-2"].layers)}
    found = find_autoencoders(checkpoint(tmp_path, "LTX2Pipeline", parts))
    assert [(one.path, one.known) for one in found] == [("vae", True)]
