# SPDX-License-Identifier: Apache-2.0
"""A rank that gets no more memory: what was not in tiles is run in tiles, and after a failed job the next is right."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.engine.engines import RESULT_SECONDS, Engines, ask, run, submit
from tests.engine.processes import no_more_memory, resident_bytes
from tests.engine.reference import Reference
from vllm_omni_vae.config import VaeConfig
from vllm_omni_vae.engine.engine import Engine
from vllm_omni_vae.errors import EngineError
from vllm_omni_vae.pipelines.request import GenerationRequest, GenerationResult

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

MIB = 2**20
TILES = (128, 96)
FAMILY_TILES = (256, 192)
SHARD = "spatial_shard_width"
SIDE = 352  # a shard asks for 102 MiB at once, a tile for 27
ENOUGH, LITTLE = 84 * MIB, 24 * MIB


@pytest.fixture(scope="module")
def shared(engines: Engines) -> Iterator[Engine]:
    """Two ranks; the second holds the VAE alone."""
    size, stride = (f"{pixels}x{pixels}" for pixels in TILES)
    vae = VaeConfig(vae_use_tiling=True, vae_tile_size=size, vae_tile_stride=stride, vae_selftest=False)
    engine = Engine(engines.config("i2v, one map on two ranks", vae=vae))
    try:
        engine.start()
        yield engine
    finally:
        engine.close()


def large(engine: Engine) -> GenerationRequest:
    return ask(engine, width=SIDE, height=SIDE, num_frames=5, steps=1)


def strategies(result: GenerationResult) -> list[tuple[str, str, bool]]:
    return [(made["operation"], made["strategy"], made["fallback"]) for made in result.decisions]


def test_a_shard_that_does_not_fit_is_run_in_tiles(shared: Engine, reference: Reference) -> None:
    request = large(shared)
    before, pids = run(shared, request), shared.worker_pids
    assert strategies(before) == [("encode", SHARD, False), ("decode", SHARD, False)]
    with no_more_memory(pids[1], ENOUGH) as take_memory:
        take_memory()
        result = run(shared, request)
    assert np.array_equal(result.frames, reference.frames("wan2.2-i2v", request, tiles=TILES))
    assert strategies(result) == [
        ("encode", SHARD, False),
        ("encode", "tile", True),
        ("decode", SHARD, False),
        ("decode", "tile", True),
    ]
    for retry in result.decisions[1::2]:
        assert retry["reason"].startswith(f"{SHARD}: rank 1 ran out of memory, asked for ")
    ran = {(use.rank, use.operation, use.strategy) for use in result.vae_use}
    assert ran == {(rank, operation, "tile") for rank in (0, 1) for operation in ("encode", "decode")}
    again = run(shared, request)
    assert strategies(again) == strategies(before)
    assert np.array_equal(again.frames, before.frames)
    assert shared.worker_pids == pids


def test_what_does_not_fit_in_tiles_either_fails_and_the_next_is_right(shared: Engine) -> None:
    request = large(shared)
    before, pids = run(shared, request), shared.worker_pids
    held = resident_bytes(pids[1])
    with no_more_memory(pids[1], LITTLE) as take_memory:
        take_memory()
        error = submit(shared, request).future.exception(RESULT_SECONDS)
    assert isinstance(error, EngineError)
    assert error.code == "out_of_memory"
    assert "rank 1 failed: " in str(error)
    assert "--vae-tile-size" in str(error)
    assert resident_bytes(pids[1]) < held + 32 * MIB
    again = run(shared, request)
    assert strategies(again) == strategies(before)
    assert np.array_equal(again.frames, before.frames)
    assert shared.worker_pids == pids
    assert shared.health().healthy


def test_one_vae_rank_without_tiling_tiles_once(engines: Engines, reference: Reference) -> None:
    engine = Engine(engines.config("t2v on one rank", vae=VaeConfig()))
    try:
        engine.start()
        (pid,) = engine.worker_pids
        request = ask(engine, width=512, height=512, num_frames=1, steps=1)
        before = run(engine, request)
        assert np.array_equal(before.frames, reference.frames("wan2.2-t2v", request, tiled=False))
        with no_more_memory(pid, ENOUGH) as take_memory:
            take_memory()
            result = run(engine, request)
        assert np.array_equal(result.frames, reference.frames("wan2.2-t2v", request, tiles=FAMILY_TILES))
        assert strategies(result) == [("decode", "direct", False), ("decode", "tile", True)]
        assert result.decisions[1]["reason"].startswith("direct: the only VAE rank ran out of memory, asked for ")
        assert [(use.strategy, use.tiles) for use in result.vae_use] == [("tile", 9)]
        again = run(engine, request)
        assert strategies(again) == [("decode", "direct", False)]
        assert np.array_equal(again.frames, before.frames)
        with no_more_memory(pid, LITTLE) as take_memory:
            take_memory()
            error = submit(engine, request).future.exception(RESULT_SECONDS)
        assert isinstance(error, EngineError)
        assert error.code == "out_of_memory"
        assert np.array_equal(run(engine, request).frames, before.frames)
        assert engine.worker_pids == [pid]
    finally:
        engine.close()
