# SPDX-License-Identifier: Apache-2.0
"""A rank that fails, differs or dies: every rank hears of it within seconds, and the next call is right."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import RankFailure, World, Worlds
from tests.helpers.vaes import latents, pixels, tiny_vae
from vllm_omni_vae.autoencoders import distribute
from vllm_omni_vae.errors import Cancelled

pytestmark = pytest.mark.distributed

SECONDS = 30.0
NO_MEMORY = "rank 1 failed: OutOfMemoryError: no memory left"


def difference(a: torch.Tensor, b: torch.Tensor) -> float | None:
    return float((a.double() - b.double()).abs().max()) if a.shape == b.shape else None


def outcome(call: Callable[[], Any]) -> list[str]:
    """Type and message of what ``call`` raises; empty if it returns."""
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return []


def fail_after(module: torch.nn.Module, calls: int, error: Exception) -> Any:
    """Make ``module`` raise ``error`` after ``calls`` calls; the result's ``remove`` ends that."""
    left = [calls]

    def hook(*_: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise error

    return module.register_forward_pre_hook(hook)


def clean(vae: Any) -> bool:
    """Whether no activation is left in the module's caches."""
    caches = (vars(vae).get(name, ()) for name in ("_feat_map", "_enc_feat_map"))
    return all(entry is None for cache in caches for entry in cache)


def raising(rank: int, size: int, *, failing: dict[str, list[Any]], broadcast: bool, group: list[int] | None) -> Any:
    """Case: some ranks raise in the middle of a decode and of an encode; then both are called again."""
    errors = {"OutOfMemoryError": torch.OutOfMemoryError, "ValueError": ValueError, "Cancelled": Cancelled}
    vae, plain = tiny_vae(), tiny_vae()
    distribute(vae, size=len(group) if group else size, group=group, broadcast_result=broadcast)
    z, x = latents(vae, 2, 9, 9), pixels(vae, 5, 72, 72)
    hooks = []
    if str(rank) in failing:
        kind, text, calls = failing[str(rank)]
        hooks = [fail_after(module, calls, errors[kind](text)) for module in (vae.decoder, vae.encoder)]
    start = time.monotonic()
    heard = [outcome(lambda: vae.decode(z)), clean(vae), outcome(lambda: vae.encode(x)), clean(vae)]
    seconds = time.monotonic() - start
    for hook in hooks:
        hook.remove()
    sample, moments = vae.decode(z).sample, vae.encode(x).latent_dist.parameters
    return {
        "heard": heard,
        "quick": seconds < SECONDS,
        "sample": difference(sample, plain.decode(z).sample),
        "moments": difference(moments, plain.encode(x).latent_dist.parameters),
    }


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize(
    ("size", "failing", "message"),
    [
        (2, {"1": ["OutOfMemoryError", "no memory left", 3]}, NO_MEMORY),
        (2, {"0": ["ValueError", "odd", 0]}, "rank 0 failed: ValueError: odd"),
        (3, {"2": ["ValueError", "second", 1], "1": ["ValueError", "first", 3]}, "rank 1 failed: ValueError: first"),
        (3, {"0": ["Cancelled", "stop", 1], "2": ["ValueError", "odd", 1]}, "rank 2 failed: ValueError: odd"),
        (3, {"1": ["Cancelled", "stop", 2]}, "cancelled"),
    ],
)
def test_one_rank_raises(
    size: int, failing: dict[str, list[Any]], message: str, broadcast: bool, worlds: Worlds
) -> None:
    kind = {"cancelled": "Cancelled", NO_MEMORY: "RankMemoryError"}.get(message, "RankError")
    answers = worlds[size].run(raising, seconds=SECONDS, failing=failing, broadcast=broadcast, group=None)
    for rank, answer in enumerate(answers):
        decode, clean_then, encode, clean_now = answer["heard"]
        assert decode == encode, rank
        assert decode[0] == kind
        assert message in decode[1]
        assert clean_then
        assert clean_now
        assert answer["quick"]
        assert answer["moments"] == 0.0
        assert answer["sample"] == (0.0 if broadcast or rank == 0 else None)


def test_callers_outside_the_working_ranks_hear_of_it_where_the_result_is_theirs(worlds: Worlds) -> None:
    failing = {"2": ["ValueError", "odd", 0]}
    answers = worlds[3].run(raising, seconds=SECONDS, failing=failing, broadcast=False, group=[1, 2])
    outside, *working = answers
    assert outside["heard"] == [[], True, ["RankError", "rank 2 failed: ValueError: odd"], True]
    for answer in working:
        # Ranks are counted within the ranks of the step: a decode that is not broadcast is the working ranks' alone.
        assert answer["heard"][0] == ["RankError", "rank 1 failed: ValueError: odd"]
        assert answer["heard"][2] == ["RankError", "rank 2 failed: ValueError: odd"]
    assert [answer["moments"] for answer in answers] == [0.0] * 3
    assert answers[1]["sample"] == 0.0


def differing(rank: int, size: int, *, what: str) -> Any:
    """Case: the last rank comes with something else; then all come with the same."""
    vae, plain = tiny_vae(), tiny_vae()
    distribute(vae, size=size, broadcast_result=True)
    z, x = latents(vae, 2, 9, 9, batch=2), pixels(vae, 5, 72, 72, batch=2)
    other_z, other_x = z, x
    if rank == size - 1:
        if what == "dtype":
            other_z, other_x = z.double(), x.double()
        elif what == "content":
            other_z, other_x = latents(vae, 2, 9, 9, batch=2, seed=1), pixels(vae, 5, 72, 72, batch=2, seed=1)
        elif what == "order of the batch":
            other_z, other_x = z.flip(0), x.flip(0)
        elif what == "order of the frames":
            other_z, other_x = z.flip(2), x.flip(2)
        elif what == "shape":
            other_z, other_x = z[..., :8], x[..., :64]
        elif what == "tile grid":
            vae.enable_tiling(32, 32, 16, 16)
        elif what == "weights":
            torch.nn.Module.to(vae, torch.float64)
    start = time.monotonic()
    heard = [outcome(lambda: vae.decode(other_z)), outcome(lambda: vae.encode(other_x))]
    seconds = time.monotonic() - start
    torch.nn.Module.to(vae, torch.float32)
    vae.enable_tiling(32, 32, 24, 24)
    return {
        "heard": heard,
        "quick": seconds < SECONDS,
        "sample": difference(vae.decode(z).sample, plain.decode(z).sample),
        "moments": difference(vae.encode(x).latent_dist.parameters, plain.encode(x).latent_dist.parameters),
    }


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("dtype", "dtype: rank 0 has torch.float32, "),
        ("content", "content: "),
        ("order of the batch", "content: "),
        ("order of the frames", "content: "),
        ("shape", "shape: rank 0 has (2, "),
        ("tile grid", "different tiling: "),
        ("weights", "torch.float64"),
    ],
)
def test_ranks_that_differ_are_told_apart(what: str, named: str, size: int, worlds: Worlds) -> None:
    for answer in worlds[size].run(differing, seconds=SECONDS, what=what):
        for kind, message in answer["heard"]:
            assert kind == "DisagreementError"
            assert message.startswith("ranks came with different ")
            assert named in message
            assert f"rank {size - 1} has " in message
        assert answer["quick"]
        assert (answer["sample"], answer["moments"]) == (0.0, 0.0)


def tiled_here_direct_there(rank: int, size: int) -> Any:
    """Case: the last rank comes with an input that is not larger than a tile."""
    vae = distribute(tiny_vae(), size=size)
    extent = 4 if rank == size - 1 else 9
    return outcome(lambda: vae.decode(latents(vae, 1, extent, extent)))


def test_a_small_request_on_one_rank_does_not_keep_the_others_waiting(worlds: Worlds) -> None:
    for kind, message in worlds[2].run(tiled_here_direct_there, seconds=SECONDS):
        assert kind == "DisagreementError"
        assert "rank 1 has " in message


def killed(rank: int, size: int, *, victim: int) -> Any:
    """Case: one rank is killed in the middle of a decode."""
    vae = distribute(tiny_vae(), size=size)
    z = latents(vae, 2, 9, 9)
    vae.decode(z)
    if rank == victim:
        vae.decoder.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    start = time.monotonic()
    heard = outcome(lambda: vae.decode(z))
    return {"heard": heard, "quick": time.monotonic() - start < SECONDS, "clean": clean(vae)}


@pytest.mark.parametrize(("size", "victim"), [(2, 1), (2, 0), (3, 1), (4, 2)])
def test_one_rank_is_killed(size: int, victim: int, tmp_path: Path) -> None:
    world = World(size, tmp_path)
    answers = world.run(killed, seconds=SECONDS, dying=[victim], victim=victim)
    assert answers[victim] is None
    for answer in answers[:victim] + answers[victim + 1 :]:
        assert answer["heard"], "it must not return"
        assert answer["quick"]
        assert answer["clean"]


def one_rank_fails(rank: int, size: int) -> None:
    """Case: rank 0 fails while the others wait for it."""
    if rank == 0:
        raise ValueError("odd")
    dist.barrier()


def test_a_failed_case_leaves_no_process(tmp_path: Path) -> None:
    world = World(2, tmp_path)
    pids = world.pids
    with pytest.raises(RankFailure, match=r"rank 0: (?s:.*)ValueError: odd(?s:.*)rank 1: no answer within 2 s"):
        world.run(one_rank_fails, seconds=2.0)
    assert not world.alive
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
