# SPDX-License-Identifier: Apache-2.0
"""What every rank tells of a job: seconds, tiles and bytes of the VAE in its result, and the job's id in its log."""

import re
from collections.abc import Mapping
from pathlib import Path

import diffusers
import pytest
import torch

from tests.engine.engines import RESULT_SECONDS, Engines, ask, run
from vllm_omni_vae.autoencoders import DistributedAutoencoderKLWan, Operation
from vllm_omni_vae.autoencoders.cost import Forecaster
from vllm_omni_vae.config import VaeParallelMode
from vllm_omni_vae.engine.engine import Engine
from vllm_omni_vae.geometry import deal
from vllm_omni_vae.pipelines.request import GenerationResult, VaeUse

pytestmark = pytest.mark.distributed

FLOAT = 4
FRAMES, LATENT_FRAMES = 5, 2
ROWS, COLUMNS = 8, 10
# Latent rows and columns of the tiles of `ask`: 4 of each, every 3, and what is left.
TILES = [height * width for height in (4, 4, 2) for width in (4, 4, 4, 1)]
Key = tuple[int, str, str]


def by_rank(result: GenerationResult) -> dict[Key, VaeUse]:
    uses = {(use.rank, use.operation, use.strategy): use for use in result.vae_use}
    assert len(uses) == len(result.vae_use)
    assert list(uses) == sorted(uses, key=lambda key: key[0])
    return uses


def latents_of_tiles(ranks: int) -> list[int]:
    """Latents, in one latent frame, of the tiles that each rank runs."""
    owners = deal(TILES, ranks).owners
    return [sum(tile for tile, owner in zip(TILES, owners, strict=True) if owner == rank) for rank in range(ranks)]


@pytest.fixture
def channels(checkpoints: Mapping[str, Path]) -> int:
    """Channels of the latents."""
    return diffusers.AutoencoderKLWan.load_config(checkpoints["wan2.2-i2v"] / "vae")["z_dim"]


@pytest.mark.parametrize(("name", "ranks"), [("i2v", 2), ("i2v, ulysses and a follower", 3)])
def test_tiles_and_bytes_of_every_rank_are_what_arithmetic_says(
    engines: Engines, name: str, ranks: int, channels: int
) -> None:
    engine = engines[name]
    run(engine, ask(engine, width=32, height=32))
    first, second = (run(engine, ask(engine)) for _ in range(2))
    uses = by_rank(first)
    assert set(uses) == {(rank, operation, "tile") for rank in range(ranks) for operation in Operation}
    latents = LATENT_FRAMES * ROWS * COLUMNS * channels * FLOAT
    picture = FRAMES * 8 * ROWS * 8 * COLUMNS * 3 * FLOAT
    moments = LATENT_FRAMES * 2 * channels * FLOAT
    sample = FRAMES * 8 * 8 * 3 * FLOAT
    for rank, tiled in enumerate(latents_of_tiles(ranks)):
        encode, decode = uses[rank, "encode", "tile"], uses[rank, "decode", "tile"]
        assert encode.tiles == decode.tiles == len(TILES) // ranks
        # The first rank gives the others the input, and of an encode the result; they give it their tiles.
        assert encode.sent_bytes == (tiled * moments if rank else picture + 2 * latents)
        assert decode.sent_bytes == (tiled * sample if rank else latents)
        assert encode.seconds > 0
        assert decode.seconds > 0
    stages = first.stage_durations
    for operation in Operation:
        assert uses[0, operation, "tile"].seconds <= stages[operation] + 1e-3
    again = by_rank(second)
    assert {key: (use.tiles, use.sent_bytes) for key, use in again.items()} == {
        key: (use.tiles, use.sent_bytes) for key, use in uses.items()
    }, "a job counts what an earlier one did"


def test_a_shard_sends_what_its_forecast_says(engines: Engines, checkpoints: Mapping[str, Path], channels: int) -> None:
    engine = engines["i2v, one map on two ranks"]
    result = run(engine, ask(engine))
    uses = by_rank(result)
    config = DistributedAutoencoderKLWan.load_config(checkpoints["wan2.2-i2v"] / "vae")
    with torch.device("meta"):
        vae = DistributedAutoencoderKLWan.from_config(config)
    vae.enable_tiling(32, 32, 24, 24)
    shapes = {
        Operation.ENCODE: (1, 3, FRAMES, 8 * ROWS, 8 * COLUMNS),
        Operation.DECODE: (1, channels, LATENT_FRAMES, ROWS, COLUMNS),
    }
    chunks = {decision["operation"]: decision["chunk"] for decision in result.decisions}
    for operation, shape in shapes.items():
        mode = VaeParallelMode.SPATIAL_SHARD_WIDTH
        forecast = Forecaster(vae, operation, shape, chunks[operation]).forecast(mode, 2)
        for rank, expected in enumerate(forecast.uses):
            use = uses[rank, operation.value, mode.value]
            given = 0 if rank else torch.Size(shape).numel() * FLOAT
            assert use.tiles == 0
            assert use.sent_bytes == expected.bytes + expected.broadcast_bytes + expected.reduced_bytes + given


def test_what_fits_into_one_tile_is_run_by_the_first_rank_alone(engines: Engines) -> None:
    engine = engines["i2v"]
    result = run(engine, ask(engine, width=32, height=32))
    assert [(use.rank, use.operation, use.strategy, use.tiles, use.sent_bytes) for use in result.vae_use] == [
        (0, "encode", "direct", 0, 0),
        (0, "decode", "direct", 0, 0),
    ]


def test_tiles_of_one_rank_are_counted_too(engines: Engines) -> None:
    engine = engines["t2v on one rank"]
    result = run(engine, ask(engine, width=48, height=32))
    (use,) = result.vae_use
    # Diffusers begins a tile at every stride: 4 and 1 of 4 latent rows, 4 and 3 of 6 columns.
    assert (use.rank, use.operation, use.strategy, use.tiles, use.sent_bytes) == (0, "decode", "tile", 4, 0)


def test_every_line_of_every_rank_names_the_job_that_runs(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_OMNI_VAE_LOG_LEVEL", "DEBUG")
    engine = Engine(engines.config("i2v"))
    try:
        engine.start()
        loading = capfd.readouterr().err
        for identity in ("video_first", "video_second"):
            engine.submit(ask(engine), job_id=identity).future.result(RESULT_SECONDS)
    finally:
        engine.close()
    running = capfd.readouterr().err
    assert "video_" not in loading
    for rank in (0, 1):
        speakers = re.findall(rf"\[(rank {rank}[^\]]*)\]", running)
        assert list(dict.fromkeys(speakers))[:2] == [f"rank {rank}, video_first", f"rank {rank}, video_second"]
        told = rf"\[rank {rank}, video_first\] \S+: the autoencoders took .*tiles=6"
        assert re.search(told, running)
