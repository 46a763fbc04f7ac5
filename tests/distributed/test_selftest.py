# SPDX-License-Identifier: Apache-2.0
"""The self-test on real processes: their groups, their random generators, and a rank that fails in the middle."""

from typing import Any

import pytest
import torch

from tests.distributed.ranks import Worlds
from tests.helpers.broken_halo import BrokenFill
from tests.helpers.vaes import VAES, latents, run_public, tiny_vae
from vllm_omni_vae.autoencoders import Operation, distribute, selftest
from vllm_omni_vae.errors import SelfTestError
from vllm_omni_vae.sharding import halo

pytestmark = pytest.mark.distributed

WIDTH = "spatial_shard_width"


def found(rank: int, size: int, *, name: str, mode: str, **placement: Any) -> Any:
    """Case: what is found, and whether nothing else changed."""
    vae = distribute(tiny_vae(name), size=placement.pop("ranks", size), mode=mode, **placement)
    torch.manual_seed(rank)
    drawn = torch.random.get_rng_state()
    comparisons = selftest(vae)
    return {
        "checks": [[c.decision.operation.value, c.decision.strategy.value, c.error, c.limit] for c in comparisons],
        "random numbers": torch.equal(torch.random.get_rng_state(), drawn),
        "sent": vae.parallel_state.groups.domain.traffic.messages,
    }


def refused(rank: int, size: int, *, fault: str) -> Any:
    """Case: what is said, with halos of zeros or with a rank that fails in a shard, and what the next call gives."""
    vae = distribute(tiny_vae(), size=size, mode=WIDTH, broadcast_result=True)
    fill, hook = halo._fill, None
    if fault == "halo":
        halo._fill = BrokenFill(fill)
    elif rank == 1:
        hook = vae.decoder.mid_block.register_forward_pre_hook(lambda *_: 1 / 0)
    try:
        selftest(vae)
    except SelfTestError as error:
        message = str(error)
    finally:
        halo._fill = fill
        if hook is not None:
            hook.remove()
    z = latents(vae, 2, 5, 9)
    plain = tiny_vae(tiled=False)
    error = run_public(vae, Operation.DECODE, z) - run_public(plain, Operation.DECODE, z)
    return {"message": message, "next": float(error.abs().max())}


@pytest.mark.parametrize("name", [name for name in VAES if "ltx" in name] + ["wan2.1"])
def test_the_network_s_own_noise_is_the_same_noise(name: str, worlds: Worlds) -> None:
    first, *others = worlds[2].run(found, name=name, mode=WIDTH)
    noisy = "noise" in name
    tiles = [["encode", "tile", 0.0, 0.0], *([] if noisy else [["decode", "tile", 0.0, 0.0]])]
    assert [check for check in first["checks"] if check[1] == "tile"] == tiles
    shards = [check for check in first["checks"] if check[1] == WIDTH]
    assert [check[0] for check in shards] == ["encode", "decode"]
    assert all(error <= limit < 1e-5 for _, _, error, limit in shards)
    for one in (first, *others):
        assert one == first | {"sent": 0, "random numbers": True}


@pytest.mark.parametrize(
    "placement", [{"ranks": 2}, {"ranks": 2, "group": [0, 2]}, {"ranks": 2, "group": [1, 2], "output_rank": 1}]
)
def test_ranks_that_only_call_take_part(placement: dict[str, Any], worlds: Worlds) -> None:
    answers = worlds[3].run(found, name="wan2.1", mode="auto", **placement)
    assert [check[1] for check in answers[0]["checks"]] == 2 * ["spatial_shard_height", WIDTH, "tile"]
    assert answers[0] == answers[1] == answers[2]
    assert all(error <= limit for _, _, error, limit in answers[0]["checks"])


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("halo", f"encode with {WIDTH} is off by "),
        ("rank", f"decode with {WIDTH} fails: rank 1 failed: ZeroDivisionError: division by zero"),
    ],
)
def test_every_rank_refuses_alike_and_can_go_on(fault: str, reason: str, worlds: Worlds) -> None:
    one, other = worlds[2].run(refused, fault=fault)
    assert one == other
    assert reason in one["message"]
    assert one["next"] < 1e-5
