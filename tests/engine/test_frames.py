# SPDX-License-Identifier: Apache-2.0
"""A clip has the same frames on one, two and three ranks as in diffusers alone, and its decisions say why."""

import logging
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.engine.engines import RESULT_SECONDS, SETUPS, Engines, Tape, ask, cancel_when, during, picture, run
from tests.engine.processes import children
from tests.engine.reference import Reference
from vllm_omni_vae.engine.engine import Engine
from vllm_omni_vae.errors import Cancelled
from vllm_omni_vae.pipelines.request import ComponentReport, GenerationRequest, GenerationResult, Stage

pytestmark = pytest.mark.distributed


class Clip(NamedTuple):
    """Width and height in latents of the pixels that are asked for, and frames."""

    width: int
    height: int
    frames: int = 5


LARGE, FLAT, STILL, SMALL = Clip(10, 8), Clip(6, 2), Clip(10, 8, 1), Clip(4, 4)
CLIPS = (LARGE, SMALL, FLAT, STILL, LARGE)
"""Tiled; direct; fewer tiles than ranks; one frame; and tiled again on the same engine."""

Shared = tuple[tuple[int, int, int], tuple[int, ...]]
"""The tile grid (time, height, width) and each rank's tiles."""

_TILES: dict[Clip, dict[int, Shared]] = {
    LARGE: {1: ((1, 3, 4), (12,)), 2: ((1, 3, 4), (6, 6)), 3: ((1, 3, 4), (4, 4, 4))},
    FLAT: {1: ((1, 1, 2), (2,)), 2: ((1, 1, 2), (1, 1)), 3: ((1, 1, 2), (1, 1, 0))},
}
_TILES[STILL] = _TILES[LARGE]
# Diffusers does not divide an encode tile by TI2V-5B's patch, so it spans twice the pixels of a decode tile.
_PATCHIFIED: dict[Clip, Shared] = {LARGE: ((1, 2, 2), (1, 3)), FLAT: ((1, 1, 1), (1, 0)), STILL: ((1, 2, 2), (1, 3))}


def decisions(result: GenerationResult) -> dict[str, Any]:
    """Strategy, grid and tiles per rank, by operation."""
    return {d["operation"]: (d["strategy"], tuple(d["grid"]), tuple(d["tiles_per_rank"])) for d in result.decisions}


def expected_decisions(family: str, clip: Clip, ranks: int, *, encodes: bool) -> dict[str, Any]:
    direct = ("direct", (1, 1, 1), ())
    decode = direct if clip is SMALL else ("tile", *_TILES[clip][ranks])
    encode = decode
    if family == "wan2.2-ti2v-5b" and clip is not SMALL:
        encode = ("tile", *_PATCHIFIED[clip])
    return {"encode": encode, "decode": decode} if encodes else {"decode": decode}


def request_of(engine: Engine, family: str, clip: Clip, *, with_image: bool) -> GenerationRequest:
    unit = 16 if family == "wan2.2-ti2v-5b" else 8
    width, height = clip.width * unit, clip.height * unit
    image = picture(width, height) if with_image else None
    return ask(engine, width=width, height=height, num_frames=clip.frames, image=image)


def check_clips(engine: Engine, name: str, ranks: int, reference: Reference, *, tolerance: int = 0) -> None:
    """Make `CLIPS` for every task of the engine's model and compare frames and decisions."""
    family = SETUPS[name].family
    for with_image in (task.needs_image for task in sorted(engine.card.tasks)):
        for clip in CLIPS:
            request = request_of(engine, family, clip, with_image=with_image)
            result = run(engine, request)
            assert decisions(result) == expected_decisions(family, clip, ranks, encodes=with_image), clip
            expected = reference.frames(family, request)
            assert result.frames.shape == expected.shape == (clip.frames, request.height, request.width, 3)
            difference = int(np.abs(result.frames.astype(int) - expected).max())
            assert difference <= tolerance, clip
            assert expected.std() > 10, "a flat picture proves nothing"


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("i2v, ulysses and a follower", 3),
        ("i2v", 2),
        ("t2v, ulysses", 2),
        ("ti2v with a surplus rank", 2),
        ("t2v, sharded weights and a follower", 3),
    ],
)
def test_frames_are_diffusers_own_on_several_ranks(
    name: str, ranks: int, engines: Engines, reference: Reference
) -> None:
    engine = engines[name]
    assert engine.report == (ComponentReport("vae", "AutoencoderKLWan", True, f"tile on {ranks} ranks"),)
    assert (engine.device, engine.dtype) == ("cpu", "float32")
    assert len(engine.worker_pids) == engine.config.parallel.world_size
    # A denoiser on several ranks sums over other shapes, which rounds differently: a value may become the next of 255.
    check_clips(engine, name, ranks, reference, tolerance=int(engine.config.parallel.dit_world_size > 1))


def test_one_map_on_two_ranks_gives_the_untiled_clip(engines: Engines, reference: Reference) -> None:
    engine = engines["i2v, one map on two ranks"]
    for clip in (LARGE, SMALL, STILL, LARGE):
        request = request_of(engine, "wan2.2-i2v", clip, with_image=True)
        tape = Tape()
        result = run(engine, request, tape)
        strategy = "direct" if clip is SMALL else "spatial_shard_width"
        assert [(d["operation"], d["strategy"]) for d in result.decisions] == [
            ("encode", strategy),
            ("decode", strategy),
        ]
        expected = reference.frames("wan2.2-i2v", request, tiled=False)
        difference = int(np.abs(result.frames.astype(int) - expected).max())
        assert difference <= 1, clip  # float32 sums in another order, rounded to one of 255
        assert tape.stages == [Stage.ENCODE, Stage.DENOISE, Stage.DECODE]
    pids = engine.worker_pids
    handle, tape = cancel_when(engine, request, during(Stage.DECODE, done=0))
    with pytest.raises(Cancelled):
        handle.future.result(RESULT_SECONDS)
    assert run(engine, request).frames.tobytes() == result.frames.tobytes()
    assert engine.worker_pids == pids


def test_more_vae_ranks_than_there_are_fall_back_with_one_warning(
    engines: Engines, reference: Reference, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    name = "i2v on what one rank there is"
    before = children()
    with caplog.at_level(logging.WARNING, "vllm_omni_vae"):
        engine = Engine(engines.config(name))
    assert [record.getMessage() for record in caplog.records] == [
        "VAE parallel size 2 falls back to 1, all the ranks there are"
    ]
    try:
        engine.start()
        assert engine.report == (ComponentReport("vae", "AutoencoderKLWan", False, "one VAE rank"),)
        assert len(engine.worker_pids) == len(children() - before) == 1
        check_clips(engine, name, 1, reference)
    finally:
        engine.close()
    assert "falls back" not in capfd.readouterr().err
    assert children() == before
