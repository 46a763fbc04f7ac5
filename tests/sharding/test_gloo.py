# SPDX-License-Identifier: Apache-2.0
"""Spatial shards on real processes: every mode through the public calls, where results lie, and what goes wrong."""

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import World, Worlds
from tests.helpers.vaes import decisions, latents, pixels, tiny_vae
from vllm_omni_vae.autoencoders import distribute
from vllm_omni_vae.errors import Cancelled

pytestmark = pytest.mark.distributed

HEIGHT, WIDTH, GRID = "spatial_shard_height", "spatial_shard_width", "spatial_shard_grid"
SECONDS = 20.0
EXACT = 1e-12
PLACEHOLDER = [1, 3, 1, 1, 1]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    running = Worlds(tmp_path_factory.mktemp("worlds"))
    yield running
    running.close()


def difference(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """Largest difference over the scale of ``b``; None if the shapes differ."""
    return float((a - b).abs().max() / b.abs().max()) if a.shape == b.shape else None


def outcome(call: Callable[[], Any]) -> list[str]:
    """Type and message of what ``call`` raises; empty if it returns."""
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


def clean(vae: Any) -> bool:
    return all(entry is None for cache in (vae._feat_map, vae._enc_feat_map) for entry in cache)


def untiled() -> Any:
    return tiny_vae(dtype=torch.float64, tiled=False)


def in_turn(rank: int, size: int, *, modes: list[str]) -> Any:
    """Case: one VAE in one mode after the other, with a small request after each, and other traffic in the middle."""
    whole, tiled, vae = untiled(), tiny_vae(dtype=torch.float64), tiny_vae(dtype=torch.float64)
    z, x = latents(vae, 2, 5, 9), pixels(vae, 5, 44, 72)
    small = latents(vae, 1, 4, 3)
    references = {
        "tile": (tiled.decode(z).sample, tiled.encode(x).latent_dist.parameters),
        "shard": (whole.decode(z).sample, whole.encode(x).latent_dist.parameters),
    }
    small_sample = whole.decode(small).sample
    kept = z.clone(), x.clone()
    sums = []

    def meanwhile(*_: Any) -> None:
        """Somebody else's collective, in the middle of the network."""
        total = torch.full((3,), rank + 1.0)
        dist.all_reduce(total)
        sums.append(total.tolist())

    found = []
    for mode in modes:
        distribute(vae, size=size, mode=mode, broadcast_result=True)
        taken = decisions(vae)
        sharded = mode != "tile"
        hook = vae.decoder.mid_block.register_forward_hook(meanwhile) if sharded else None
        sample = vae.decode(z).sample
        if hook:
            hook.remove()
        moments = vae.encode(x).latent_dist.parameters
        wanted = references["shard" if sharded else "tile"]
        found.append(
            {
                "mode": mode,
                "strategies": [d.strategy.value for d in taken],
                "grids": [list(d.rank_grid) for d in taken],
                "errors": [difference(sample, wanted[0]), difference(moments, wanted[1])],
                "small": difference(vae.decode(small).sample, small_sample),
                "clean": clean(vae),
            }
        )
    return {
        "found": found,
        "others' traffic": all(s == [size * (size + 1) / 2] * 3 for s in sums) and len(sums) > 0,
        "inputs": torch.equal(z, kept[0]) and torch.equal(x, kept[1]),
    }


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_mode_in_turn_on_one_vae(size: int, worlds: Worlds) -> None:
    modes = [GRID, "tile", HEIGHT, "auto", WIDTH, "tile", GRID]
    grids = {HEIGHT: [size, 1], WIDTH: [1, size], GRID: [2, 2] if size == 4 else [1, size], "tile": [1, 1]}
    # 5x9 latents on 4 ranks: 5 + 9 latents of seams in a grid against 3 * 5 along the width.
    strategies = {m: m for m in modes} | {"auto": GRID if size == 4 else WIDTH}
    for answer in worlds[size].run(in_turn, modes=modes):
        assert [one["mode"] for one in answer["found"]] == modes
        for one in answer["found"]:
            strategy = strategies[one["mode"]]
            assert one["strategies"] == [strategy] * 2, one
            assert one["grids"] == [grids[strategy]] * 2, one
            limit = 0.0 if strategy == "tile" else EXACT
            assert max(one["errors"]) <= limit, one
            assert one["small"] == 0.0, one
            assert one["clean"], one
        assert answer["others' traffic"]
        assert answer["inputs"]


def placed(rank: int, size: int, *, parallel: int, mode: str, **where: Any) -> Any:
    """Case: one decode and one encode where only some ranks work, or only one gets the result."""
    plain = untiled()
    z, x = latents(plain, 2, 5, 6), pixels(plain, 5, 40, 48)
    sample, moments = plain.decode(z).sample, plain.encode(x).latent_dist.parameters
    if where.pop("subgroup", False):
        ranks = where["group"]
        where["group"] = dist.new_group(ranks)
        if rank not in ranks:
            return {}
    vae = distribute(tiny_vae(dtype=torch.float64), size=parallel, mode=mode, **where)
    taken = decisions(vae)
    calls = []
    vae.decoder.register_forward_pre_hook(lambda _, args: calls.append(list(args[0].shape[-2:])))
    got, got_moments = vae.decode(z).sample, vae.encode(x).latent_dist.parameters
    return {
        "sample": difference(got, sample),
        "shape": list(got.shape),
        "moments": difference(got_moments, moments),
        "decoder": calls,
        "owns": vae.parallel_state.is_output_rank,
        "strategies": [d.strategy.value for d in taken],
    }


@pytest.mark.parametrize(
    ("size", "workers", "owner", "arguments"),
    [
        (2, [0, 1], 1, {"mode": WIDTH, "output_rank": 1}),
        (3, [0, 1], 0, {"mode": HEIGHT}),
        (3, [1, 2], 2, {"mode": WIDTH, "group": [1, 2], "output_rank": 1}),
        (4, [1, 3], 1, {"mode": HEIGHT, "group": [1, 3]}),
        (4, [1, 3], 3, {"mode": WIDTH, "group": [1, 3], "output_rank": 1, "broadcast_result": True}),
        (4, [1, 3], 1, {"mode": WIDTH, "group": [3, 1], "output_rank": 1, "broadcast_result": True}),
        (4, [0, 1, 2, 3], 2, {"mode": GRID, "output_rank": 2}),
        (4, [0, 1, 2, 3], 3, {"mode": GRID, "output_rank": 3, "broadcast_result": True}),
        (4, [1, 2, 3], 1, {"mode": HEIGHT, "group": [1, 2, 3], "subgroup": True}),
    ],
)
def test_work_and_results_are_where_they_should_be(
    size: int, workers: list[int], owner: int, arguments: dict[str, Any], worlds: Worlds
) -> None:
    # Members of a subgroup must be in equally many groups, which only a new world promises.
    world = worlds.fresh(size) if arguments.get("subgroup") else worlds[size]
    pieces = {
        HEIGHT: [[5 // len(workers) + (i < 5 % len(workers)), 6] for i in range(len(workers))],
        WIDTH: [[5, 6 // len(workers)]] * len(workers),
        GRID: [[3, 3], [3, 3], [2, 3], [2, 3]],
    }[arguments["mode"]]
    for rank, answer in enumerate(world.run(placed, parallel=len(workers), **arguments)):
        if arguments.get("subgroup") and rank not in workers:
            assert answer == {}
            continue
        assert answer["strategies"] == [arguments["mode"]] * 2
        assert answer["moments"] <= EXACT
        if rank == owner or arguments.get("broadcast_result"):
            assert answer["sample"] <= EXACT
        else:
            assert answer["shape"] == PLACEHOLDER
        assert answer["owns"] == (rank == owner)
        frames = 1 + (1 if rank in workers else -1)  # two latent frames, taken one after the other
        assert answer["decoder"] == ([pieces[workers.index(rank)]] * frames if rank in workers else [])


def counted(rank: int, size: int, *, mode: str, time: int) -> Any:
    """Case: messages that travel in the middle of one decode."""
    vae = distribute(tiny_vae(), size=size, mode=mode)
    halo, work = vae.parallel_state.groups.halo.traffic, vae.parallel_state.groups.work.traffic
    convolutions = []
    for module in vae.decoder.modules():
        causal = hasattr(module, "_padding") and module._padding[0] > 0
        plain = isinstance(module, torch.nn.Conv2d) and module.padding != (0, 0)
        if causal or plain:
            module.register_forward_pre_hook(lambda *_: convolutions.append(1))
    before = halo.messages, work.messages
    vae.decode(latents(vae, time, 16, 18))
    return {
        "convolutions": len(convolutions),
        "halo": halo.messages - before[0],
        "work": work.messages - before[1],
        "collectives": halo.collectives,
    }


@pytest.mark.parametrize(
    ("size", "mode", "neighbours"),
    [(2, HEIGHT, [1, 1]), (3, WIDTH, [1, 2, 1]), (4, HEIGHT, [1, 2, 2, 1]), (4, GRID, [2, 2, 2, 2])],
)
def test_one_message_for_each_convolution_and_neighbour(
    size: int, mode: str, neighbours: list[int], worlds: Worlds
) -> None:
    time = 3
    # A shard of fewer than 128 positions takes 2 latent frames at a time after the first.
    calls = 3 if size == 2 else 2
    for rank, answer in enumerate(worlds[size].run(counted, mode=mode, time=time)):
        assert answer["convolutions"] == 25 * calls
        attention = calls * (size - 1)
        assert answer["halo"] == 25 * calls * neighbours[rank] + attention
        assert answer["work"] == (rank != 0)
        assert answer["collectives"] == {"all_gather_uneven": calls}


def failing(
    rank: int,
    size: int,
    *,
    mode: str,
    turns: list[int],
    kind: str = "ValueError",
    group: list[int] | None = None,
    elsewhere: list[int] | None = None,
) -> Any:
    """Case: one rank after another raises in the middle of a sharded call, and each time the next calls are right.

    The ranks ``elsewhere`` are in one more process group, as an engine's are.
    """
    if elsewhere:
        dist.new_group(elsewhere)
    plain, vae = untiled(), tiny_vae(dtype=torch.float64)
    distribute(vae, size=len(group) if group else size, mode=mode, group=group, broadcast_result=True)
    z, x = latents(vae, 2, 5, 6), pixels(vae, 5, 40, 48)
    sample, moments = plain.decode(z).sample, plain.encode(x).latent_dist.parameters
    errors = {"ValueError": ValueError, "OutOfMemoryError": torch.OutOfMemoryError, "Cancelled": Cancelled}

    def fail(*_: Any) -> None:
        raise errors[kind](f"odd on {rank}")

    found = []
    for turn, bad in enumerate(turns):
        hooks = []
        if rank == bad:
            places = (vae.decoder.up_blocks[1], vae.encoder.down_blocks[2])
            hooks = [place.register_forward_hook(fail) for place in places]
        start = time.monotonic()
        heard = outcome(lambda: vae.decode(z)) if turn % 2 == 0 else outcome(lambda: vae.encode(x))
        seconds = time.monotonic() - start
        still_clean = clean(vae)
        for hook in hooks:
            hook.remove()
        errors_now = [
            difference(vae.decode(z).sample, sample),
            difference(vae.encode(x).latent_dist.parameters, moments),
        ]
        found.append({"heard": heard, "quick": seconds < SECONDS / 2, "clean": still_clean, "errors": errors_now})
    return found


def told_and_well(answers: list[Any], turns: list[int], kind: str, names: list[int]) -> None:
    for answer in answers:
        for bad, name, one in zip(turns, names, answer, strict=True):
            if kind == "Cancelled":
                assert one["heard"][0] == "Cancelled"
            else:
                known_as = "RankMemoryError" if kind == "OutOfMemoryError" else "RankError"
                assert one["heard"] == [known_as, f"rank {name} failed: {kind}: odd on {bad}"]
            assert one["quick"]
            assert one["clean"]
            assert max(one["errors"]) <= EXACT


@pytest.mark.parametrize(("size", "mode", "bad"), [(2, HEIGHT, 1), (3, WIDTH, 1), (3, HEIGHT, 0), (4, GRID, 3)])
def test_one_rank_raises_in_the_middle(size: int, mode: str, bad: int, worlds: Worlds) -> None:
    answers = worlds[size].run(failing, seconds=SECONDS, mode=mode, turns=[bad], kind="OutOfMemoryError")
    told_and_well(answers, [bad], "OutOfMemoryError", [bad])


@pytest.mark.parametrize(("size", "mode", "turns"), [(2, HEIGHT, [0, 1, 0, 1]), (3, WIDTH, [2, 0, 1])])
def test_rank_after_rank_raises(size: int, mode: str, turns: list[int], worlds: Worlds) -> None:
    """Each failure costs a process group, and every one of them must come back."""
    answers = worlds[size].run(failing, seconds=SECONDS, mode=mode, turns=turns)
    told_and_well(answers, turns, "ValueError", turns)


@pytest.mark.parametrize(("size", "elsewhere"), [(2, [0]), (3, [1, 2])])
def test_ranks_in_unequally_many_process_groups_recover(size: int, elsewhere: list[int], worlds: Worlds) -> None:
    answers = worlds[size].run(failing, seconds=SECONDS, mode=WIDTH, turns=[1, 0], elsewhere=elsewhere)
    told_and_well(answers, [1, 0], "ValueError", [1, 0])


def test_a_rank_of_an_offset_group_raises(worlds: Worlds) -> None:
    """Callers outside of the group hear of it too where the result is theirs."""
    answers = worlds[4].run(failing, seconds=SECONDS, mode=HEIGHT, turns=[3, 1], group=[1, 3])
    told_and_well(answers, [3, 1], "ValueError", [3, 1])


def test_a_rank_that_alone_is_told_to_stop_takes_the_others_along(worlds: Worlds) -> None:
    answers = worlds[2].run(failing, seconds=SECONDS, mode=HEIGHT, turns=[1], kind="Cancelled")
    told_and_well(answers, [1], "Cancelled", [1])


def failing_in_a_subgroup(rank: int, size: int) -> Any:
    """Case: as `failing`, within a process group of the caller's own; a rank outside of it takes no part."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    plain, vae = untiled(), tiny_vae(dtype=torch.float64)
    distribute(vae, size=2, mode=HEIGHT, group=group, broadcast_result=True)
    z = latents(vae, 2, 5, 6)

    def fail(*_: Any) -> None:
        raise ValueError("odd")

    hook = vae.decoder.mid_block.register_forward_hook(fail) if rank == 2 else None
    heard = outcome(lambda: vae.decode(z))
    if hook:
        hook.remove()
    return [heard, difference(vae.decode(z).sample, plain.decode(z).sample)]


def test_a_rank_of_the_callers_own_group_raises(worlds: Worlds) -> None:
    _, *members = worlds.fresh(3).run(failing_in_a_subgroup, seconds=SECONDS)
    for heard, error in members:
        assert heard == ["RankError", "rank 1 failed: ValueError: odd"]
        assert error <= EXACT


def stopped(rank: int, size: int) -> Any:
    """Case: the ranks look between network calls whether one of them was told to stop."""
    plain, vae = untiled(), tiny_vae(dtype=torch.float64)
    distribute(vae, size=size, mode=WIDTH, broadcast_result=True)
    vae.parallel_state.stoppable = True
    z = latents(vae, 6, 5, 6)
    seen = []

    def observe(done: int, total: int) -> None:
        seen.append([done, total])
        if rank == 1 and done == 1:
            raise Cancelled("told to stop")

    vae.parallel_state.executor.observer = observe
    heard = outcome(lambda: vae.decode(z))
    vae.parallel_state.executor.observer = None
    return [heard[0], seen, clean(vae), difference(vae.decode(z).sample, plain.decode(z).sample)]


def test_all_ranks_stop_between_the_same_network_calls(worlds: Worlds) -> None:
    # 5x3 latents a rank: the first frame alone, then 2, 2 and 1.
    for kind, seen, is_clean, error in worlds[2].run(stopped, seconds=SECONDS):
        assert kind == "Cancelled"
        assert seen == [[0, 4], [1, 4]]
        assert is_clean
        assert error <= EXACT


def differing(rank: int, size: int, *, what: str) -> Any:
    """Case: the last rank comes with something else; then all come with the same."""
    plain, vae = untiled(), tiny_vae(dtype=torch.float64)
    distribute(vae, size=size, mode=HEIGHT, broadcast_result=True)
    z, x = latents(vae, 2, 5, 6), pixels(vae, 5, 40, 48)
    other_z, other_x = z, x
    if rank == size - 1:
        if what == "content":
            other_z, other_x = latents(vae, 2, 5, 6, seed=1), pixels(vae, 5, 40, 48, seed=1)
        elif what == "dtype":
            other_z, other_x = z.float(), x.float()
        elif what == "shape":
            other_z, other_x = z[..., :5], x[..., :40]
        elif what == "mode":
            vae.set_parallel_size(size, mode=WIDTH, broadcast_result=True)
    heard = [outcome(lambda: vae.decode(other_z)), outcome(lambda: vae.encode(other_x))]
    if what == "mode" and rank == size - 1:
        vae.set_parallel_size(size, mode=HEIGHT, broadcast_result=True)
    return [heard, difference(vae.decode(z).sample, plain.decode(z).sample)]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("what", ["content", "dtype", "shape", "mode"])
def test_ranks_that_differ_are_told_apart(what: str, size: int, worlds: Worlds) -> None:
    for heard, error in worlds[size].run(differing, seconds=SECONDS, what=what):
        for kind, message in heard:
            assert kind == "DisagreementError"
            assert message.startswith(f"ranks came with different {what}: ")
            assert f"rank {size - 1} has " in message
        assert error <= EXACT


def too_small(rank: int, size: int, *, mode: str, extents: list[int]) -> Any:
    """Case: a request that cannot give every rank a row, twice, and then one that can."""
    tiled, whole = tiny_vae(dtype=torch.float64), untiled()
    vae = distribute(tiny_vae(dtype=torch.float64), size=size, mode=mode, broadcast_result=True)
    taken = decisions(vae)
    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    handler.setLevel(logging.WARNING)
    logger = logging.getLogger("vllm_omni_vae")
    logger.addHandler(handler)
    z, large = latents(vae, 1, *extents), latents(vae, 1, 9, 9)
    errors = [difference(vae.decode(z).sample, tiled.decode(z).sample) for _ in range(2)]
    errors.append(difference(vae.decode(large).sample, whole.decode(large).sample))
    logger.removeHandler(handler)
    about = [w for w in warnings if "cannot give each" in w]
    return {"errors": errors, "warnings": about, "taken": [[d.strategy.value, d.fallback] for d in taken]}


@pytest.mark.parametrize(
    ("size", "mode", "extents"), [(2, HEIGHT, [1, 9]), (3, WIDTH, [9, 2]), (4, GRID, [1, 3]), (4, HEIGHT, [3, 9])]
)
def test_a_request_too_small_runs_as_tiles_with_one_warning(
    size: int, mode: str, extents: list[int], worlds: Worlds
) -> None:
    tiled = extents != [1, 3]
    for rank, answer in enumerate(worlds[size].run(too_small, mode=mode, extents=extents)):
        # 1x3 latents are not larger than one tile: nothing is tiled, so nothing falls back.
        first = ["tile", True] if tiled else ["direct", False]
        assert answer["taken"] == [first, first, [mode, False]]
        assert answer["errors"][:2] == [0.0, 0.0]
        assert answer["errors"][2] <= EXACT
        assert len(answer["warnings"]) == (rank == 0 and tiled)
        assert all(mode in warning for warning in answer["warnings"])


def killed(rank: int, size: int, *, victim: int, mode: str) -> Any:
    """Case: one rank is killed in the middle of a decode."""
    vae = distribute(tiny_vae(), size=size, mode=mode)
    z = latents(vae, 2, 9, 9)
    vae.decode(z)
    if rank == victim:
        vae.decoder.mid_block.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    start = time.monotonic()
    heard = outcome(lambda: vae.decode(z))
    return {"heard": heard, "quick": time.monotonic() - start < SECONDS / 2, "clean": clean(vae)}


@pytest.mark.parametrize(("size", "victim", "mode"), [(2, 0, HEIGHT), (3, 1, WIDTH), (4, 3, GRID)])
def test_one_rank_is_killed(size: int, victim: int, mode: str, tmp_path: Path) -> None:
    world = World(size, tmp_path)
    pids = world.pids
    answers = world.run(killed, seconds=SECONDS, dying=[victim], victim=victim, mode=mode)
    for rank, answer in enumerate(answers):
        if rank == victim:
            assert answer is None
            continue
        assert answer["heard"], "it must not return"
        assert answer["heard"][0] in ("PeerLostError", "RankError")
        assert answer["quick"]
        assert answer["clean"]
    assert not world.alive
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
