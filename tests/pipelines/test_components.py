# SPDX-License-Identifier: Apache-2.0
"""Autoencoders are found wherever a pipeline holds them, and each is said to be shared or why not."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderTiny, DiffusionPipeline, UniPCMultistepScheduler, WanPipeline
from torch import nn

from tests.helpers.vaes import on_ranks, tiny_vae
from vllm_omni_vae.autoencoders import DistributedAutoencoderKLWan
from vllm_omni_vae.config import DiffusionParallelConfig, VaeConfig, VaeSplits, VaeTileMerge
from vllm_omni_vae.errors import ConfigurationError, GeometryError, UnsupportedError
from vllm_omni_vae.pipelines.components import distribute_vaes, find_vaes, repeated, self_test, set_up_vae
from vllm_omni_vae.pipelines.request import ComponentReport

ALONE = DiffusionParallelConfig()
TWO = DiffusionParallelConfig(vae_patch_parallel_size=2)


def wan_vae() -> Any:
    return tiny_vae(tiled=False)


class Changed(AutoencoderKL):
    """Somebody's variant, whose overrides a distributed class would lose."""


def changed() -> Changed:
    return Changed(block_out_channels=(8,), norm_num_groups=2, latent_channels=4, sample_size=64)


def taesd() -> AutoencoderTiny:
    channels = (8, 8)
    return AutoencoderTiny(
        encoder_block_out_channels=channels,
        decoder_block_out_channels=channels,
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    )


class Codec(nn.Module):
    """Somebody's autoencoder, with none of diffusers' switches."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return z


class Renamed(DiffusionPipeline):
    """A pipeline whose autoencoder has a name of its own."""

    def __init__(self, movie_codec: Any, scheduler: Any):
        super().__init__()
        self.register_modules(movie_codec=movie_codec, scheduler=scheduler)


class TwoStages(DiffusionPipeline):
    """A pipeline that hands its result to another one, which has an autoencoder too."""

    def __init__(self, vae: Any, scheduler: Any):
        super().__init__()
        self.register_modules(vae=vae, scheduler=scheduler)


def renamed(vae: Any) -> Renamed:
    return Renamed(movie_codec=vae, scheduler=UniPCMultistepScheduler())


def two_stages(vae: Any, refiner: DiffusionPipeline) -> TwoStages:
    pipeline = TwoStages(vae=vae, scheduler=UniPCMultistepScheduler())
    pipeline.refiner = refiner
    return pipeline


def test_the_vae_of_a_wan_pipeline_is_found() -> None:
    vae = wan_vae()
    pipeline = WanPipeline(tokenizer=None, text_encoder=None, vae=vae, scheduler=UniPCMultistepScheduler())
    assert find_vaes(pipeline) == {"vae": vae}


def test_a_renamed_vae_is_found() -> None:
    vae = wan_vae()
    assert find_vaes(renamed(vae)) == {"movie_codec": vae}


def test_vaes_of_a_pipeline_within_are_found_by_path() -> None:
    outer, inner = wan_vae(), changed()
    pipeline = two_stages(outer, renamed(inner))
    assert find_vaes(pipeline) == {"vae": outer, "refiner.movie_codec": inner}


def test_a_vae_that_two_stages_share_is_named_once() -> None:
    vae = wan_vae()
    pipeline = two_stages(vae, renamed(vae))
    assert find_vaes(pipeline) == {"vae": vae}
    pipeline.second_name = vae
    assert list(find_vaes(pipeline).values()) == [vae]


def test_further_paths_to_a_vae_are_reported_as_the_one_it_is_named_by() -> None:
    vae = wan_vae()
    reports = distribute_vaes({"vae": vae}, VaeConfig(), ALONE)
    assert repeated(two_stages(vae, renamed(wan_vae())), reports) == []
    shared = two_stages(vae, renamed(vae))
    expected = ComponentReport("refiner.movie_codec", "AutoencoderKLWan", False, "the same as vae")
    assert repeated(shared, reports) == [expected]
    on = [dataclasses.replace(reports[0], parallel=True, selftest="2 checks, bit-equal")]
    assert repeated(shared, on) == [dataclasses.replace(expected, parallel=True)]


def test_pipelines_that_hold_each_other_end() -> None:
    vae, other = wan_vae(), wan_vae()
    inner = renamed(other)
    outer = two_stages(vae, inner)
    inner.base = outer
    assert find_vaes(outer) == {"vae": vae, "refiner.movie_codec": other}


def test_what_only_encodes_or_is_no_module_is_no_vae() -> None:
    half = nn.Module()
    half.encode = lambda x: x  # type: ignore[assignment]
    tokenizer = SimpleNamespace(encode=str, decode=str)
    pipeline = SimpleNamespace(components={"half": half, "tokenizer": tokenizer, "nothing": None})
    assert find_vaes(pipeline) == {}


@pytest.mark.parametrize("make", [changed, taesd, Codec])
def test_an_autoencoder_of_another_kind_is_found(make: Any) -> None:
    vae = make()
    assert find_vaes(SimpleNamespace(components={"vae": vae})) == {"vae": vae}


def test_one_rank_changes_nothing() -> None:
    vae, other = wan_vae(), changed()
    reports = distribute_vaes({"vae": vae, "refiner.vae": other}, VaeConfig(), ALONE)
    assert reports == [
        ComponentReport("vae", "AutoencoderKLWan", False, "one VAE rank"),
        ComponentReport("refiner.vae", "Changed", False, "one VAE rank"),
    ]
    assert type(vae).__name__ == "AutoencoderKLWan"
    assert not vae.use_tiling
    assert not other.use_tiling


@pytest.mark.usefixtures("two_ranks")
def test_several_ranks_share_what_they_can_and_say_so() -> None:
    vae, other = wan_vae(), changed()
    reports = distribute_vaes({"vae": vae, "refiner.vae": other}, VaeConfig(), TWO)
    assert reports == [
        ComponentReport("vae", "AutoencoderKLWan", True, "tile on 2 ranks"),
        ComponentReport("refiner.vae", "Changed", False, "no distributed class for Changed"),
    ]
    assert type(vae) is DistributedAutoencoderKLWan
    assert vae.is_distributed_enabled()
    assert vae.use_tiling
    assert type(other) is Changed


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("make", [changed, taesd, Codec])
def test_sharing_that_was_asked_for_and_is_impossible_is_refused(make: Any) -> None:
    vae = make()
    kind = type(vae).__name__
    with pytest.raises(
        UnsupportedError,
        match=rf"--vae-patch-parallel-size 2 can do nothing here: first_stage: no distributed class for {kind}$",
    ):
        distribute_vaes({"first_stage": vae}, VaeConfig(), TWO)


def test_sharing_without_any_autoencoder_is_refused() -> None:
    assert distribute_vaes({}, VaeConfig(), ALONE) == []
    with pytest.raises(UnsupportedError, match="the pipeline has no autoencoder"):
        distribute_vaes({}, VaeConfig(), TWO)


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("make", [changed, taesd, Codec])
@pytest.mark.parametrize(
    "config",
    [
        VaeConfig(),
        VaeConfig(vae_tile_size="256x256", vae_tile_stride="192x192"),
        VaeConfig(vae_use_slicing=True),
    ],
    ids=["plain", "tile size", "slicing"],
)
def test_an_autoencoder_without_the_switches_does_not_stop_the_others(make: Any, config: VaeConfig) -> None:
    vae = wan_vae()
    reports = distribute_vaes({"vae": vae, "second.vae": make()}, config, TWO)
    assert [(report.path, report.parallel) for report in reports] == [("vae", True), ("second.vae", False)]
    assert vae.is_distributed_enabled()


@pytest.mark.usefixtures("two_ranks")
def test_a_falling_back_size_is_reported_as_it_is() -> None:
    parallel = DiffusionParallelConfig(vae_patch_parallel_size=4, num_gpus=2)
    (report,) = distribute_vaes({"vae": wan_vae()}, VaeConfig(), parallel)
    assert report.detail == "tile on 2 ranks"


@pytest.mark.usefixtures("two_ranks")
def test_splits_reach_the_autoencoder_and_the_report() -> None:
    vae = wan_vae()
    parallel = DiffusionParallelConfig(vae_patch_parallel_size=2, vae_encode_split="rank")  # type: ignore[arg-type]
    (report,) = distribute_vaes({"vae": vae}, VaeConfig(), parallel)
    assert report.detail == "tile on 2 ranks, encode split by rank, margin 2"
    assert vae.parallel_state.splits == VaeSplits(encode=2)


@pytest.mark.usefixtures("two_ranks")
def test_the_merge_of_tiles_reaches_the_autoencoder_and_the_report() -> None:
    vae = wan_vae()
    parallel = DiffusionParallelConfig(vae_patch_parallel_size=2, vae_tile_merge="sum")  # type: ignore[arg-type]
    (report,) = distribute_vaes({"vae": vae}, VaeConfig(), parallel)
    assert vae.parallel_state.merge is VaeTileMerge.SUM
    assert report.detail == "tile on 2 ranks, tiles summed"


def test_the_operator_s_geometry_is_set() -> None:
    vae = wan_vae()
    config = VaeConfig(vae_use_tiling=True, vae_tile_size="64x32", vae_tile_stride="48x24", vae_use_slicing=True)
    set_up_vae(vae, config, ALONE)
    assert (vae.use_tiling, vae.use_slicing) == (True, True)
    assert (vae.tile_sample_min_height, vae.tile_sample_min_width) == (64, 32)
    assert (vae.tile_sample_stride_height, vae.tile_sample_stride_width) == (48, 24)


def test_a_part_of_the_geometry_leaves_the_family_s_rest() -> None:
    vae, untouched = wan_vae(), wan_vae()
    set_up_vae(vae, VaeConfig(vae_use_tiling=True, vae_tile_stride="128x64"), ALONE)
    assert (vae.tile_sample_stride_height, vae.tile_sample_stride_width) == (128, 64)
    assert vae.tile_sample_min_height == untouched.tile_sample_min_height


def test_the_operator_s_geometry_is_set_on_an_autoencoder_that_takes_none() -> None:
    vae = tiny_vae("flux.1", tiled=False)
    set_up_vae(vae, VaeConfig(vae_use_tiling=True, vae_tile_size="64x64", vae_tile_stride="40x40"), ALONE)
    assert (vae.use_tiling, vae.tile_sample_min_size, vae.tile_latent_min_size) == (True, 64, 8)
    assert vae.tile_overlap_factor == 3 / 8
    with pytest.raises(GeometryError, match="tiles of this autoencoder are square"):
        set_up_vae(vae, VaeConfig(vae_use_tiling=True, vae_tile_size="64x32"), ALONE)


@pytest.mark.parametrize("flags", [{"vae_tile_size": "64x64x8"}, {"vae_tile_stride": "48x48x4"}])
def test_frames_in_the_geometry_are_refused(flags: dict[str, str]) -> None:
    (flag,) = flags
    with pytest.raises(UnsupportedError, match=rf"--{flag.replace('_', '-')} .* is not tiled in time; write HxW"):
        set_up_vae(wan_vae(), VaeConfig(vae_use_tiling=True, **flags), ALONE)


@pytest.mark.parametrize("parallel", [ALONE, TWO], ids=["one rank", "two ranks"])
@pytest.mark.parametrize(
    ("size", "stride", "reason"),
    [
        ("32x32", None, "stride 192 is larger than the tile size 32"),
        ("64x64", "64x72", "stride 72 is larger than the tile size 64"),
        ("36x64", "24x24", "size 36 is not a multiple of the compression ratio 8"),
        ("64x64", "48x20", "stride 20 is not a multiple of the compression ratio 8"),
        ("4x4", "4x4", "not a multiple of the compression ratio 8"),
    ],
)
def test_a_geometry_that_would_spoil_the_picture_is_refused(
    size: str, stride: str | None, reason: str, parallel: DiffusionParallelConfig
) -> None:
    config = VaeConfig(vae_use_tiling=True, vae_tile_size=size, vae_tile_stride=stride)
    with pytest.raises(GeometryError, match=reason) as caught:
        set_up_vae(wan_vae(), config, parallel)
    assert isinstance(caught.value, ConfigurationError)


def test_what_is_shared_is_tested_and_nothing_else() -> None:
    other = taesd()
    shared = ComponentReport("vae", "AutoencoderKLWan", True, "tile on 2 ranks")
    alone = ComponentReport("refiner.vae", "AutoencoderTiny", False, "no distributed class for AutoencoderTiny")

    def body(vae: Any, rank: int) -> list[ComponentReport]:
        return self_test({"vae": vae, "refiner.vae": other}, [shared, alone])

    for reports in on_ranks(2, tiny_vae(), body):
        assert reports == [dataclasses.replace(shared, selftest="2 checks, bit-equal"), alone]
