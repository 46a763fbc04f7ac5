# SPDX-License-Identifier: Apache-2.0
"""One traced request: a file of every rank that a trace viewer reads, with a range for all that the job did."""

import dataclasses
import gzip
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.engine.engines import Engines, ask, run, submit
from vllm_omni_vae.engine.engine import Engine
from vllm_omni_vae.errors import ConfigurationError, EngineError, RequestError

pytestmark = pytest.mark.distributed

STEPS = 2
TILES = [3 * 4, 3 * 4]  # of an encode and of a decode of `ask`: 8x10 latents in tiles of 4 every 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces") / "made at start"


@pytest.fixture(scope="module")
def engine(engines: Engines, folder: Path) -> Iterator[Engine]:
    engine = Engine(engines.config("i2v", torch_profiler_dir=str(folder)))
    try:
        engine.start()
        yield engine
    finally:
        engine.close()


def ranges(path: Path) -> Counter[str]:
    """How often each named range is in the trace."""
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") == "user_annotation")


def test_every_rank_writes_what_it_did(engine: Engine, folder: Path) -> None:
    plain = run(engine, ask(engine, steps=STEPS))
    assert plain.traces == ()
    assert list(folder.iterdir()) == []
    handle = submit(engine, ask(engine, steps=STEPS, trace=True))
    result = handle.future.result(60)
    assert np.array_equal(result.frames, plain.frames)
    assert result.traces == tuple(f"{handle.id}/rank{rank}.json.gz" for rank in (0, 1))
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*")) == sorted(result.traces)
    made = [ranges(folder / name) for name in result.traces]
    for rank, found in enumerate(made):
        assert found["vae encode"] == found["vae decode"] == 1
        assert found["gather"] == 2
        assert sum(count for name, count in found.items() if name.startswith("denoise step ")) == (0 if rank else STEPS)
    both = sum(made, Counter())
    tiles = {name: count for name, count in both.items() if name.startswith("tile ")}
    assert tiles == {f"tile 0, {row}, {column}": 2 for row in range(3) for column in range(4)}
    assert sum(tiles.values()) == sum(TILES)
    # Two latent frames: the decoder takes each by itself, and so does the encoder.
    assert both["vae encoder"] == 2 * TILES[0]
    assert both["vae decoder"] == 2 * TILES[1]


def test_a_job_that_fails_is_traced_too_and_the_next_is_not(engine: Engine, folder: Path) -> None:
    impossible = dataclasses.replace(ask(engine, trace=True), num_inference_steps=0)
    handle = submit(engine, impossible)
    with pytest.raises(EngineError, match="IndexError"):
        handle.future.result(60)
    assert (folder / handle.id / "rank0.json.gz").exists()
    before = len(list(folder.iterdir()))
    assert run(engine, ask(engine)).traces == ()
    assert len(list(folder.iterdir())) == before


def test_halos_of_a_shard_are_named(engines: Engines, tmp_path: Path) -> None:
    engine = Engine(engines.config("i2v, one map on two ranks", torch_profiler_dir=str(tmp_path)))
    try:
        engine.start()
        result = run(engine, ask(engine, trace=True))
    finally:
        engine.close()
    for name in result.traces:
        found = ranges(tmp_path / name)
        assert found["halo exchange"] > 0
        assert found["vae encoder"] == found["vae decoder"] == 2
        assert not any(other.startswith("tile ") for other in found)


def test_without_a_folder_it_is_refused(engines: Engines) -> None:
    engine = Engine(engines.config("i2v"))  # not started
    try:
        with pytest.raises(RequestError, match="--torch-profiler-dir") as refused:
            ask(engine, trace=True)
        assert (refused.value.param, refused.value.status) == ("trace", 400)
    finally:
        engine.close()


def test_a_folder_that_cannot_be_made_is_refused_at_the_start(engines: Engines, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="torch_profiler_dir"):
        Engine(engines.config("i2v", torch_profiler_dir=str(tmp_path / "file" / "below")))
