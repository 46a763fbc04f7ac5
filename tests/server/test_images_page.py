# SPDX-License-Identifier: Apache-2.0
"""The programs on the page about images, and the example, against a scripted engine; tests/e2e has real models."""

import runpy
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.docs.markdown import ROOT, Block, blocks

from .conftest import Serve
from .scripted_engine import IMAGES, LAYERS, ScriptedEngine

PAGE = blocks(ROOT / "docs" / "user_guide" / "images.md", "python")
EXAMPLE = ROOT / "examples" / "online_serving" / "images.py"
MADE = {
    "n=2,\n": {"boat-0.png": ("PNG", "RGB", (1024, 768)), "boat-1.png": ("PNG", "RGB", (1024, 768))},
    "mask=": {"storm.webp": ("WEBP", "RGB", (64, 48))},
    "layers": {f"layer-{layer}.png": ("PNG", "RGBA", (64, 48)) for layer in range(3)},
    "stream=True": {f"boat-{number}.png": ("PNG", "RGB", (64, 48)) for number in range(2)},
}


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> ScriptedEngine:
    block = request.node.callspec.params.get("block") if hasattr(request.node, "callspec") else None
    return ScriptedEngine(card=LAYERS if block is not None and "layers" in block.text else IMAGES)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a program runs: it has the pictures that the page names."""
    folder = tmp_path / "here"
    folder.mkdir()
    Image.new("RGB", (40, 30), "blue").save(folder / "harbour.png")
    Image.new("RGBA", (40, 30)).save(folder / "sky.png")
    monkeypatch.chdir(folder)
    return folder


def found(folder: Path) -> dict[str, tuple[str | None, str, tuple[int, int]]]:
    """Type, mode and size of each picture that a program left."""
    pictures = {}
    for path in folder.iterdir():
        if path.name not in ("harbour.png", "sky.png"):
            with Image.open(path) as image:
                pictures[path.name] = (image.format, image.mode, image.size)
    return pictures


@pytest.mark.parametrize("block", PAGE, ids=str)
def test_blocks_make_what_the_page_says(serve: Serve, here: Path, block: Block) -> None:
    server = serve()
    text = block.text.replace("http://localhost:8000", server.url)
    assert text != block.text
    exec(compile(text, str(block), "exec"), {"__name__": "__main__"})
    (expected,) = [pictures for word, pictures in MADE.items() if word in block.text]
    assert found(here) == expected


def test_the_example(
    serve: Serve, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve()
    shared = [str(EXAMPLE), "--base-url", f"{server.url}/v1", "--model", "scripted", "--seed", "3"]
    monkeypatch.setattr(sys, "argv", [*shared, "--n", "2", "--size", "32x48"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert capsys.readouterr().out == (
        "saved image-0.png: 32x48, seed 3, opaque\nsaved image-1.png: 32x48, seed 4, opaque\n"
    )
    edit = ["--image", "harbour.png", "--mask", "sky.png", "--num-inference-steps", "2", "--output-format", "jpeg"]
    monkeypatch.setattr(sys, "argv", [*shared, *edit, "--out", "edited"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert found(here)["edited-0.jpeg"] == ("JPEG", "RGB", (64, 48))
    first, second = server.engine.requests
    assert (first.num_images, first.images, first.num_inference_steps) == (2, (), 4)
    assert (len(second.images), second.num_inference_steps) == (1, 2) and second.mask is not None
