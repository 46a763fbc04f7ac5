# SPDX-License-Identifier: Apache-2.0
"""Which ranks work, which call, and who gets the result."""

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import Worlds
from tests.helpers.vaes import count_calls, decisions, latents, pixels, tiny_vae
from vllm_omni_vae.autoencoders import DistributedAutoencoderKLWan, distribute
from vllm_omni_vae.config import DiffusionParallelConfig
from vllm_omni_vae.errors import ConfigurationError

pytestmark = pytest.mark.distributed

PLACEHOLDER = [1, 3, 1, 1, 1]


def difference(a: torch.Tensor, b: torch.Tensor) -> float | None:
    return float((a.double() - b.double()).abs().max()) if a.shape == b.shape else None


def shared(rank: int, size: int, *, parallel: int, batch: int = 1, **where: Any) -> dict[str, Any]:
    """Case: one decode and one encode with ``distribute(size=parallel, **where)``; what this rank did and got."""
    if where.pop("subgroup", False):
        ranks = where["group"]
        where["group"] = dist.new_group(ranks)
        if rank not in ranks:
            return {}
    plain = tiny_vae()
    z, x = latents(plain, 2, 7, 8, batch=batch), pixels(plain, 5, 56, 64, batch=batch)
    sample, moments = plain.decode(z).sample, plain.encode(x).latent_dist.parameters
    vae = distribute(tiny_vae(), size=parallel, **where)
    taken = decisions(vae)
    decoder_calls, encoder_calls = count_calls(vae.decoder), count_calls(vae.encoder)
    got, got_moments = vae.decode(z).sample, vae.encode(x).latent_dist.parameters
    return {
        "sample": difference(got, sample),
        "shape": list(got.shape),
        "moments": difference(got_moments, moments),
        "decoder": len(decoder_calls),
        "encoder": len(encoder_calls),
        "says it owns": vae._vae_parallel.is_output_rank,
        "tiles": [list(d.tiles_per_rank) for d in taken],
    }


# Each of 3 x 3 tiles takes 2 latents to decode and chunks of 1 and 4 frames to encode: two calls either way.
TILES, CALLS = 9, 2


@pytest.mark.parametrize(
    ("size", "workers", "arguments"),
    [
        (2, [0, 1], {}),
        (3, [0, 1], {}),
        (4, [0, 1], {}),
        (4, [0, 1, 2], {"output_rank": 2}),
        (4, [2, 3], {"group": [2, 3]}),
        (4, [1, 3], {"group": [1, 3], "output_rank": 1}),
        (4, [1, 2], {"group": [1, 2, 3]}),
        (3, [2, 1], {"group": [2, 1]}),
        (2, [1, 0], {"group": [1, 0]}),
        (4, [1, 2], {"group": [1, 2, 3], "subgroup": True}),
        (4, [2, 3], {"group": [2, 3], "subgroup": True, "output_rank": 1}),
        (3, [0, 2], {"group": [0, 2], "broadcast_result": True}),
        (4, [3, 1], {"group": [3, 1], "broadcast_result": True, "output_rank": 1}),
    ],
)
def test_work_and_results_are_where_they_should_be(
    size: int, workers: list[int], arguments: dict[str, Any], worlds: Worlds
) -> None:
    # Members of a subgroup must be in equally many groups, which only a new world promises.
    world = worlds.fresh(size) if arguments.get("subgroup") else worlds[size]
    answers = world.run(shared, parallel=len(workers), **arguments)
    owner = workers[arguments.get("output_rank", 0)]
    everywhere = arguments.get("broadcast_result", False)
    callers = arguments["group"] if arguments.get("subgroup") else range(size)
    for rank, answer in enumerate(answers):
        if rank not in callers:
            assert answer == {}
            continue
        assert answer["moments"] == 0.0, rank
        if everywhere or rank == owner:
            assert answer["sample"] == 0.0, rank
        else:
            assert answer["shape"] == PLACEHOLDER, rank
        assert answer["says it owns"] == (rank == owner), rank
        (tiles, encode_tiles) = answer["tiles"]
        mine = tiles[sorted(workers).index(rank)] if rank in workers else 0
        mine_encoding = encode_tiles[sorted(workers).index(rank)] if rank in workers else 0
        assert (answer["decoder"], answer["encoder"]) == (mine * CALLS, mine_encoding * CALLS), rank
        assert sum(tiles) == sum(encode_tiles) == TILES
        assert min(tiles) > 0


def fallback(rank: int, size: int, *, parallel: int, group: list[int] | None) -> dict[str, Any]:
    """Case: `distribute` with more ranks than there are."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("vllm_omni_vae").addHandler(handler)
    plain = tiny_vae(tiled=False)
    kind, settings = type(plain).__name__, dict(plain.__dict__)
    try:
        vae = distribute(plain, size=parallel, group=group)
    finally:
        logging.getLogger("vllm_omni_vae").removeHandler(handler)
    return {
        "warnings": [r.getMessage() for r in records if r.levelno >= logging.WARNING],
        "enabled": vae._vae_parallel is not None if hasattr(vae, "_vae_parallel") else False,
        "size": vae._vae_parallel.size if getattr(vae, "_vae_parallel", None) else 1,
        "untouched": type(vae).__name__ == kind and settings["use_tiling"] == vae.use_tiling,
    }


@pytest.mark.parametrize(
    ("size", "parallel", "group", "used"), [(2, 8, None, 2), (3, 4, None, 3), (4, 3, [1, 3], 2), (4, 2, [2, 3], 2)]
)
def test_more_ranks_than_there_are_fall_back_with_one_warning(
    size: int, parallel: int, group: list[int] | None, used: int, worlds: Worlds
) -> None:
    for answer in worlds[size].run(fallback, parallel=parallel, group=group):
        assert (answer["enabled"], answer["size"]) == (True, used)
        assert len(answer["warnings"]) == (parallel > used)
        assert all(f"{parallel} falls back to {used}" in text for text in answer["warnings"])


def test_a_fallback_to_one_rank_changes_nothing(worlds: Worlds) -> None:
    for answer in worlds[2].run(fallback, parallel=2, group=[1]):
        assert len(answer["warnings"]) == 1
        assert answer["untouched"]


def refused(rank: int, size: int, *, parallel: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Case: `distribute` refuses; the VAE stays as it was, and the next try works."""
    vae = tiny_vae(tiled=False)
    kind = type(vae)
    try:
        distribute(vae, size=parallel, **arguments)
        reason = ""
    except ConfigurationError as error:
        reason = str(error)
    untouched = type(vae) is kind and not vae.use_tiling and not hasattr(vae, "_vae_parallel")
    distribute(vae, size=size)
    return {"reason": reason, "untouched": untouched, "then": vae.is_distributed_enabled()}


@pytest.mark.parametrize(
    ("parallel", "arguments", "reason"),
    [
        (0, {}, "VAE parallel size is 0"),
        (2, {"output_rank": 2}, "output_rank 2 is not one of the 2 VAE ranks"),
        (2, {"output_rank": -1}, "output_rank -1"),
        (2, {"group": [0, 7]}, r"VAE ranks [0, 7] are not distinct ranks of [0, 1]"),
        (2, {"group": [1, 1]}, r"VAE ranks [1, 1] are not distinct"),
        (2, {"mode": "rank_split"}, "'rank_split' is not known"),
    ],
)
def test_ranks_that_cannot_be_are_refused(
    parallel: int, arguments: dict[str, Any], reason: str, worlds: Worlds
) -> None:
    for answer in worlds[2].run(refused, parallel=parallel, arguments=arguments):
        assert reason in answer["reason"]
        assert answer["untouched"]
        assert answer["then"]


def among_other_messages(rank: int, size: int) -> dict[str, Any]:
    """Case: messages of the world's own group are under way while the VAE works, and the VAE's own are not mixed up."""
    plain = tiny_vae()
    z, x = latents(plain, 2, 9, 9), pixels(plain, 5, 72, 72)
    sample, moments = plain.decode(z).sample, plain.encode(x).latent_dist.parameters
    vae = distribute(tiny_vae(), size=size, broadcast_result=True)
    after, before = (rank + 1) % size, (rank - 1) % size
    outgoing = torch.full((7,), float(rank))
    incoming, total = torch.zeros(7), torch.ones(5)
    sending = dist.isend(outgoing, after)
    reducing = dist.all_reduce(total, async_op=True)
    got = vae.decode(z).sample
    receiving = dist.irecv(incoming, before)
    got_moments = vae.encode(x).latent_dist.parameters
    for work in (sending, receiving, reducing):
        work.wait()
    return {
        "sample": difference(got, sample),
        "moments": difference(got_moments, moments),
        "message": incoming.tolist() == [float(before)] * 7,
        "total": total.tolist() == [float(size)] * 5,
    }


@pytest.mark.parametrize("size", [2, 3])
def test_the_world_s_own_messages_pass_through(size: int, worlds: Worlds) -> None:
    answers = worlds[size].run(among_other_messages)
    assert answers == [{"sample": 0.0, "moments": 0.0, "message": True, "total": True}] * size


def two_vaes(rank: int, size: int) -> list[float | None]:
    """Case: two VAEs on crossing groups, called in turn."""
    plain = tiny_vae()
    z, x = latents(plain, 1, 7, 8), pixels(plain, 1, 56, 64)
    sample, moments = plain.decode(z).sample, plain.encode(x).latent_dist.parameters
    first = distribute(tiny_vae(), size=2, group=[0, 2], broadcast_result=True)
    second = distribute(tiny_vae(), size=2, group=[2, 1], broadcast_result=True)
    found = []
    for _ in range(2):
        found += [difference(vae.decode(z).sample, sample) for vae in (first, second)]
        found += [difference(vae.encode(x).latent_dist.parameters, moments) for vae in (second, first)]
    return found


def test_two_vaes_share_ranks(worlds: Worlds) -> None:
    assert worlds[3].run(two_vaes) == [[0.0] * 8] * 3


def switched(rank: int, size: int) -> list[Any]:
    """Case: one VAE goes from two ranks to all, to one, and back."""
    plain = tiny_vae()
    z = latents(plain, 1, 7, 8)
    sample = plain.decode(z).sample
    vae = distribute(tiny_vae(), size=2, broadcast_result=True)
    found = [difference(vae.decode(z).sample, sample)]
    vae.init_distributed()
    calls = count_calls(vae.decoder)
    owned = vae.decode(z).sample
    found += [difference(owned, sample) if rank == 0 else list(owned.shape), len(calls)]
    vae.set_parallel_size(1)
    calls.clear()
    found += [vae.is_distributed_enabled(), difference(vae.decode(z).sample, sample), len(calls)]
    vae.init_distributed([0, 1])
    owned = vae.decode(z).sample
    found += [difference(owned, sample) if rank == 0 else list(owned.shape)]
    return found


def test_the_number_of_ranks_can_be_changed(worlds: Worlds) -> None:
    answers = worlds[3].run(switched)
    shares = [answer.pop(2) for answer in answers]
    assert min(shares) > 0
    assert sum(shares) == TILES
    first, *others = answers
    assert first == [0.0, 0.0, False, 0.0, TILES, 0.0]
    assert others == [[0.0, PLACEHOLDER, False, 0.0, TILES, PLACEHOLDER]] * 2


def implied(rank: int, size: int) -> Any:
    """Case: tiling is off when the ranks are asked to share the work through the class's own methods."""
    found = []
    for share in ("init_distributed", "set_parallel_size"):
        vae = tiny_vae(tiled=False)
        vae.tile_sample_min_height = vae.tile_sample_min_width = 32
        vae.tile_sample_stride_height = vae.tile_sample_stride_width = 24
        vae.__class__ = DistributedAutoencoderKLWan
        if share == "init_distributed":
            vae.init_distributed()
        else:
            vae.set_parallel_size(size)
        taken = decisions(vae)
        vae.decode(latents(vae, 1, 7, 8))
        found.append([vae.use_tiling, taken[0].strategy.value])
    return found


def test_sharing_implies_tiling(worlds: Worlds) -> None:
    assert worlds[2].run(implied) == [[[True, "tile"]] * 2] * 2


def by_configuration(rank: int, size: int, *, text: str) -> Any:
    """Case: a configuration's values go straight into `distribute`."""
    config = DiffusionParallelConfig(vae_patch_parallel_size=size, vae_parallel_mode=text)
    vae = distribute(tiny_vae(), size=config.vae_patch_parallel_size, mode=config.vae_parallel_mode)
    taken = decisions(vae)
    vae.decode(latents(vae, 1, 7, 8))
    return taken[0].to_json()


def test_the_mode_is_taken_and_auto_says_why(worlds: Worlds) -> None:
    first, second = worlds[2].run(by_configuration, text="tile")
    assert (first["strategy"], first["reason"]) == ("tile", "as configured")
    assert first == second
    first, second = worlds[2].run(by_configuration, text="auto")
    assert first["reason"].startswith("auto: ")
    assert first == second
