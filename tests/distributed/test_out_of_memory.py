# SPDX-License-Identifier: Apache-2.0
"""A rank whose allocator fails: a shard is run in tiles on all ranks, tiles fail cleanly, and nothing stays."""

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.distributed.ranks import World
from tests.distributed.test_failures import clean, outcome
from tests.helpers.memory import at_most, keep_no_reserve, tensor_bytes
from tests.helpers.vaes import decisions, latents, pixels, tiny_vae
from vllm_omni_vae.autoencoders import distribute
from vllm_omni_vae.config import IN_TILES, VaeSplits

pytestmark = pytest.mark.distributed

SECONDS = 60.0
MIB = 2**20
SIDE = 32  # latents
ENOUGH = 12 * MIB
"""For tiles and their result; the largest tensor of a piece takes 27 MiB."""
WIDTH = "spatial_shard_width"
SMALL, LARGE = (32, 32, 24, 24), (224, 224, 192, 192)
"""Tiles; a large one needs as much as a piece."""


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Its ranks keep no freed memory, which would be slow for other tests."""
    running = World(2, tmp_path_factory.mktemp("world"))
    yield running
    running.close()


def shard(rank: int, size: int, *, operation: str, poor: int, extra: int, **how: Any) -> Any:
    """Case: a call without a limit, one in which rank ``poor`` gets ``extra`` bytes, and one without again."""
    keep_no_reserve()
    heard = _Heard()
    logging.getLogger("vllm_omni_vae").addHandler(heard)
    tiled, vae = tiny_vae(), tiny_vae()
    splits = VaeSplits(**how["splits"]) if "splits" in how else IN_TILES
    mode = "tile" if "splits" in how else WIDTH
    for one, given in ((tiled, {"mode": "tile"}), (vae, {"mode": mode, "splits": splits})):
        one.enable_tiling(*how.get("tile", SMALL))
        distribute(one, size=size, merge=how.get("merge", "blend"), broadcast_result=True, **given)
    x = latents(vae, 1, SIDE, SIDE) if operation == "decode" else pixels(vae, 1, 8 * SIDE, 8 * SIDE)

    def call(one: Any) -> torch.Tensor:
        if operation == "decode":
            return one.decode(x).sample
        return one.encode(x).latent_dist.parameters

    in_tiles, sharded = call(tiled), call(vae)
    heard.lines.clear()
    taken = decisions(vae)
    results: list[torch.Tensor] = []
    before, start = tensor_bytes(), time.monotonic()
    with at_most(extra if rank == poor else None):
        error = outcome(lambda: results.append(call(vae)))
    quick = time.monotonic() - start < SECONDS
    equal = torch.equal(results.pop(), in_tiles) if results else None
    left = tensor_bytes() - before
    limited = [(d.strategy.value, d.fallback, d.reason, d.merge.value) for d in taken]
    taken.clear()
    again = torch.equal(call(vae), sharded)
    logging.getLogger("vllm_omni_vae").removeHandler(heard)
    return {
        "error": error,
        "equal": equal,
        "decisions": limited,
        "warnings": heard.lines,
        "left": left,
        "clean": clean(vae),
        "quick": quick,
        "again": [again, [d.strategy.value for d in taken]],
        "apart": not torch.equal(sharded, in_tiles),
    }


@pytest.mark.parametrize("poor", [0, 1])
@pytest.mark.parametrize("operation", ["decode", "encode"])
def test_a_shard_that_does_not_fit_is_run_in_tiles(operation: str, poor: int, world: World) -> None:
    answers = world.run(shard, seconds=SECONDS, operation=operation, poor=poor, extra=ENOUGH)
    for rank, answer in enumerate(answers):
        assert answer["error"] == []
        assert answer["equal"] is True, "it is not what tiles make"
        assert answer["apart"], "a shard would have made the same"
        first, second = answer["decisions"]
        assert first == [WIDTH, False, "as configured", "blend"]
        assert second[:2] == ["tile", True]
        assert second[2].startswith(f"{WIDTH}: rank {poor} ran out of memory, asked for ")
        assert second[2].endswith(" bytes more")
        assert len(answer["warnings"]) == (1 if rank == 0 else 0), "one for each distinct decision, on the output rank"
        assert all(second[2] in line for line in answer["warnings"])
        assert answer["left"] == 0
        assert answer["clean"]
        assert answer["again"] == [True, [WIDTH]]


def test_tiles_that_are_summed_are_summed_the_second_time(world: World) -> None:
    answers = world.run(shard, seconds=SECONDS, operation="decode", poor=1, extra=ENOUGH, merge="sum")
    for answer in answers:
        assert answer["equal"] is True
        assert [decision[3] for decision in answer["decisions"]] == ["blend", "sum"]


@pytest.mark.parametrize("operation", ["decode", "encode"])
def test_a_piece_that_does_not_fit_is_run_in_tiles(operation: str, world: World) -> None:
    splits = {operation: 2}
    for answer in world.run(shard, seconds=SECONDS, operation=operation, poor=1, extra=ENOUGH, splits=splits):
        assert answer["error"] == []
        assert answer["equal"] is True
        assert answer["apart"]
        first, second = answer["decisions"]
        assert first[:2] == ["rank_split", False]
        assert second[:2] == ["tile", True]
        assert second[2].startswith("rank_split: rank 1 ran out of memory, asked for ")
        assert answer["left"] == 0
        assert answer["again"] == [True, ["rank_split"]]


@pytest.mark.parametrize("poor", [0, 1])
@pytest.mark.parametrize("operation", ["decode", "encode"])
def test_where_tiles_do_not_fit_either_every_rank_hears_of_it_and_nothing_stays(
    operation: str, poor: int, world: World
) -> None:
    answers = world.run(shard, seconds=SECONDS, operation=operation, poor=poor, extra=4 * MIB, tile=LARGE)
    for answer in answers:
        kind, message = answer["error"]
        assert kind == "RankMemoryError"
        assert message.startswith(f"rank {poor} failed: ")
        assert [decision[0] for decision in answer["decisions"]] == [WIDTH, "tile"], "it was tried once more, and once"
        assert answer["quick"]
        assert answer["left"] == 0
        assert answer["clean"]
        assert answer["again"] == [True, [WIDTH]]
