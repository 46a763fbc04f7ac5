# SPDX-License-Identifier: Apache-2.0
"""Calls of one distributed VAE on ranks that are threads: results, decisions, failures."""

import json
import logging
import threading
from typing import Any

import pytest
import torch

from tests.helpers.vaes import count_calls, decisions, latents, on_ranks, pixels, tiny_vae
from vllm_omni_vae.autoencoders import Decision, DistributedAutoencoderKLWan, Operation, Strategy, select_strategy
from vllm_omni_vae.config import VaeParallelMode
from vllm_omni_vae.errors import Cancelled, DisagreementError, RankError
from vllm_omni_vae.geometry import AxisTiling, TileGrid
from vllm_omni_vae.tiling import TileTask


def clean(vae: Any) -> bool:
    caches = (vars(vae).get(name, ()) for name in ("_feat_map", "_enc_feat_map"))
    return all(entry is None for cache in caches for entry in cache)


@pytest.mark.parametrize(("size", "name"), [(2, "wan2.1"), (4, "wan2.1"), (3, "wan2.2-a14b"), (2, "wan2.2-ti2v-5b")])
def test_samples_on_the_output_rank_and_moments_on_all(size: int, name: str) -> None:
    plain = tiny_vae(name)
    ratio = plain.spatial_compression_ratio
    z, x = latents(plain, 2, 5, 4, batch=2), pixels(plain, 5, 3 * ratio, 9 * ratio, batch=2)
    sample, moments = plain.decode(z).sample, plain.encode(x).latent_dist.parameters
    kept = z.clone(), x.clone()
    output = size - 1

    def body(vae: Any, rank: int) -> Any:
        return vae.decode(z).sample, vae.encode(x).latent_dist.parameters, clean(vae)

    for rank, (got, got_moments, is_clean) in enumerate(on_ranks(size, plain, body, output=output)):
        assert torch.equal(got_moments, moments)
        if rank == output:
            assert torch.equal(got, sample)
        else:
            assert (tuple(got.shape), got.dtype, bool(got.any())) == ((2, 3, 1, 1, 1), z.dtype, False)
        assert is_clean
    assert torch.equal(z, kept[0])
    assert torch.equal(x, kept[1])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("height", "width", "strategy", "tiles"),
    [(4, 4, "direct", 0), (1, 1, "direct", 0), (3, 5, "tile", 2), (5, 1, "tile", 2), (1, 9, "tile", 3)],
)
def test_fewer_tiles_than_ranks(size: int, height: int, width: int, strategy: str, tiles: int) -> None:
    plain = tiny_vae()
    z, x = latents(plain, 1, height, width), pixels(plain, 1, 8 * height, 8 * width)
    sample, moments = plain.decode(z).sample, plain.encode(x).latent_dist.parameters

    def body(vae: Any, rank: int) -> Any:
        taken = decisions(vae)
        ran = count_calls(vae.decoder), count_calls(vae.encoder)
        return vae.decode(z).sample, vae.encode(x).latent_dist.parameters, taken, [len(r) for r in ran]

    for rank, (got, got_moments, taken, ran) in enumerate(on_ranks(size, plain, body, broadcast=True)):
        assert torch.equal(got, sample)
        assert torch.equal(got_moments, moments)
        assert [d.operation for d in taken] == [Operation.DECODE, Operation.ENCODE]
        for decision, calls in zip(taken, ran, strict=True):
            assert decision.strategy == strategy
            assert sum(decision.tiles_per_rank) == tiles
            assert decision.idle_ranks == tuple(range(tiles, size) if tiles else ())
            assert calls == (decision.tiles_per_rank[rank] if tiles else 1)


@pytest.mark.parametrize(("size", "workers", "output"), [(3, (1, 2), 0), (4, (1, 3), 1)])
def test_callers_outside_the_working_ranks(size: int, workers: tuple[int, ...], output: int) -> None:
    plain = tiny_vae()
    z, x = latents(plain, 1, 5, 7), pixels(plain, 1, 40, 56)
    sample, moments = plain.decode(z).sample, plain.encode(x).latent_dist.parameters

    def body(vae: Any, rank: int) -> Any:
        ran = count_calls(vae.decoder)
        return vae.decode(z).sample, vae.encode(x).latent_dist.parameters, len(ran), vae._vae_parallel.is_output_rank

    for rank, (got, got_moments, ran, owns) in enumerate(on_ranks(size, plain, body, workers=workers, output=output)):
        assert torch.equal(got_moments, moments)
        assert owns == (rank == workers[output])
        assert torch.equal(got, sample) == owns
        assert (ran > 0) == (rank in workers)


def grid_of(rows: int, cols: int) -> TileGrid:
    whole, axis = AxisTiling(None), AxisTiling(4, 4)
    return TileGrid((whole, axis, axis), (2, 4 * rows, 4 * cols))


@pytest.mark.parametrize("mode", [VaeParallelMode.TILE, VaeParallelMode.AUTO])
def test_the_policy_is_a_function_of_its_arguments(mode: VaeParallelMode) -> None:
    direct = select_strategy(Operation.DECODE, mode, None, 4)
    assert (direct.strategy, direct.tiles_per_rank, direct.idle_ranks) == (Strategy.DIRECT, (), ())
    assert str(direct) == "decode: direct (not larger than one tile)"
    tiled = select_strategy(Operation.ENCODE, mode, grid_of(3, 3), 4)
    assert tiled == select_strategy(Operation.ENCODE, mode, grid_of(3, 3), 4)
    assert hash(tiled) == hash(select_strategy(Operation.ENCODE, mode, grid_of(3, 3), 4))
    assert (tiled.strategy, tiled.grid, tiled.tiles_per_rank) == (Strategy.TILE, (1, 3, 3), (3, 2, 2, 2))
    assert tiled.imbalance == pytest.approx(12 / 9, abs=1e-4)
    assert tiled.coverage == 1.0
    assert ("auto" in tiled.reason) == (mode is VaeParallelMode.AUTO)
    assert "1x3x3" in str(tiled)
    few = select_strategy(Operation.ENCODE, mode, grid_of(1, 2), 4)
    assert few.idle_ranks == (2, 3)


def test_a_decision_is_ready_for_json() -> None:
    decision = select_strategy(Operation.DECODE, VaeParallelMode.TILE, grid_of(1, 3), 2)
    values = json.loads(json.dumps(decision.to_json()))
    assert values["strategy"] == "tile"
    assert values["operation"] == "decode"
    assert values["grid"] == [1, 1, 3]
    assert values["tiles_per_rank"] == [2, 1]
    assert set(values) == set(Decision.__dataclass_fields__)


def test_a_request_runs_direct_where_tiling_is_switched_off_and_says_why() -> None:
    plain = tiny_vae(tiled=False)
    z = latents(plain, 1, 5, 7)

    def body(vae: Any, rank: int) -> Any:
        taken = decisions(vae)
        return vae.decode(z).sample, taken

    for got, (decision,) in on_ranks(2, plain, body):
        assert torch.equal(got, plain.decode(z).sample)
        assert decision.strategy is Strategy.DIRECT
        assert "tiling" in decision.reason
        assert "not larger than one tile" not in decision.reason


def test_each_distinct_decision_is_logged_once_by_the_output_rank(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="vllm_omni_vae")
    plain = tiny_vae()

    def body(vae: Any, rank: int) -> list[Decision]:
        taken = decisions(vae)
        for _ in range(2):
            vae.decode(latents(vae, 1, 5, 7))
            vae.decode(latents(vae, 1, 2, 2))
            vae.encode(pixels(vae, 1, 24, 40))
        return taken

    first, *others = on_ranks(3, plain, body, output=1)
    assert len(first) == 6
    assert all(taken == first for taken in others)
    infos = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert infos == [f"VAE {decision}" for decision in first[:3]]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["VAE encode: 2 tiles for 3 ranks, so ranks [2] are idle; smaller tiles would use them"]


@pytest.mark.parametrize("operation", ["decode", "encode"])
@pytest.mark.parametrize("error", [RuntimeError("no memory"), Cancelled("stop")])
def test_a_failure_leaves_no_activation_behind_and_the_next_call_is_right(operation: str, error: Exception) -> None:
    plain = tiny_vae()
    x = latents(plain, 2, 4, 5) if operation == "decode" else pixels(plain, 5, 32, 40)
    expected = plain.decode(x).sample if operation == "decode" else plain.encode(x).latent_dist.parameters

    def run(vae: Any) -> torch.Tensor:
        return vae.decode(x).sample if operation == "decode" else vae.encode(x).latent_dist.parameters

    def body(vae: Any, rank: int) -> Any:
        calls = count_calls(vae.decoder if operation == "decode" else vae.encoder)

        def fail(*_: object) -> None:
            if rank == 1 and len(calls) == 2:
                raise error

        hook = (vae.decoder if operation == "decode" else vae.encoder).register_forward_pre_hook(fail)
        with pytest.raises((RankError, Cancelled)) as caught:
            run(vae)
        hook.remove()
        return type(caught.value), clean(vae), run(vae)

    kind = Cancelled if isinstance(error, Cancelled) else RankError
    for heard, is_clean, then in on_ranks(3, plain, body, broadcast=True):
        assert heard is kind
        assert is_clean
        assert torch.equal(then, expected)


def test_a_failure_of_a_direct_call_leaves_nothing_behind_either() -> None:
    plain = tiny_vae()
    z = latents(plain, 2, 3, 3)

    def body(vae: Any, rank: int) -> Any:
        def fail(*_: object) -> None:
            raise RuntimeError("no memory")

        hook = vae.decoder.conv_out.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="no memory"):
            vae.decode(z)
        hook.remove()
        return clean(vae), vae.decode(z).sample

    for is_clean, then in on_ranks(2, plain, body):
        assert is_clean
        assert torch.equal(then, plain.decode(z).sample)


@pytest.mark.parametrize(("mine", "other"), [((1, 9, 9), (1, 3, 3)), ((1, 3, 3), (1, 4, 4)), ((2, 9, 9), (1, 9, 9))])
def test_ranks_with_different_requests_do_not_wait_for_each_other(
    mine: tuple[int, int, int], other: tuple[int, int, int]
) -> None:
    plain = tiny_vae()

    def body(vae: Any, rank: int) -> str:
        with pytest.raises(DisagreementError) as caught:
            vae.decode(latents(vae, *(other if rank == 1 else mine)))
        return str(caught.value)

    (message,) = set(on_ranks(2, plain, body))
    assert message.startswith("ranks came with different ")


@pytest.mark.parametrize("shape", [(6, 72, 72), (5, 72, 7), (1, 24, 24), (1, 24, 32)])
def test_a_request_that_only_one_rank_refuses_does_not_keep_the_others_waiting(shape: tuple[int, int, int]) -> None:
    plain = tiny_vae()

    def body(vae: Any, rank: int) -> str:
        with pytest.raises(DisagreementError) as caught:
            vae.encode(pixels(vae, *(shape if rank == 1 else (5, 72, 72))))
        return str(caught.value)

    (message,) = set(on_ranks(2, plain, body))
    assert message.startswith("ranks came with different shape: rank 0 has (1, 3, 5, 72, 72), rank 1 has ")


def test_ranks_with_different_tiling_do_not_wait_for_each_other() -> None:
    def body(vae: Any, rank: int) -> None:
        if rank == 1:
            vae.disable_tiling()
        with pytest.raises(DisagreementError, match="rank 1 has "):
            vae.decode(latents(vae, 1, 9, 9))

    on_ranks(2, tiny_vae(), body)


def test_one_rank_encodes_while_another_decodes() -> None:
    plain = tiny_vae()

    def body(vae: Any, rank: int) -> None:
        with pytest.raises(DisagreementError):
            vae.encode(pixels(vae, 1, 72, 72)) if rank else vae.decode(latents(vae, 1, 9, 9))

    on_ranks(2, plain, body, broadcast=True)


def test_two_threads_on_one_vae_take_turns() -> None:
    plain = tiny_vae()
    z = latents(plain, 2, 5, 7)
    expected = plain.decode(z).sample

    def body(vae: Any, rank: int) -> Any:
        inside, most, results = [0], [0], []
        count = threading.Lock()

        def enter(*_: object) -> None:
            with count:
                inside[0] += 1
                most[0] = max(most[0], inside[0])

        def leave(*_: object) -> None:
            with count:
                inside[0] -= 1

        vae.decoder.register_forward_pre_hook(enter)
        vae.decoder.register_forward_hook(leave)

        def decode() -> None:
            with torch.no_grad():
                results.append(vae.decode(z).sample)

        threads = [threading.Thread(target=decode) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results, most[0]

    for results, most in on_ranks(2, plain, body, broadcast=True):
        assert len(results) == 2
        assert all(torch.equal(result, expected) for result in results)
        assert most == 1


def test_gradients_may_be_on() -> None:
    plain = tiny_vae()
    z, x = latents(plain, 1, 5, 7), pixels(plain, 1, 40, 56)

    def body(vae: Any, rank: int) -> Any:
        with torch.enable_grad():
            return vae.decode(z).sample.detach(), vae.encode(x).latent_dist.parameters.detach()

    for sample, moments in on_ranks(2, plain, body, broadcast=True):
        assert torch.equal(sample, plain.decode(z).sample)
        assert torch.equal(moments, plain.encode(x).latent_dist.parameters)


def test_a_family_may_override_one_of_the_three_functions() -> None:
    class Brighter(DistributedAutoencoderKLWan):
        def tile_exec(self, task: TileTask) -> torch.Tensor:
            return super().tile_exec(task) + 0.5

    plain = tiny_vae()
    z = latents(plain, 1, 5, 7) * 0.1
    expected = plain.decode(z).sample
    sample = on_ranks(2, plain, lambda vae, _: vae.decode(z).sample, kind=Brighter)[0]
    inside = (expected.abs() < 0.4) & (sample.abs() < 1)
    assert inside.any()
    assert torch.allclose(sample[inside], expected[inside] + 0.5, atol=1e-6)


def test_a_batch_may_be_sliced() -> None:
    plain = tiny_vae()
    plain.enable_slicing()
    z = latents(plain, 1, 5, 7, batch=2)
    sample, placeholder = on_ranks(2, plain, lambda vae, _: vae.decode(z).sample)
    assert torch.equal(sample, plain.decode(z).sample)
    assert tuple(placeholder.shape) == (2, 3, 1, 1, 1)
