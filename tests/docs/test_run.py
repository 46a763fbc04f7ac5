# SPDX-License-Identifier: Apache-2.0
"""The programs on the pages and in the folder of examples run, on tiny checkpoints and two ranks.

Hub names become tiny checkpoints and sizes become small ones that still need several tiles; nothing else of a program
is changed. Starting ranks takes most of the time, so programs of one kind share theirs.
"""

import contextlib
import json
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import openai
import pytest
from PIL import Image

import vllm_omni_vae
from tests.docs.markdown import ROOT, Block, all_blocks
from tests.helpers.server import Server
from vllm_omni_vae import Omni, tiny

EXAMPLES = ROOT / "examples"
PHOTO = Path(matplotlib.get_data_path(), "sample_data", "grace_hopper.jpg")
SIDE = 288
SHARES = (1, 3)
"""Tiles of each of two ranks at that size: one rank has the large tile, the other three small ones."""
MODELS = {
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": "wan2.2-t2v",
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": "wan2.2-i2v",
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": "wan2.2-ti2v-5b",
    "Qwen/Qwen-Image-Edit-2509": "qwen-image-edit-plus",
}
SMALLER = {
    r"num_frames=81": f"num_frames=1, width={SIDE}, height={SIDE}",
    r"num_frames=121": "num_frames=1",
    r"(height|width)=(704|1280),": rf"\1={SIDE},",
    r'size="1280x720"': f'size="{SIDE}x{SIDE}"',
    r'seconds="4"': 'seconds="0.0625"',
    r"num_inference_steps([=\": ]+)(40|50)": r"num_inference_steps\g<1>1",
    r"\.manual_seed\(0\)\)\.frames": f".manual_seed(0), height={SIDE}, width={SIDE}, num_frames=1).frames",
    r'f"cuda:\{torch\.distributed\.get_rank\(\)\}"': '"cpu"',
}

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {hub: tiny.build(family, folder / family) for hub, family in MODELS.items()}


def small(block: Block, checkpoints: dict[str, Path]) -> str:
    """The text of ``block`` with tiny checkpoints and small sizes; no large one is left."""
    text = block.text
    for hub, folder in checkpoints.items():
        text = text.replace(hub, str(folder))
    for pattern, replacement in SMALLER.items():
        text = re.sub(pattern, replacement, text)
    assert "Wan-AI/" not in text, block
    return text


def to_run(*words: str) -> list[Block]:
    """The blocks that are marked to be run and hold one of ``words``, page by page."""
    blocks = [block for block in all_blocks("python") if block.mark == "run"]
    return [block for block in blocks if any(word in block.text for word in words)]


@pytest.fixture
def lent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make `Omni` hand out what there is when the same is asked for again; its ``with`` block does not end it."""
    made: dict[str, Omni] = {}

    def lend(*args: Any, **settings: Any) -> contextlib.AbstractContextManager[Omni]:
        settings = {name: value for name, value in settings.items() if value is not None}
        wanted = repr((args, sorted(settings.items())))
        if wanted not in made:
            made[wanted] = Omni(*args, **settings)
        return contextlib.nullcontext(made[wanted])

    monkeypatch.setitem(vars(vllm_omni_vae), "Omni", lend)
    yield
    for omni in made.values():
        omni.close()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a program runs: it has the picture that the pages name."""
    shutil.copy(PHOTO, tmp_path / "harbour.jpg")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_offline_blocks_and_the_example(
    here: Path,
    checkpoints: dict[str, Path],
    lent: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pages: dict[Path, dict[str, Any]] = {}
    for block in to_run("Omni(", "result.frames"):
        names = pages.setdefault(block.page, {"__name__": "__main__"})
        exec(compile(small(block, checkpoints), str(block), "exec"), names)
    readme, offline = pages[ROOT / "README.md"], pages[ROOT / "docs" / "user_guide" / "offline.md"]
    assert readme["frames"].shape == offline["result"].frames.shape == (1, SIDE, SIDE, 3)
    assert f"decode tile (1, 2, 2) {SHARES}" in capsys.readouterr().out
    assert frames_of(here / "boat.mp4") == 1

    script = EXAMPLES / "offline_inference" / "wan2_2_text_to_video.py"
    model = str(checkpoints["Wan-AI/Wan2.2-T2V-A14B-Diffusers"])
    sizes = ["--width", str(SIDE), "--height", str(SIDE), "--num-frames", "1", "--num-inference-steps", "1"]
    monkeypatch.setattr(sys, "argv", [str(script), "--model", model, *sizes])
    runpy.run_path(str(script), run_name="__main__")
    said = capsys.readouterr().out
    assert (
        f"saved video.mp4: {SIDE}x{SIDE}, 1 frames, seed 0\nVAE decode: tile 1x2x2, tiles per rank {list(SHARES)}\n"
        in said
    )
    assert frames_of(here / "video.mp4") == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_example_that_edits_a_picture(
    here: Path, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model encodes a picture at about a megapixel, whatever the size that is made."""
    script = EXAMPLES / "offline_inference" / "qwen_image_edit.py"
    asked = ["--model", str(checkpoints["Qwen/Qwen-Image-Edit-2509"]), "--image", "harbour.jpg"]
    tiles = ["--vae-tile-size", "256x256", "--vae-tile-stride", "224x224"]
    small_ones = ["--width", "272", "--height", "64", "--num-inference-steps", "2"]
    monkeypatch.setattr(sys, "argv", [str(script), *asked, *tiles, *small_ones])
    runpy.run_path(str(script), run_name="__main__")
    said = capsys.readouterr().out
    assert "saved edited.png: 272x64, seed 0\nVAE encode: tile 1x5x5, tiles per rank [13, 12]\n" in said
    with Image.open(here / "edited.png") as image:
        assert (image.size, image.mode) == ((272, 64), "RGB")


@pytest.mark.distributed
def test_scripts_under_torchrun(here: Path, checkpoints: dict[str, Path]) -> None:
    scripts = []
    for block in all_blocks("python"):
        if block.mark.startswith("torchrun"):
            path = here / block.mark.split()[1]
            path.write_text(small(block, checkpoints))
            scripts.append([str(path)])
    assert [Path(script[0]).name for script in scripts] == [*("readme.py", "boat.py", "vae.py", "check.py", "omni.py")]
    example = str(EXAMPLES / "offline_inference" / "diffusers_distribute.py")
    model = str(checkpoints["Wan-AI/Wan2.2-T2V-A14B-Diffusers"])
    sizes = ["--width", str(SIDE), "--height", str(SIDE), "--num-frames", "1", "--num-inference-steps", "1"]
    scripts.append([example, "--model", model, *sizes])

    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
        "--log-dir",
        str(here / "said"),
        "--redirects",  # what two ranks print to one pipe comes mixed
        "3",
    ]
    command.append(str(ROOT / "tests" / "docs" / "run_scripts.py"))
    for script in scripts:
        command += [str(free_port()), json.dumps(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 0, done.stderr + written(here / "said", 0, "stderr") + written(here / "said", 1, "stderr")
    for rank in range(2):
        output = written(here / "said", rank, "stdout")
        assert f"rank {rank} (1, 3, 5, 96, 80) equal False\n" in output
        for check in ("encode spatial_shard_width", "encode tile", "decode spatial_shard_width", "decode tile"):
            assert output.count(f"{check} True ") == 1
        assert f"rank {rank} has {1 - rank} frames\n" in output
    assert f"saved video.mp4: {SIDE}x{SIDE}, 1 frames, VAE on 2 ranks" in written(here / "said", 0, "stdout")
    assert frames_of(here / "boat.mp4") == frames_of(here / "video.mp4") == 1


def test_online_blocks_and_the_example(
    here: Path,
    checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    defaults = {"width": SIDE, "height": SIDE, "num_frames": 1, "num_inference_steps": 1}
    model = checkpoints["Wan-AI/Wan2.2-I2V-A14B-Diffusers"]
    shared = ["--vae-patch-parallel-size", "2", "--served-model-name", "tiny"]
    command = ["vllm-omni-vae", "serve", str(model), *shared, "--default-sampling-params", json.dumps(defaults)]
    server = Server(command, here / "server")
    try:
        server.wait_until_healthy()
        address = str(server.http.base_url).rstrip("/")
        for block in to_run("OpenAI("):
            text = small(block, checkpoints).replace("http://localhost:8000", address)
            names: dict[str, Any] = {"__name__": "__main__"}
            exec(compile(text, str(block), "exec"), names)
            assert names["video"].status == "completed"
            assert (names["video"].size, names["video"].num_frames) == (f"{SIDE}x{SIDE}", 1)
            assert [decision["tiles_per_rank"] for decision in names["video"].vae] == [list(SHARES)] * 2
            assert frames_of(here / "boat.mp4") == 1
            (here / "boat.mp4").unlink()

        script = EXAMPLES / "online_serving" / "wan2_2_image_to_video.py"
        asked = ["--base-url", address + "/v1", "--model", "tiny", "--image", "harbour.jpg", "--size", f"{SIDE}x{SIDE}"]
        small_ones = ["--num-frames", "1", "--num-inference-steps", "1", "--reference-fit", "pad"]
        monkeypatch.setattr(sys, "argv", [str(script), *asked, *small_ones])
        capsys.readouterr()
        runpy.run_path(str(script), run_name="__main__")
        said = capsys.readouterr().out
        assert (
            f"saved video.mp4: {SIDE}x{SIDE}, 1 frames, seed 0\nVAE encode: tile 1x2x2, tiles per rank {list(SHARES)}\n"
            in said
        )
        assert frames_of(here / "video.mp4") == 1
        monkeypatch.setattr(sys, "argv", [str(script), *asked, "--num-frames", "2"])
        with pytest.raises(openai.UnprocessableEntityError, match="nearest: 1 or 5"):
            runpy.run_path(str(script), run_name="__main__")
    finally:
        server.close()


def frames_of(path: Path) -> int:
    """Frames of a video of the small size."""
    import av

    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.width, stream.height) == (SIDE, SIDE)
        return sum(1 for _ in container.decode(video=0))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def written(folder: Path, rank: int, stream: str) -> str:
    """What ``rank`` wrote to ``stream`` under torchrun, which made ``folder``."""
    (log,) = folder.glob(f"*/attempt_0/{rank}/{stream}.log")
    return log.read_text()[-6000:]
