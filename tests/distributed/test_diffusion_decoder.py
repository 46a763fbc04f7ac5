# SPDX-License-Identifier: Apache-2.0
"""The diffusion decoder of LTX-2.5 on gloo ranks: the bits, the noise and the pipeline of one rank."""

from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, LTX2VideoDiffusionDecodePipeline

from tests.distributed.ranks import Worlds
from tests.helpers.diffusion_decoders import seeded, tiny_decoder
from tests.helpers.vaes import decisions, noise
from vllm_omni_vae.autoencoders import distribute, selftest
from vllm_omni_vae.errors import DisagreementError, RankError
from vllm_omni_vae.pipelines.components import find_vaes

pytestmark = pytest.mark.distributed

SECONDS = 300.0
"""Every process compiles flex attention on its first call."""
SEED = 11


def pipeline() -> LTX2VideoDiffusionDecodePipeline:
    made = LTX2VideoDiffusionDecodePipeline(tiny_decoder(), FlowMatchEulerDiscreteScheduler())
    made.set_progress_bar_config(disable=True)
    return made


def drop_in(rank: int, size: int) -> Any:
    """Case: a plain pipeline, one whose decoder is shared, and the same without a generator."""
    alone, shared = pipeline(), pipeline()
    (path,) = find_vaes(shared)
    distribute(shared.diffusion_decoder, size=size)
    taken = decisions(shared.diffusion_decoder)
    z = noise(2, 4, 3, 5, 6)
    expected = alone(z, generator=seeded(), output_type="pt").frames
    frames = shared(z, generator=seeded(), output_type="pt").frames
    torch.manual_seed(SEED)
    without = alone(z, output_type="pt").frames
    after = torch.randn(3)
    torch.manual_seed(SEED)
    shared_without = shared(z, output_type="pt").frames
    return {
        "path": path,
        "equal": [torch.equal(frames, expected), torch.equal(shared_without, without)],
        "shape": list(frames.shape),
        "random numbers": torch.equal(torch.randn(3), after),
        "decisions": [[decision.strategy.value, *decision.grid] for decision in taken],
    }


@pytest.mark.parametrize("size", [2, 3])
def test_is_a_drop_in_for_diffusers_pipeline(size: int, worlds: Worlds) -> None:
    first, *others = worlds[size].run(drop_in, seconds=SECONDS)
    assert first["path"] == "diffusion_decoder"
    assert first["equal"] == [True, True]
    assert first["shape"] == [2, 17, 3, 20, 24]
    for one in (first, *others):
        assert one["decisions"] == 2 * [["tile", 2, 2, 2]]
        assert one["random numbers"], "the generator went as far as on one rank"
    assert all(one["shape"] == [2, 1, 3, 1, 1] for one in others)


def sharded(rank: int, size: int, *, mode: str) -> Any:
    """Case: a decode without a generator, then ranks whose generators differ."""
    vae, plain = tiny_decoder(torch.float64), tiny_decoder(torch.float64, tiled=False)
    distribute(vae, size=size, mode=mode)
    taken = decisions(vae)
    z = noise(1, 4, 1, 7, 9, dtype=torch.float64)
    torch.manual_seed(SEED)
    expected = plain.decode(z).sample
    after = torch.randn(3)
    torch.manual_seed(SEED)
    sample = vae.decode(z).sample
    same = torch.equal(torch.randn(3), after)
    error = float((sample - expected).abs().max() / expected.abs().max()) if rank == 0 else 0.0
    torch.manual_seed(rank)
    try:
        vae.decode(z)
        refusal = ""
    except DisagreementError as disagreement:
        refusal = str(disagreement)
    return {
        "error": error,
        "random numbers": same,
        "decisions": [decision.strategy.value for decision in taken],
        "refusal": refusal,
    }


@pytest.mark.parametrize(
    ("mode", "size"), [("spatial_shard_height", 2), ("spatial_shard_width", 3), ("spatial_shard_grid", 4)]
)
def test_a_shard_is_the_untiled_decode_of_one_rank(mode: str, size: int, worlds: Worlds) -> None:
    for one in worlds[size].run(sharded, mode=mode, seconds=SECONDS):
        assert one["error"] <= 1e-12
        assert one["random numbers"]
        assert one["decisions"] == 2 * [mode]
        assert "random state" in one["refusal"]


def failing(rank: int, size: int) -> Any:
    """Case: rank 1 fails in the middle of a shard; then it is called again."""
    vae, plain = tiny_decoder(torch.float64), tiny_decoder(torch.float64, tiled=False)
    distribute(vae, size=size, mode="spatial_shard_width", broadcast_result=True)
    z = noise(1, 4, 1, 5, 7, dtype=torch.float64)
    processors = vae.attn_processors
    hook = vae.decoder.det_stages[2][0].mlp.register_forward_pre_hook(lambda *_: 1 / 0) if rank == 1 else None
    generator, alone = seeded(), seeded()
    heard = ""
    try:
        vae.decode(z, generator=generator)
    except RankError as error:
        heard = str(error)
    if hook:
        hook.remove()
    _, expected = (plain.decode(z, generator=alone).sample for _ in range(2))
    sample = vae.decode(z, generator=generator).sample
    return {
        "heard": heard,
        "error": float((sample - expected).abs().max() / expected.abs().max()),
        "processors": all(vae.attn_processors[name] is one for name, one in processors.items()),
    }


def test_a_rank_that_fails_in_a_shard_and_the_call_after_it(worlds: Worlds) -> None:
    for one in worlds[2].run(failing, seconds=SECONDS):
        assert one["heard"].startswith("rank 1 failed: ZeroDivisionError")
        assert one["error"] <= 1e-12, "the second call has the noise of a second call"
        assert one["processors"]


def placed(rank: int, size: int, *, group: list[int], output_rank: int) -> Any:
    """Case: some ranks of the world work, all call; then ranks whose generators differ, and a call that is right."""
    vae, plain = tiny_decoder(), tiny_decoder()
    distribute(vae, size=len(group), group=group, output_rank=output_rank)
    z = noise(1, 4, 1, 5, 6)
    alone, generator = seeded(), seeded()
    expected = plain.decode(z, generator=alone).sample
    equal = [torch.equal(vae.decode(z, generator=generator).sample, expected)]
    refusal = ""
    torch.manual_seed(rank)
    try:
        vae.decode(z)
    except DisagreementError as error:
        refusal = str(error)
    equal.append(torch.equal(vae.decode(z, generator=seeded()).sample, expected))
    return {"equal": equal, "ends alike": torch.equal(generator.get_state(), alone.get_state()), "refusal": refusal}


@pytest.mark.parametrize(("group", "output_rank"), [([1, 2], 0), ([0, 2], 1)])
def test_ranks_that_only_call_draw_as_well(group: list[int], output_rank: int, worlds: Worlds) -> None:
    found = worlds[3].run(placed, group=group, output_rank=output_rank, seconds=SECONDS)
    for rank, one in enumerate(found):
        assert one["equal"] == 2 * [rank == group[output_rank]]
        assert one["ends alike"]
        assert ("random state" in one["refusal"]) is (rank in group)


def self_tested(rank: int, size: int) -> Any:
    """Case: the self-test, and a decode after it."""
    vae, plain = tiny_decoder(), tiny_decoder(tiled=False)
    distribute(vae, size=size, mode="spatial_shard_width", broadcast_result=True)
    torch.manual_seed(SEED)
    checks = selftest(vae)
    after = torch.randn(3)
    torch.manual_seed(SEED)
    z = noise(1, 4, 1, 5, 7)
    sample, expected = (one.decode(z, generator=seeded()).sample for one in (vae, plain))
    return {
        "checks": [[one.decision.operation.value, one.decision.strategy.value] for one in checks],
        "holds": [one.holds and one.limit < 1e-5 for one in checks],
        "random numbers": torch.equal(torch.randn(3), after),
        "close": float((sample - expected).abs().max() / expected.abs().max()) <= 1e-5,
    }


def test_the_self_test_takes_it_as_it_is(worlds: Worlds) -> None:
    expected = {
        "checks": [["decode", "spatial_shard_width"], ["decode", "tile"]],
        "holds": [True, True],
        "random numbers": True,
        "close": True,
    }
    assert worlds[2].run(self_tested, seconds=SECONDS) == [expected, expected]
