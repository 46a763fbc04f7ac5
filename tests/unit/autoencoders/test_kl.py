# SPDX-License-Identifier: Apache-2.0
"""Autoencoders of pictures: their square tiles, where these differ from diffusers', and their public calls."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from diffusers.models.autoencoders.vae import DecoderOutput
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from torch import nn

from tests.helpers.vaes import (
    VAES,
    count_calls,
    decisions,
    latents,
    noise,
    on_ranks,
    pixels,
    run_public,
    takes_the_tiled_path,
    tiny_vae,
)
from vllm_omni_vae.autoencoders import DistributedAutoencoderKL, Operation, Strategy, distributed_class
from vllm_omni_vae.config import TileExtent
from vllm_omni_vae.errors import GeometryError, UnsupportedError

SPEC = DistributedAutoencoderKL.spec
NAMES = ["flux.1", "sdxl", "flux.2"]
METHODS = ("_tiled_encode", "tiled_decode")
ENCODE, DECODE = Operation.ENCODE, Operation.DECODE


def set_tiles(vae: Any, size: Any, overlap: float, ratio: int = 8) -> Any:
    """Set tiles of ``size`` pixels as diffusers' constructor would."""
    first = size[0] if isinstance(size, tuple) else size
    vae.tile_sample_min_size, vae.tile_latent_min_size, vae.tile_overlap_factor = size, first // ratio, overlap
    return vae


class Shrink(nn.Module):
    """An encoder that sees no further than a latent: means of blocks, so that tiles can only differ by their place."""

    def __init__(self) -> None:
        super().__init__()
        self.tells_the_type = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.avg_pool2d(x, 8).mean(1, keepdim=True).expand(-1, 8, -1, -1).clone()


class Grow(nn.Module):
    """A decoder that sees no further than a latent."""

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return F.interpolate(z[:, :3], scale_factor=8.0)


def local_vae(size: Any, overlap: float) -> Any:
    """An autoencoder whose tiled result is its un-tiled one, if tiles are cut and put together in the right places."""
    vae = set_tiles(tiny_vae("sdxl"), size, overlap)
    vae.encoder, vae.decoder, vae.quant_conv, vae.post_quant_conv = Shrink(), Grow(), None, None
    vae.register_to_config(use_quant_conv=False, use_post_quant_conv=False)
    return vae


def tiles_shared(vae: Any, operation: Operation, x: torch.Tensor, size: int = 2) -> torch.Tensor:
    """The owner's result, after every rank is seen to have taken tiles."""

    def body(mine: Any, rank: int) -> torch.Tensor:
        taken = decisions(mine)
        result = run_public(mine, operation, x)
        assert [decision.strategy for decision in taken] == [Strategy.TILE]
        return result

    return on_ranks(size, vae, body)[0]


@pytest.mark.parametrize("name", NAMES)
def test_tiled_exactly_where_diffusers_tiles(name: str) -> None:
    vae = tiny_vae(name)
    found = set()
    for height, width in ((32, 32), (33, 32), (32, 39), (8, 40), (40, 8), (24, 32), (31, 31)):
        x, z = pixels(vae, 1, height, width), latents(vae, 1, height // 8, width // 8)
        for operation, given in ((ENCODE, x), (DECODE, z)):
            tiled = SPEC.is_tiled(vae, operation, tuple(given.shape))
            assert tiled == takes_the_tiled_path(vae, operation, given, *METHODS), (operation, height, width)
            found.add((operation, tiled))
    assert len(found) == 4
    vae.disable_tiling()
    assert not any(SPEC.is_tiled(vae, operation, (1, 3, 640, 640)) for operation in Operation)


@pytest.mark.parametrize(
    ("name", "operation", "shape", "grid"),
    [
        ("flux.1", DECODE, (1, 16, 9, 9), (1, 3, 3)),
        ("sdxl", DECODE, (2, 4, 5, 4), (1, 2, 2)),
        ("flux.2", DECODE, (1, 4, 1, 13), (1, 1, 5)),
        ("flux.1", ENCODE, (1, 3, 72, 72), (1, 3, 3)),
        ("sdxl", ENCODE, (2, 3, 40, 24), (1, 2, 1)),
        ("flux.2", ENCODE, (1, 3, 61, 107), (1, 3, 5)),
    ],
)
def test_grids_and_the_number_of_calls(
    name: str, operation: Operation, shape: tuple[int, ...], grid: tuple[int, int, int]
) -> None:
    plain = tiny_vae(name)
    x = (pixels if operation is ENCODE else latents)(plain, 1, *shape[2:], batch=shape[0])
    assert tuple(x.shape) == shape
    network = "encoder" if operation is ENCODE else "decoder"
    sequential = count_calls(getattr(plain, network))
    expected = run_public(plain, operation, x)

    def body(vae: Any, rank: int) -> Any:
        getattr(vae, network)._forward_pre_hooks.clear()
        ran, taken = count_calls(getattr(vae, network)), decisions(vae)
        return run_public(vae, operation, x), ran, taken

    ranks = on_ranks(3, plain, body)
    assert torch.equal(ranks[0][0], expected)
    assert sorted(shape for _, ran, _ in ranks for shape in ran) == sorted(sequential), "the same tiles"
    assert len(sequential) == math.prod(grid)
    for number, (_, ran, (decision,)) in enumerate(ranks):
        assert (decision.strategy, decision.grid, decision.operation) == (Strategy.TILE, grid, operation)
        assert len(ran) == decision.tiles_per_rank[number]
        assert decision == ranks[0][2][0]


@pytest.mark.parametrize("name", NAMES)
def test_shapes_are_predicted(name: str) -> None:
    vae = tiny_vae(name)
    vae.__class__ = distributed_class(vae)
    moments = 2 * VAES[name].latents
    for height, width in ((72, 40), (61, 107), (50, 33)):
        tasks, spec = vae.encode_tile_split(pixels(vae, 1, height, width))
        assert spec.output_shape == (1, moments, height // 8, width // 8)
        assert all(tuple(vae.encode_tile_exec(task).shape) == task.output_shape for task in tasks)
        tasks, spec = vae.tile_split(latents(vae, 1, height // 8, width // 8))
        assert spec.output_shape == (1, 3, height // 8 * 8, width // 8 * 8)
        assert all(tuple(vae.tile_exec(task).shape) == task.output_shape for task in tasks)


@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize(
    ("size", "overlap", "height", "width"),
    [
        (32, 0.0, 61, 107),
        (32, 0.5, 61, 107),
        (32, 0.75, 40, 64),
        (64, 0.125, 100, 72),
        (80, 0.2, 123, 90),
        (256, 0.25, 488, 856),
        (64, 0.25, 8, 856),
        (64, 0.25, 488, 9),
    ],
)
def test_as_diffusers_where_the_overlap_is_whole_latents(
    operation: Operation, size: int, overlap: float, height: int, width: int
) -> None:
    vae = set_tiles(tiny_vae("sdxl"), size, overlap)
    x = pixels(vae, 1, height, width) if operation is ENCODE else latents(vae, 1, height // 8, width // 8)
    assert torch.equal(tiles_shared(vae, operation, x), run_public(vae, operation, x))


def test_61x107_latents_are_as_diffusers() -> None:
    vae = set_tiles(tiny_vae("flux.2"), 256, 0.25)
    z = latents(vae, 1, 61, 107)
    sample = tiles_shared(vae, DECODE, z, 3)
    assert sample.shape == (1, 3, 488, 856)
    assert torch.equal(sample, run_public(vae, DECODE, z))


@pytest.mark.parametrize("levels", [1, 3])
def test_the_ratio_follows_from_the_number_of_levels(levels: int) -> None:
    ratio = 2 ** (levels - 1)
    plain = AutoencoderKL(
        block_out_channels=(8,) * levels,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        norm_num_groups=2,
        sample_size=8 * ratio,
    ).eval()
    plain.enable_tiling()
    x, z = noise(1, 3, 11 * ratio + 1, 9 * ratio), noise(1, 4, 11, 9)
    with torch.no_grad():
        for operation, given in ((ENCODE, x), (DECODE, z)):
            assert torch.equal(tiles_shared(plain, operation, given), run_public(plain, operation, given))


def test_a_leftover_thinner_than_a_latent_belongs_to_the_tile_before_it() -> None:
    plain = tiny_vae("flux.1")
    for height in (49, 50, 55):  # tiles begin at 0, 24 and 48
        x = pixels(plain, 1, height, 24)
        with pytest.raises(RuntimeError):
            plain.encode(x)
        plain.disable_tiling()
        first, last = (run_public(plain, ENCODE, part) for part in (x[:, :, :32], x[:, :, 24:]))
        plain.enable_tiling()
        # One row of latents overlaps, and the first row of an overlap is that of the tile before.
        expected = torch.cat([first, last[:, :, 1:]], dim=2)
        assert torch.equal(tiles_shared(plain, ENCODE, x), expected)


@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize("size", [32, 64, 60, 80])
@pytest.mark.parametrize("overlap", [0.0, 0.1, 0.2, 0.25, 0.3, 1 / 3, 0.4, 0.5, 0.6, 0.7, 0.75])
def test_any_overlap_keeps_everything_in_its_place(overlap: float, size: int, operation: Operation) -> None:
    vae = local_vae(size, overlap)
    x = noise(1, 3, 203, 128) if operation is ENCODE else noise(1, 4, 25, 16)
    plain = run_public(local_vae(10**6, 0.25), operation, x)
    assert plain.shape[-2:] == ((25, 16) if operation is ENCODE else (200, 128))
    found = tiles_shared(vae, operation, x)
    assert found.shape == plain.shape
    assert torch.allclose(found, plain, rtol=0, atol=1e-6)


def test_the_overlap_with_which_diffusers_makes_136_pixels_of_16_latents() -> None:
    vae, z = local_vae(64, 0.2), noise(1, 4, 16, 16)
    assert run_public(vae, DECODE, z).shape[-2:] == (136, 136)
    assert tiles_shared(vae, DECODE, z).shape[-2:] == (128, 128)


def test_a_pair_of_sample_sizes_counts_as_its_first() -> None:
    square = tiny_vae("sdxl")
    pair = AutoencoderKL(**VAES["sdxl"].layers | {"sample_size": (32, 48)}).eval()
    pair.load_state_dict(square.state_dict())
    pair.enable_tiling()
    for height, width in ((40, 32), (72, 61), (32, 24)):
        x, z = pixels(square, 1, height, width), latents(square, 1, height // 8, width // 8)
        with pytest.raises(TypeError):
            pair.encode(x)

        def body(vae: Any, rank: int, x: torch.Tensor = x, z: torch.Tensor = z) -> tuple[torch.Tensor, torch.Tensor]:
            return run_public(vae, ENCODE, x), run_public(vae, DECODE, z)

        for moments, sample in on_ranks(2, pair, body, broadcast=True):
            assert torch.equal(moments, run_public(square, ENCODE, x))
            assert torch.equal(sample, run_public(square, DECODE, z))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ((64, 4, 0.25), "64 pixels and one of 4 latents are not the same: 8 pixels make a latent"),
        ((32, 8, 0.25), "set tile_sample_min_size and tile_latent_min_size together"),
        ((4, 0, 0.25), "4 pixels and one of 0 latents"),
        ((32.0, 4, 0.25), "must be whole"),
        ((32, 4, "0.25"), "tile_overlap_factor '0.25' a number"),
        ((32, 4, 1.0), "tile_overlap_factor 1.0 of 4 latents leaves no latent"),
        ((32, 4, 0.9), "tile_overlap_factor 0.9 of 4 latents leaves no latent"),
        ((32, 4, -0.25), "at least 0 and below 1"),
        ((32, 4, math.nan), "at least 0 and below 1"),
    ],
)
def test_numbers_that_make_no_tiles_are_refused(values: tuple[Any, Any, Any], reason: str) -> None:
    vae = tiny_vae("flux.1", tiled=False)
    vae.__class__ = DistributedAutoencoderKL
    vae.tile_sample_min_size, vae.tile_latent_min_size, vae.tile_overlap_factor = values
    with pytest.raises(GeometryError, match=reason):
        vae.enable_tiling()
    assert not vae.use_tiling


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("size", "stride", "expected"),
    [
        (None, None, (32, 4, 0.25)),
        ("64x64", "48x48", (64, 8, 0.25)),
        ("40x40", "8x8", (40, 5, 0.8)),
        ("24x24", "16x16", (24, 3, 1 / 3)),
        ("40x40", None, (40, 5, 0.4)),  # a quarter of 5 latents is no whole number
        ("8x8", None, (8, 1, 0.0)),
        (None, "16x16", (32, 4, 0.5)),
        (None, "32x32", (32, 4, 0.0)),
    ],
)
def test_the_operator_s_tiles_are_set_and_diffusers_alone_gets_them_right(
    name: str, size: str | None, stride: str | None, expected: tuple[int, int, float]
) -> None:
    plain = tiny_vae(name, tiled=False)
    spec = distributed_class(plain).spec
    spec.set_tiling(plain, size and TileExtent.parse(size), stride and TileExtent.parse(stride))
    assert plain.use_tiling
    assert (plain.tile_sample_min_size, plain.tile_latent_min_size) == expected[:2]
    assert float(plain.tile_overlap_factor) == expected[2]
    for operation, x in ((ENCODE, pixels(plain, 1, 56, 72)), (DECODE, latents(plain, 1, 7, 9))):
        assert torch.equal(tiles_shared(plain, operation, x), run_public(plain, operation, x))


@pytest.mark.parametrize(
    ("size", "stride", "error", "reason"),
    [
        ("64x32", None, GeometryError, "--vae-tile-size 64x32: tiles of this autoencoder are square"),
        ("64x64", "48x32", GeometryError, "--vae-tile-stride 48x32: .* give strides that are equal"),
        ("36x36", "24x24", GeometryError, "size 36 is not a multiple of the compression ratio 8"),
        ("64x64", "20x20", GeometryError, "stride 20 is not a multiple of the compression ratio 8"),
        ("32x32", "40x40", GeometryError, "stride 40 is larger than the tile size 32"),
        ("4x4", None, GeometryError, "size 4 is not a multiple of the compression ratio 8"),
        ("64x64x8", None, UnsupportedError, "--vae-tile-size 64x64x8: AutoencoderKL is not tiled in time; write HxW"),
    ],
)
def test_tiles_that_would_spoil_the_picture_are_refused_and_nothing_is_set(
    size: str, stride: str | None, error: type[Exception], reason: str
) -> None:
    vae = tiny_vae("sdxl", tiled=False)
    with pytest.raises(error, match=reason):
        SPEC.set_tiling(vae, TileExtent.parse(size), stride and TileExtent.parse(stride))
    assert (vae.use_tiling, vae.tile_sample_min_size, vae.tile_overlap_factor) == (False, 32, 0.25)


@pytest.mark.parametrize(
    ("operation", "shape", "reason"),
    [
        (ENCODE, (1, 3, 1, 64, 64), r"encodes \(B, C, H, W\) tensors"),
        (ENCODE, (1, 3, 7, 64), "cannot encode 7x64: both must be at least 8"),
        (ENCODE, (1, 3, 64, 0), "cannot encode 64x0"),
        (DECODE, (4, 9, 9), r"decodes \(B, C, H, W\) tensors; this one has the shape \(4, 9, 9\)"),
        (DECODE, (1, 4, 0, 9), "cannot decode 0x9: both must be at least 1"),
    ],
)
def test_input_that_cannot_be_taken_is_refused_before_any_rank_starts(
    operation: Operation, shape: tuple[int, ...], reason: str
) -> None:
    def body(vae: Any, rank: int) -> int:
        ran = [count_calls(vae.encoder), count_calls(vae.decoder)]
        with pytest.raises(GeometryError, match=reason):
            run_public(vae, operation, torch.zeros(shape))
        return len(ran[0] + ran[1])

    assert on_ranks(2, tiny_vae("sdxl"), body) == [0, 0]


@pytest.mark.parametrize("name", NAMES)
def test_items_of_a_batch_one_by_one(name: str) -> None:
    plain = tiny_vae(name)
    plain.enable_slicing()
    for height, width in ((5, 7), (3, 4)):
        x, z = pixels(plain, 1, height * 8, width * 8, batch=2), latents(plain, 1, height, width, batch=2)
        moments, sample = run_public(plain, ENCODE, x), run_public(plain, DECODE, z)

        def body(vae: Any, rank: int, x: torch.Tensor = x, z: torch.Tensor = z) -> Any:
            ran = count_calls(vae.decoder)
            return run_public(vae, ENCODE, x), run_public(vae, DECODE, z), ran

        ranks = on_ranks(2, plain, body)
        assert all(torch.equal(found, moments) for found, _, _ in ranks)
        assert torch.equal(ranks[0][1], sample)
        assert ranks[1][1].shape == ((2, 3, 1, 1) if height == 5 else sample.shape)
        assert {shape[0] for _, _, ran in ranks for shape in ran} == {1}


def test_all_three_tiled_functions() -> None:
    plain = tiny_vae("sdxl")
    x, z = pixels(plain, 1, 40, 61), latents(plain, 1, 5, 7)
    moments, sample = plain._tiled_encode(x), plain.tiled_decode(z).sample

    def body(vae: Any, rank: int) -> None:
        assert torch.equal(vae._tiled_encode(x), moments)
        encoded = vae.tiled_encode(x)
        assert isinstance(encoded, AutoencoderKLOutput)
        assert torch.equal(encoded.latent_dist.parameters, moments)
        (posterior,) = vae.tiled_encode(x, return_dict=False)
        assert torch.equal(posterior.parameters, moments)
        decoded = vae.tiled_decode(z)
        assert isinstance(decoded, DecoderOutput)
        assert torch.equal(decoded.sample, sample)
        assert torch.equal(vae.tiled_decode(z, return_dict=False)[0], sample)

    on_ranks(2, plain, body, broadcast=True)


@pytest.mark.filterwarnings("ignore:The tiled_encode implementation")
def test_alone_it_is_diffusers() -> None:
    plain = tiny_vae("sdxl")
    x, z = pixels(plain, 1, 40, 61), latents(plain, 1, 5, 7)
    results: list[Callable[[Any], torch.Tensor]] = [
        lambda vae: vae._tiled_encode(x),
        lambda vae: vae.tiled_encode(x).latent_dist.parameters,
        lambda vae: vae.tiled_encode(x, return_dict=False)[0].parameters,
        lambda vae: vae.tiled_decode(z, return_dict=False)[0],
        lambda vae: run_public(vae, ENCODE, x),
        lambda vae: run_public(vae, DECODE, z),
    ]
    expected = [result(plain) for result in results]
    plain.__class__ = DistributedAutoencoderKL
    assert all(torch.equal(result(plain), wanted) for result, wanted in zip(results, expected, strict=True))


def test_a_generator_and_a_tuple_as_pipelines_ask_for_them() -> None:
    plain = tiny_vae("flux.1")
    z = latents(plain, 1, 5, 7)
    sample = run_public(plain, DECODE, z)

    def body(vae: Any, rank: int) -> torch.Tensor:
        (found,) = vae.decode(z, return_dict=False, generator=torch.Generator().manual_seed(rank))
        return found

    assert all(torch.equal(found, sample) for found in on_ranks(2, plain, body, broadcast=True))


def test_a_constant_picture_stays_constant_through_any_grid() -> None:
    vae = local_vae(64, 0.75)
    sample = tiles_shared(vae, DECODE, torch.full((1, 4, 13, 11), 0.7))
    assert torch.allclose(sample, torch.full((1, 3, 104, 88), 0.7), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_statistics_are_diffusers_own(name: str) -> None:
    plain = tiny_vae(name)
    before = {key: value.clone() for key, value in plain.state_dict().items()}
    assert ("bn.running_mean" in before) == (name == "flux.2")

    def body(vae: Any, rank: int) -> dict[str, torch.Tensor]:
        run_public(vae, ENCODE, pixels(vae, 1, 40, 56))
        run_public(vae, DECODE, latents(vae, 1, 5, 7))
        return vae.state_dict()

    for after in on_ranks(2, plain, body):
        assert list(after) == list(before)
        assert all(torch.equal(after[key], value) for key, value in before.items())
