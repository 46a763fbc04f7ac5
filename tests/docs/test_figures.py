# SPDX-License-Identifier: Apache-2.0
"""Figures on the pages are what the package computes, and blocks print what the page says."""

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan

from tests.docs.markdown import ROOT, blocks, name, pages, prose
from tools import generate_docs
from vllm_omni_vae.autoencoders import DistributedAutoencoderKLWan, Operation, select_strategy
from vllm_omni_vae.config import DiffusionParallelConfig, EngineConfig, VaeConfig, VaeParallelMode
from vllm_omni_vae.distributed import LocalWorld
from vllm_omni_vae.errors import ConfigurationError
from vllm_omni_vae.geometry import TileGrid, deal
from vllm_omni_vae.pipelines.request import RANGES
from vllm_omni_vae.plugin import SUPPORTED_VLLM
from vllm_omni_vae.server import app, body, errors, events, fetch, fields, media, strict_json, video_form
from vllm_omni_vae.server.table import startup_table
from vllm_omni_vae.worker.multiproc import MultiprocBackend
from vllm_omni_vae.worker.ray import RayBackend

GUIDE = ROOT / "docs" / "user_guide"
NEEDS_RANKS = ("Omni(", "OpenAI(", "result.frames")
"""In blocks that `test_run` runs."""


def plain_pages() -> list[Path]:
    """Pages with blocks to run that need neither ranks nor a server."""
    return [
        page
        for page in pages()
        if any(block.mark == "run" and not any(word in block.text for word in NEEDS_RANKS) for block in blocks(page))
    ]


@pytest.mark.parametrize("page", plain_pages(), ids=name)
def test_blocks_print_what_the_page_says(page: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    checked = 0
    for block in blocks(page):
        if block.mark == "run":
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(block.text, str(block), "exec"), names)
            printed = output.getvalue()
        elif block.mark == "output":
            assert block.text == printed, block
            checked += 1
    assert checked


def text(page: str) -> str:
    return prose(GUIDE / page)


def vae(kind: str) -> AutoencoderKLWan:
    """A full-size configuration, without memory for its weights."""
    ti2v = {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16}
    with torch.device("meta"):
        made = AutoencoderKLWan(**(ti2v if kind == "ti2v-5b" else {}))
    made.enable_tiling()
    return made


def grid(kind: str, operation: Operation, height: int, width: int) -> TileGrid:
    """The tiles of one latent frame."""
    model, spec = vae(kind), DistributedAutoencoderKLWan.spec
    ratio = model.spatial_compression_ratio
    shape = (1, 3, 1, height, width)
    if operation is Operation.DECODE:
        shape = (1, model.config.z_dim, 1, height // ratio, width // ratio)
    assert spec.is_tiled(model, operation, shape)
    return spec.grid(model, operation, spec.seen_extents(model, operation, shape))


def test_the_usual_geometry() -> None:
    model = vae("wan2.1")
    assert f"{model.tile_sample_min_height} with a stride of {model.tile_sample_stride_height}" in text(
        "vae_parallelism.md"
    )
    tiles = grid("wan2.1", Operation.DECODE, 720, 1280)
    assert (tiles.shape, round(tiles.coverage, 2)) == ((1, 4, 7), 1.65)
    assert grid("wan2.1", Operation.DECODE, 256, 512).shape == (1, 2, 3)
    assert "1.65 at 720x1280 is 65 % more work" in text("vae_parallelism.md")
    two = deal([tiles.workload(coord) for coord in tiles.coords()], 2)
    assert f"is {2 / two.imbalance / tiles.coverage:.2f}x at 720x1280" in text("vae_parallelism.md")


def test_the_log_line_of_a_decision() -> None:
    tiles = grid("wan2.1", Operation.DECODE, 720, 1280)
    decision = select_strategy(Operation.DECODE, VaeParallelMode.TILE, tiles, 2)
    assert f"\nVAE {decision}\n" in (GUIDE / "vae_parallelism.md").read_text()


def test_the_geometry_of_ti2v_5b() -> None:
    said = text("vae_parallelism.md")
    decode, encode = (grid("ti2v-5b", op, 704, 1280) for op in (Operation.DECODE, Operation.ENCODE))
    assert f"At 704x1280 that makes {len(decode)} tiles for decode and {len(encode)} for encode" in said
    _, rows, _ = encode.windows
    patch = 2
    assert f"spans {patch * (rows[0].stop - rows[0].start)} image pixels and a step of {patch * rows[1].start}," in said
    assert "above 256 but not above 384 pixels is one tile" in said
    assert [len(grid("ti2v-5b", Operation.ENCODE, side, side)) for side in (288, 384, 416)] == [1, 1, 4]


def test_the_rule_for_seconds() -> None:
    said = re.findall(
        r"(?:At|at) (\d+) fps (\d+) seconds are (\d+)(?: frames)?(?: and (\d+) seconds are (\d+))?", text("serving.md")
    )
    found = {(int(fps), int(s)): int(n) for fps, a, b, c, d in said for s, n in ((a, b), (c, d)) if s}
    assert found == {(16, 4): 65, (16, 5): 81, (24, 5): 121}
    assert all(video_form.nearest_frames(seconds, fps, 4) == frames for (fps, seconds), frames in found.items())


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("serving.md", f"up to {app.SHUTDOWN_GRACE_S:g} seconds"),
        ("serving.md", f"Every {events.KEEP_ALIVE_S:g} seconds without news"),
        ("serving.md", f"1 to {fields.MAX_PROMPT:,} characters"),
        ("serving.md", f"1 to {RANGES['width'].high:,}"),
        ("serving.md", f"{media.SHEET_SIDE}x{media.SHEET_SIDE} stills"),
        ("serving.md", "After three restarts"),
        ("serving.md", f"fields of a body: {body.MAX_FIELDS}; commas in JSON: {strict_json.MAX_VALUES:,}"),
        ("serving.md", f"objects and arrays in one another: {strict_json.MAX_DEPTH} |"),
        ("serving.md", f"characters of `extra_params` as JSON: {fields.MAX_EXTRA:,}"),
        ("serving.md", f"held while they stream in; {fetch.TIMEOUT_S:g} s"),
        ("troubleshooting.md", f"more than {strict_json.MAX_VALUES} commas, or {strict_json.MAX_DEPTH} objects"),
        ("../../CHANGELOG.md", f"no error is longer than {errors.MAX_TEXT:,} characters"),
        ("serving.md", f"vLLM {SUPPORTED_VLLM}"),
        ("troubleshooting.md", f"those supported ({SUPPORTED_VLLM})"),
        ("../../README.md", f"| vLLM | {SUPPORTED_VLLM} |"),
    ],
)
def test_limits_of_the_server(page: str, said: str) -> None:
    assert MultiprocBackend.max_restarts == RayBackend.max_restarts == 3
    assert said in prose((GUIDE / page).resolve())


def test_the_messages_of_one_call() -> None:
    """What the design page counts for the two smallest worlds: integers of the agreement, then nothing but tiles."""
    said = (ROOT / "docs" / "design" / "feature" / "vae_parallel.md").read_text()
    sizes: list[int] = []

    def one_rank(comm: Any) -> None:
        gather = comm.all_gather

        def counted(piece: torch.Tensor) -> torch.Tensor:
            if comm.rank == 0:
                sizes.append(piece.numel())
            return gather(piece)

        comm.all_gather = counted
        names["one_rank"](comm)

    block = next(block for block in blocks(ROOT / "docs" / "design" / "feature" / "vae_parallel.md") if block.mark)
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(block.text, names)
    LocalWorld(2).run(one_rank)
    assert re.findall(r"1 `all_gather` of (\d+) integers?", said) == list(map(str, sizes))


def refusal(make: Callable[[], object]) -> str:
    with pytest.raises(ConfigurationError) as error:
        make()
    return str(error.value)


def test_messages_of_the_troubleshooting_page() -> None:
    said = (GUIDE / "troubleshooting.md").read_text()
    quoted = [quote.removeprefix("error: ") for quote in re.findall(r"^\*\*`([^`]+)`\*\*", said, re.M)]
    model = DistributedAutoencoderKLWan(base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    two = DiffusionParallelConfig(vae_patch_parallel_size=2)
    for message in (
        refusal(lambda: model.set_parallel_size(2, mode="spatial")),
        refusal(lambda: model.set_parallel_size(2)),
        refusal(lambda: model.enable_tiling(128, 128)),
        refusal(lambda: model.enable_tiling(100, 100, 96, 96)),
        refusal(lambda: EngineConfig(model="m", parallel=two, vae=VaeConfig(vae_use_tiling=False))),
    ):
        assert any(message.startswith(quote.replace("... ranks", "2 VAE ranks")) for quote in quoted), message


def test_the_start_up_table() -> None:
    class Started:
        config = EngineConfig(model="m", parallel=DiffusionParallelConfig(vae_patch_parallel_size=2))
        device, dtype = "cpu", "float32"
        card = generate_docs.cards()["Wan 2.2 A14B image to video"]
        report = ()

    title = startup_table(Started()).splitlines()[0]  # type: ignore[arg-type]
    assert f"```text\n{title}\n" in (GUIDE / "serving.md").read_text()
