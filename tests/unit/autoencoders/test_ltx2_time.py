# SPDX-License-Identifier: Apache-2.0
"""LTX-2: one pool of tiles over height, width and time, right in time where diffusers is a frame late."""

import copy
import threading
from typing import Any

import pytest
import torch

from tests.helpers.vaes import count_calls, decisions, latents, on_ranks, pixels, run_public, tiny_vae
from vllm_omni_vae.autoencoders import Decision, DistributedAutoencoderKLLTX2Video, Operation, Strategy
from vllm_omni_vae.autoencoders.compare import compare
from vllm_omni_vae.config import TileExtent, VaeParallelMode
from vllm_omni_vae.errors import GeometryError, UnsupportedError
from vllm_omni_vae.geometry import deal

SPEC = DistributedAutoencoderKLLTX2Video.spec
ENCODE, DECODE = Operation
RATIO = STEP = 8
FRAMES = (17, 33, 49)
LENGTHS = ((16, 8), (24, 16), (16, 16), (8, 8), (32, 8))
"""Size and stride of a tile in frames."""
NOBODY_S = -1e4
"""What a network makes of a first frame or latent that is not the clip's: it must be dropped everywhere."""


def framewise(name: str, size: int, stride: int, dtype: torch.dtype = torch.float32) -> Any:
    vae = tiny_vae(name, dtype)
    SPEC.set_tiling(vae, TileExtent(32, 32, size), TileExtent(24, 24, stride))
    return vae


def given(vae: Any, operation: Operation, frames: int, height: int, width: int, batch: int = 1) -> torch.Tensor:
    """Input of so many frames, and latent rows and columns."""
    if operation is DECODE:
        return latents(vae, 1 + (frames - 1) // STEP, height, width, batch=batch)
    return pixels(vae, frames, height * RATIO, width * RATIO, batch=batch)


def shared(vae: Any, operation: Operation, x: torch.Tensor, ranks: int, **arguments: Any) -> tuple[torch.Tensor, Any]:
    """The owner's result and decision, after it is seen that tiles ran and each rank ran its own."""

    def body(mine: Any, rank: int) -> Any:
        taken, ran = decisions(mine), count_calls(mine.encoder if operation is ENCODE else mine.decoder)
        result = run_public(mine, operation, x, **arguments)
        assert [decision.strategy for decision in taken] == [Strategy.TILE]
        assert len(ran) == taken[0].tiles_per_rank[rank]
        return result, taken[0]

    found = on_ranks(ranks, vae, body)
    assert all(decision == found[0][1] for _, decision in found)
    return found[0]


def windows(frames: int, stride: int) -> int:
    """Stretches of time: one begins every ``stride`` frames after the first frame, as long as frames are left."""
    return -(-(frames - 1) // stride)


def untiled(vae: Any, operation: Operation, x: torch.Tensor) -> torch.Tensor:
    alone = copy.deepcopy(vae)
    SPEC.leave_whole(alone)
    with torch.no_grad():
        return run_public(alone, operation, x)


def right_framewise(plain: Any, z: torch.Tensor, causal: bool | None = None) -> torch.Tensor:
    """What diffusers' loop over time makes of ``z``, had it dropped the first frame of later tiles and not the last."""
    unit = plain.temporal_compression_ratio
    size, stride = plain.tile_sample_min_num_frames, plain.tile_sample_stride_num_frames
    row: list[torch.Tensor] = []
    kept = []
    for start in range(0, z.shape[2] - 1, stride // unit):
        tile = z[:, :, start : start + size // unit + 1]
        larger = max(z.shape[-2:]) > plain.tile_sample_min_height // RATIO
        sample = plain.tiled_decode(tile, None, causal=causal).sample if larger else plain.decoder(tile, causal=causal)
        if start:
            sample = plain.blend_t(row[-1], sample[:, :, 1:], size - stride)
        kept.append(sample[:, :, : stride + (not start)])
        row.append(sample)
    return torch.cat(kept, 2)[:, :, : 1 + (z.shape[2] - 1) * unit]


def numbered(vae: Any) -> None:
    """Replace the networks' work by frames that hold their number in the clip; see `NOBODY_S`."""

    def decode(z: torch.Tensor, temb: Any = None, causal: Any = None) -> torch.Tensor:
        number = z[:, :1, :, :1, :1] * STEP
        back = torch.arange(1 - STEP, 1).view(1, 1, 1, STEP, 1, 1)
        frames = (number[:, :, 1:].unsqueeze(3) + back).flatten(2, 3)
        alone = torch.where(number[:, :, :1] == 0, 0.0, NOBODY_S)
        return torch.cat([alone, frames], 2).expand(-1, 3, -1, z.shape[-2] * RATIO, z.shape[-1] * RATIO).clone()

    def encode(x: torch.Tensor, causal: Any = None) -> torch.Tensor:
        groups = x[:, :1, 1:, :1, :1].unflatten(2, (-1, STEP)) if x.shape[2] > 1 else x.new_zeros(1, 1, 0, STEP, 1, 1)
        assert torch.equal(groups, groups[:, :, :, :1] + torch.arange(STEP).view(1, 1, 1, STEP, 1, 1))
        alone = torch.where(x[:, :1, :1, :1, :1] == 0, 0.0, NOBODY_S)
        moments = torch.cat([alone, groups[:, :, :, -1] / STEP], 2)
        return moments.expand(-1, 16, -1, x.shape[-2] // RATIO, x.shape[-1] // RATIO).clone()

    vae.decoder.forward, vae.encoder.forward = decode, encode


class TestFrames:
    """None late, doubled or lost."""

    @pytest.mark.parametrize("operation", list(Operation))
    @pytest.mark.parametrize(("size", "stride"), LENGTHS)
    @pytest.mark.parametrize(("height", "width"), [(3, 4), (5, 7)])
    def test_each_is_in_its_place(self, operation: Operation, size: int, stride: int, height: int, width: int) -> None:
        plain = framewise("ltx-2.3", size, stride)
        for frames in (*FRAMES, 25, 57):
            if frames <= size:
                continue
            count = frames if operation is ENCODE else 1 + (frames - 1) // STEP
            unit = RATIO if operation is ENCODE else 1
            clip = torch.arange(float(count)).view(1, 1, -1, 1, 1)
            x = clip.expand(1, 3 if operation is ENCODE else 8, -1, height * unit, width * unit).contiguous()

            def body(vae: Any, rank: int, x: torch.Tensor = x) -> Any:
                numbered(vae)
                taken = decisions(vae)
                return run_public(vae, operation, x), taken[0]

            result, decision = on_ranks(2, plain, body)[0]
            assert decision.grid == (windows(frames, stride), *((1, 1) if height == 3 else (2, 3)))
            made = 1 + (frames - 1) // STEP if operation is ENCODE else frames
            assert result.shape[2] == made
            wanted = torch.arange(float(made)).view(1, 1, -1, 1, 1).expand_as(result)
            assert float((result - wanted).abs().max()) <= 1e-4, (frames, "blends of equal numbers, rounded")

    @pytest.mark.parametrize("name", ["ltx-2", "ltx-2.3"])
    @pytest.mark.parametrize(("size", "stride", "frames"), [(*n, f) for n in LENGTHS[:3] for f in FRAMES if f > n[0]])
    def test_each_is_nearest_to_its_own_of_an_untiled_clip(
        self, name: str, size: int, stride: int, frames: int
    ) -> None:
        # Decode only: the last latent that a random encoder makes of a short stretch depends more on what is
        # beyond than on the frames that it sees. `test_each_is_in_its_place` and `TestBits` are for encode too.
        plain = framewise(name, size, stride)
        z = given(plain, DECODE, frames, 4, 4)
        whole = untiled(plain, DECODE, z)
        result, decision = shared(plain, DECODE, z, 2)
        assert decision.grid == (windows(frames, stride), 1, 1)
        assert result.shape == whole.shape
        for number in range(frames):
            errors = {
                shift: float((result[:, :, number] - whole[:, :, number + shift]).square().mean())
                for shift in (-1, 0, 1)
                if 0 <= number + shift < frames
            }
            assert min(errors, key=lambda shift: errors[shift]) == 0, (number, errors)

    def test_diffusers_is_one_frame_late(self) -> None:
        plain = framewise("ltx-2", 16, 16)
        z = given(plain, DECODE, 49, 4, 4)
        with torch.no_grad():
            late, whole = plain.decode(z).sample, untiled(plain, DECODE, z)
        near = [
            min((-1, 0), key=lambda shift: float((late[:, :, n] - whole[:, :, n + shift]).square().mean()))
            for n in range(1, 49)
        ]
        assert near == [0] * 16 + [-1] * 32


class TestBits:
    @pytest.mark.parametrize("name", ["ltx-2", "ltx-2.3"])
    @pytest.mark.parametrize(("size", "stride"), LENGTHS[:3])
    @pytest.mark.parametrize(("height", "width"), [(4, 4), (5, 6)])
    def test_encode_is_diffusers_and_decode_is_with_its_slice_put_right(
        self, name: str, size: int, stride: int, height: int, width: int
    ) -> None:
        plain = framewise(name, size, stride)
        for operation in Operation:
            x = given(plain, operation, 33, height, width)
            with torch.no_grad():
                wanted = run_public(plain, ENCODE, x) if operation is ENCODE else right_framewise(plain, x)
            for ranks in (1, 2, 3):
                result, decision = shared(plain, operation, x, ranks)
                assert torch.equal(result, wanted), (operation, ranks)
                assert decision.grid[0] == windows(33, stride)

    @pytest.mark.parametrize("operation", list(Operation))
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_any_number_of_ranks_gives_the_same(self, operation: Operation, dtype: torch.dtype) -> None:
        plain = framewise("ltx-2.3", 24, 16, dtype)
        x = given(plain, operation, 49, 6, 5, batch=2)
        results = [shared(plain, operation, x, ranks)[0] for ranks in (1, 2, 3, 4)]
        assert results[0].any()
        assert all(torch.equal(result, results[0]) for result in results[1:])

    @pytest.mark.parametrize("operation", list(Operation))
    def test_causal_reaches_every_tile(self, operation: Operation) -> None:
        plain = framewise("ltx-2.3", 16, 8)
        x = given(plain, operation, 33, 5, 4)
        for causal in (True, False, None):
            with torch.no_grad():
                wanted = (
                    plain.encode(x, causal=causal).latent_dist.parameters
                    if operation is ENCODE
                    else right_framewise(plain, x, causal)
                )
            assert torch.equal(shared(plain, operation, x, 3, causal=causal)[0], wanted)

    @pytest.mark.parametrize("operation", list(Operation))
    def test_what_verify_compares_is_one_rank_s_of_the_same_tiles(self, operation: Operation) -> None:
        plain = framewise("ltx-2.3", 16, 8)
        x = given(plain, operation, 33, 5, 7)
        for one in on_ranks(2, plain, lambda vae, _: compare(vae, operation, tuple(x.shape), VaeParallelMode.TILE)):
            assert (one.decision.grid, one.error, one.holds) == ((4, 2, 3), 0.0, True)


class TestPool:
    def test_27_tiles_over_8_ranks(self) -> None:
        plain = framewise("ltx-2.3", 24, 16)
        z = given(plain, DECODE, 49, 9, 9)
        running, lock = [0] * 8, threading.Lock()

        def body(vae: Any, rank: int) -> Decision:
            def enter(*_: Any) -> None:
                with lock:
                    running[rank] += 1
                    assert running[rank] == 1, "one tile at a time"

            def leave(*_: Any) -> None:
                with lock:
                    running[rank] -= 1

            vae.decoder.register_forward_pre_hook(enter)
            vae.decoder.register_forward_hook(leave)
            taken, ran = decisions(vae), count_calls(vae.decoder)
            vae.decode(z)
            grid = SPEC.grid(vae, DECODE, tuple(z.shape[-3:]))
            dealt = deal([grid.workload(coord) for coord in grid.coords()], 8)
            assert sum(shape[2] * shape[3] * shape[4] for shape in ran) == dealt.loads[rank]
            volumes = [shape[2] * shape[3] * shape[4] for shape in ran]
            assert len(volumes) == len(dealt.tasks_of(rank)) == taken[0].tiles_per_rank[rank]
            assert taken[0].imbalance == round(dealt.imbalance, 4)
            return taken[0]

        decision = on_ranks(8, plain, body)[0]
        assert decision.grid == (3, 3, 3)
        assert sum(decision.tiles_per_rank) == 27
        assert decision.idle_ranks == ()
        assert decision.imbalance == round(184 * 8 / 11**3, 4)  # the busiest rank has 184 of 11 x 11 x 11 latents

    def test_noise_is_refused(self) -> None:
        plain = framewise("ltx-2 noise", 16, 8)

        def body(vae: Any, rank: int) -> None:
            with pytest.raises(UnsupportedError, match="injects noise"):
                vae.decode(given(vae, DECODE, 33, 3, 4))

        on_ranks(2, plain, body)


class TestLengths:
    """What may be set."""

    @pytest.mark.parametrize(
        ("size", "stride", "says"),
        [
            (20, None, "tile time size of 20 frames must be a multiple of .* 8, at least 8; nearest: 16 or 24"),
            (4, 4, "tile time size of 4 frames .* nearest: 8 or 16"),
            (None, 12, "tile time stride of 12 frames must be a multiple of .* nearest: 8 or 16"),
            (None, 24, "stride of 24 frames is larger than the tile time size of 16, .* 16 or less, or a size of 24"),
            (16, 24, "stride of 24 frames is larger"),
        ],
    )
    def test_that_cannot_be_used_are_refused_and_nothing_is_changed(
        self, size: int | None, stride: int | None, says: str
    ) -> None:
        plain = tiny_vae("ltx-2")
        before = dict(vars(plain))
        with pytest.raises(GeometryError, match=says):
            SPEC.set_tiling(plain, size and TileExtent(64, 64, size), stride and TileExtent(48, 48, stride))
        assert vars(plain) == before
        plain.__class__ = DistributedAutoencoderKLLTX2Video
        with pytest.raises(GeometryError, match=says):
            plain.enable_tiling(tile_sample_min_num_frames=size, tile_sample_stride_num_frames=stride)
        assert vars(plain) == before

    def test_are_looked_at_when_they_are_set_by_hand(self) -> None:
        plain = tiny_vae("ltx-2")
        plain.tile_sample_min_num_frames = 20
        SPEC.check_tiling(plain)
        plain.use_framewise_decoding = True
        with pytest.raises(GeometryError, match="tile time size of 20 frames"):
            SPEC.check_tiling(plain)

    def test_switch_the_cutting_of_time_on(self) -> None:
        plain = tiny_vae("ltx-2", tiled=False)
        SPEC.set_tiling(plain, TileExtent(64, 64), TileExtent(48, 48))
        assert not plain.use_framewise_decoding
        SPEC.set_tiling(plain, TileExtent(64, 72, 32), None)
        assert plain.use_framewise_decoding
        assert plain.use_framewise_encoding
        assert (plain.tile_sample_min_num_frames, plain.tile_sample_stride_num_frames) == (32, 8)
        assert (plain.tile_sample_min_width, plain.tile_sample_stride_width) == (72, 48)

    @pytest.mark.parametrize("operation", list(Operation))
    def test_the_flag_of_decoding_decides_both_ways(self, operation: Operation) -> None:
        plain = tiny_vae("ltx-2.3")
        plain.use_framewise_encoding = True
        shape = tuple(given(plain, operation, 33, 3, 4).shape)
        assert not SPEC.is_tiled(plain, operation, shape)
        plain.use_framewise_encoding, plain.use_framewise_decoding = False, True
        assert SPEC.is_tiled(plain, operation, shape)
        assert SPEC.grid(plain, operation, shape[-3:]).shape == (4, 1, 1)
