# SPDX-License-Identifier: Apache-2.0
"""Whole Wan networks on shards, on ranks that are threads, against the same network on one rank without tiles."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import patchify
from torch.overrides import TorchFunctionMode

from tests.helpers.vaes import decisions, latents, on_ranks, pixels, tiny_vae
from tests.sharding.memory import LiveBytes
from tests.sharding.spread import Ran, Spread, results
from vllm_omni_vae.autoencoders import Operation, Strategy
from vllm_omni_vae.autoencoders.spec import CallOptions
from vllm_omni_vae.autoencoders.wan import WanSpec
from vllm_omni_vae.config import VaeParallelMode
from vllm_omni_vae.distributed import LocalCommunicator, NullCommunicator
from vllm_omni_vae.errors import RankError
from vllm_omni_vae.sharding import SpatialShard

ENCODE, DECODE = Operation.ENCODE, Operation.DECODE
SPEC = WanSpec()
GRIDS = [(2, 1), (3, 1), (4, 1), (1, 2), (1, 3), (1, 4), (2, 2)]
CONFIGS = ["wan2.1", "wan2.2-a14b", "wan2.2-ti2v-5b"]
SOME = [(name, *grid) for name in CONFIGS for grid in ((2, 1), (2, 2))]
ALL = [("wan2.1", *grid) for grid in GRIDS] + [(name, *grid) for name in CONFIGS[1:] for grid in ((1, 4), (2, 2))]
FRAMES = [
    *(("wan2.1", chunk, time) for chunk, time in ((1, 4), (2, 4), (2, 5), (4, 4), (4, 6))),
    *((name, chunk, time) for name in ("wan2.2-ti2v-5b", "half time") for chunk, time in ((2, 5), (4, 6))),
]


def given(vae: AutoencoderKLWan, operation: Operation, time: int, height: int, width: int, **more: Any) -> torch.Tensor:
    """Input of so many latents: as the public method takes it."""
    if operation is DECODE:
        return latents(vae, time, height, width, **more)
    ratio, frames = vae.spatial_compression_ratio, 1 + 4 * (time - 1)
    return pixels(vae, frames, height * ratio, width * ratio, **more)


def untiled(vae: AutoencoderKLWan, operation: Operation, x: torch.Tensor) -> torch.Tensor:
    """What diffusers gives on one rank without tiles."""
    vae.disable_tiling()
    return vae.decode(x).sample if operation is DECODE else vae.encode(x).latent_dist.parameters


def seen(vae: AutoencoderKLWan, operation: Operation, x: torch.Tensor) -> torch.Tensor:
    """What the networks see of the public input."""
    patch = vae.config.patch_size
    if operation is DECODE or not patch:
        return x
    return patchify(x, patch)


def piece_of(vae: AutoencoderKLWan, operation: Operation, mine: torch.Tensor, chunk: int) -> torch.Tensor:
    if operation is ENCODE:
        return SPEC.encode_tile(vae, mine, CallOptions(chunk))
    return SPEC.finish_decode(vae, SPEC.decode_tile(vae, mine, CallOptions(chunk)))


def shard_of(
    vae: AutoencoderKLWan, operation: Operation, x: torch.Tensor, rows: int, cols: int, chunk: int = 1
) -> list[Ran]:
    """Run ``vae`` on ``rows x cols`` ranks; the whole result is rank 0's."""
    whole = seen(vae, operation, x)
    spread = Spread(rows, cols, SPEC.latents(vae, operation, (whole.shape[-2], whole.shape[-1])))
    scale = 1 if operation is ENCODE else vae.spatial_compression_ratio
    extents = (spread.latents[0] * scale, spread.latents[1] * scale)

    def body(comm: LocalCommunicator, shard: SpatialShard) -> torch.Tensor | None:
        own = copy.deepcopy(vae)
        mine = shard.shard(whole, SPEC.ratio(vae, operation))
        with shard:
            piece = piece_of(own, operation, mine, chunk)
        shard.check(piece, extents)
        return shard.gather(piece, extents, comm, 0)

    ran = spread.each(body)
    results(ran)
    return ran


def scaled_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    assert got.shape == wanted.shape
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max())


def rms_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).square().mean().sqrt())


@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize(("name", "rows", "cols"), ALL)
def test_float64_is_the_untiled_result(name: str, rows: int, cols: int, operation: Operation) -> None:
    vae = tiny_vae(name, torch.float64)
    x = given(vae, operation, 2, 5, 6 if rows > 1 else 7)
    got = shard_of(vae, operation, x, rows, cols)[0].result
    assert scaled_error(got, untiled(vae, operation, x)) <= 1e-12


@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize(("name", "rows", "cols"), SOME)
def test_float32_is_within_its_rounding(name: str, rows: int, cols: int, operation: Operation) -> None:
    vae = tiny_vae(name)
    x = given(vae, operation, 2, 5, 6, seed=1)
    got = shard_of(vae, operation, x, rows, cols)[0].result
    assert scaled_error(got, untiled(vae, operation, x)) <= 1e-5


@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize(("name", "rows", "cols"), SOME)
def test_bfloat16_is_as_near_to_float32_as_untiled_bfloat16(
    name: str, rows: int, cols: int, operation: Operation
) -> None:
    exact, vae = tiny_vae(name), tiny_vae(name, torch.bfloat16)
    x = given(vae, operation, 2, 5, 6)
    reference = untiled(exact, operation, x.float())
    got = shard_of(vae, operation, x, rows, cols)[0].result
    assert got.dtype == torch.bfloat16
    assert rms_error(got, reference) <= 1.1 * rms_error(untiled(vae, operation, x), reference)


@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize(("name", "chunk", "time"), FRAMES)
def test_several_latent_frames_at_a_time(name: str, chunk: int, time: int, operation: Operation) -> None:
    vae = tiny_vae(name, torch.float64)
    x = given(vae, operation, time, 3, 2, batch=2)
    got = shard_of(vae, operation, x, 2, 1, chunk)[0].result
    assert scaled_error(got, untiled(vae, operation, x)) <= 1e-12


@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize(
    ("rows", "cols", "height", "width"),
    [(1, 2, 1, 9), (1, 4, 1, 5), (2, 1, 9, 1), (3, 1, 3, 1), (3, 1, 3, 13), (2, 2, 2, 2), (2, 2, 3, 3), (1, 3, 4, 5)],
)
def test_thin_shards(rows: int, cols: int, height: int, width: int, operation: Operation) -> None:
    vae = tiny_vae(dtype=torch.float64)
    x = given(vae, operation, 1, height, width)
    got = shard_of(vae, operation, x, rows, cols)[0].result
    assert scaled_error(got, untiled(vae, operation, x)) <= 1e-12


@pytest.mark.parametrize(
    ("rows", "cols", "height", "width"),
    [(2, 1, 61, 30), (1, 3, 17, 31), (2, 2, 29, 45), (3, 1, 33, 9), (2, 1, 23, 8), (1, 4, 8, 39), (2, 2, 23, 23)],
)
def test_the_last_shard_encodes_what_is_no_multiple_of_the_ratio(rows: int, cols: int, height: int, width: int) -> None:
    vae = tiny_vae(dtype=torch.float64)
    x = pixels(vae, 5, height, width)
    got = shard_of(vae, ENCODE, x, rows, cols)[0].result
    assert tuple(got.shape[-2:]) == (height // 8, width // 8)
    assert scaled_error(got, untiled(vae, ENCODE, x)) <= 1e-12


@pytest.mark.parametrize("operation", list(Operation))
def test_channels_last_input_gives_the_same(operation: Operation) -> None:
    vae = tiny_vae(dtype=torch.float64)
    x = given(vae, operation, 2, 4, 5, batch=2)
    wanted = untiled(vae, operation, x)
    last = x.contiguous(memory_format=torch.channels_last_3d)
    assert scaled_error(shard_of(vae, operation, last, 2, 2)[0].result, wanted) <= 1e-12


class Halos(TorchFunctionMode):
    """Counts the halos that a network would need: (above, below, left, right) of every pad and padded convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.sides: list[tuple[bool, bool, bool, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.pad:
            left, right, above, below = ([*args[1]] + [0] * 4)[:4]
            self._note(above > 0, below > 0, left > 0, right > 0)
        elif func in (torch.conv2d, torch.conv3d):
            padding = kwargs.get("padding", args[4] if len(args) > 4 else 0)
            height, width = (padding, padding) if isinstance(padding, int) else padding[-2:]
            self._note(height > 0, height > 0, width > 0, width > 0)
        return func(*args, **kwargs)

    def _note(self, *sides: bool) -> None:
        if any(sides):
            self.sides.append(sides)

    def sent_by(self, spread: Spread, rank: int) -> int:
        """What ``rank`` sends above is the part of the halo below that its neighbour asked for, and so on."""
        layout = spread.layout(rank)
        above, below = (peer is not None for peer in layout.neighbours(-2))
        left, right = (peer is not None for peer in layout.neighbours(-1))
        return sum((above and b) + (below and a) + (left and r) + (right and le) for a, b, le, r in self.sides)


@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize(("rows", "cols"), [(2, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("name", ["wan2.1", "wan2.2-ti2v-5b"])
def test_one_message_for_each_convolution_and_neighbour(name: str, rows: int, cols: int, operation: Operation) -> None:
    vae = tiny_vae(name)
    x = given(vae, operation, 2, 4, 6)
    with Halos() as halos:
        untiled(vae, operation, x)
    ran = shard_of(vae, operation, x, rows, cols)
    spread = Spread(rows, cols, (4, 6))
    calls = 2
    assert len(halos.sides) == calls * {DECODE: 25, ENCODE: 17}[operation]
    for rank, r in enumerate(ran):
        assert r.shard.operators.attention_calls == calls
        assert r.traffic.collectives == {"all_gather_uneven": calls, "gather": 1}
        gathered = calls * (spread.size - 1) + (rank != 0)
        assert r.traffic.messages == halos.sent_by(spread, rank) + gathered


def test_without_exchange_every_rank_alone_keeps_its_shapes() -> None:
    """The bound that says what the exchanges cost."""
    vae = tiny_vae()
    x = given(vae, DECODE, 2, 5, 6)
    spread = Spread(2, 2, (5, 6))
    for rank in range(4):
        comm = NullCommunicator(rank, 4)
        shard = SpatialShard(comm, spread.layout(rank))
        with shard:
            piece = piece_of(copy.deepcopy(vae), DECODE, shard.shard(x), 1)
        shard.check(piece, (40, 48))
        assert comm.traffic.messages > 0


def wan_on_meta(**layers: Any) -> AutoencoderKLWan:
    with torch.device("meta"):
        return AutoencoderKLWan(**layers).eval()


@pytest.mark.parametrize(("rows", "cols"), [(2, 1), (1, 2)])
def test_the_real_decoder_has_33_halos_a_latent_frame(rows: int, cols: int) -> None:
    """Wan 2.1 as it is published, without its weights: shapes are enough to count."""
    vae = wan_on_meta()
    z = torch.empty(1, 16, 2, 16, 16, device="meta")
    ran = shard_of(vae, DECODE, z, rows, cols)
    for rank, r in enumerate(ran):
        assert r.traffic.messages == 2 * 33 + 2 + (rank != 0)


def peak_of(run: Callable[[], Any]) -> int:
    with LiveBytes() as live:
        run()
    return live.peak


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_counts_the_memory_counts_storages_while_they_live(device: str) -> None:
    before = torch.empty(500, device=device)
    with LiveBytes() as live:
        first = torch.empty(1000, device=device)
        view = first.view(10, 100)[2:].transpose(0, 1)
        assert live.live == 4000
        second = view.contiguous()
        assert live.live == 4000 + 3200
        del first
        assert live.live == 4000 + 3200
        del view
        assert live.live == 3200
        before.add_(1)
        second = second + 1
    assert (live.live, live.peak) == (3200, 7200)


@pytest.mark.parametrize(("rows", "cols", "bound"), [(2, 1, 0.56), (1, 2, 0.56), (2, 2, 0.31), (4, 1, 0.31)])
def test_memory_falls_with_the_ranks(rows: int, cols: int, bound: float) -> None:
    """Live bytes of tensors in one decode of the published Wan 2.1 at 32x32 latents, counted on shapes alone."""
    vae = wan_on_meta()
    z = torch.empty(1, 16, 2, 32, 32, device="meta")
    alone = peak_of(lambda: SPEC.finish_decode(vae, SPEC.decode_tile(vae, z)))
    spread = Spread(rows, cols, (32, 32))

    def body(comm: LocalCommunicator, shard: SpatialShard) -> int:
        own = copy.deepcopy(vae)

        def run() -> None:
            with shard:
                piece = piece_of(own, DECODE, shard.shard(z), 1)
            shard.gather(piece, (256, 256), comm, 0)

        return peak_of(run)

    peaks = results(spread.each(body))
    assert max(peaks) <= bound * alone
    assert max(peaks) <= 1.1 * min(peaks)


@pytest.mark.parametrize("condition", ["inference mode", "autocast", "slices", "view with gaps", "gradients on"])
def test_other_ways_to_call(condition: str) -> None:
    autocast = condition == "autocast"
    plain = tiny_vae(dtype=torch.float32 if autocast else torch.float64)
    plain.use_slicing = condition == "slices"
    z, x = given(plain, DECODE, 2, 6, 5, batch=2), given(plain, ENCODE, 2, 6, 5, batch=2)
    if condition == "view with gaps":
        z, x = (torch.stack([t, -t], dim=-1).flatten(-2)[..., ::2] for t in (z, x))

    def call(vae: Any, rank: int = 0) -> list[torch.Tensor]:
        with contextlib.ExitStack() as around:
            if condition == "inference mode":
                around.enter_context(torch.inference_mode())
            elif autocast:
                around.enter_context(torch.autocast("cpu", torch.bfloat16))
            elif condition == "gradients on":
                around.enter_context(torch.enable_grad())
            out = vae.decode(z).sample, vae.encode(x).latent_dist.parameters
        return [t.detach().clone() for t in out]

    answers = on_ranks(2, plain, call, mode=VaeParallelMode.SPATIAL_SHARD_HEIGHT, broadcast=True)
    plain.disable_tiling()
    for answer in answers:
        for got, wanted in zip(answer, call(plain), strict=True):
            assert got.dtype == wanted.dtype
            assert scaled_error(got, wanted) <= (2e-2 if autocast else 1e-12)


def test_attention_that_a_shard_does_not_see_is_an_error() -> None:
    """As with processors that multiply the matrices themselves."""
    plain = tiny_vae()
    z = given(plain, DECODE, 1, 6, 5)

    def body(vae: Any, rank: int) -> str:
        vae.decoder.mid_block.attentions[0].forward = lambda x: x
        with pytest.raises(RankError, match="rank 0 failed: UnsupportedError: AutoencoderKLWan attends over space"):
            vae.decode(z)
        return "told"

    assert on_ranks(2, plain, body, mode=VaeParallelMode.SPATIAL_SHARD_WIDTH) == ["told"] * 2


MODES = {
    VaeParallelMode.SPATIAL_SHARD_HEIGHT: Strategy.SPATIAL_SHARD_HEIGHT,
    VaeParallelMode.SPATIAL_SHARD_WIDTH: Strategy.SPATIAL_SHARD_WIDTH,
    VaeParallelMode.SPATIAL_SHARD_GRID: Strategy.SPATIAL_SHARD_GRID,
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("mode", "size"), [*zip(MODES, (2, 3, 4), strict=True)])
def test_whole_calls(mode: VaeParallelMode, size: int, name: str) -> None:
    plain = tiny_vae(name, torch.float64)
    z, x = given(plain, DECODE, 2, 5, 7, batch=2), given(plain, ENCODE, 2, 5, 7, batch=2)
    kept = z.clone(), x.clone()

    def body(vae: Any, rank: int) -> Any:
        taken = decisions(vae)
        sample, moments = vae.decode(z).sample, vae.encode(x).latent_dist.parameters
        caches = [*vae._feat_map, *vae._enc_feat_map]
        return sample, moments, [d.strategy for d in taken], all(entry is None for entry in caches)

    output = size - 1
    answers = on_ranks(size, plain, body, mode=mode, output=output)
    sample, moments = untiled(plain, DECODE, z), untiled(plain, ENCODE, x)
    for rank, (got, got_moments, strategies, clean) in enumerate(answers):
        assert strategies == [MODES[mode]] * 2
        assert clean
        assert scaled_error(got_moments, moments) <= 1e-12
        assert torch.equal(got_moments, answers[0][1])
        if rank == output:
            assert scaled_error(got, sample) <= 1e-12
        else:
            assert (tuple(got.shape), bool(got.any())) == ((2, 3, 1, 1, 1), False)
    assert torch.equal(z, kept[0])
    assert torch.equal(x, kept[1])
