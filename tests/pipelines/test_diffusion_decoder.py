# SPDX-License-Identifier: Apache-2.0
"""A pipeline that carries the diffusion decoder of LTX-2.5, which decodes and does not encode."""

from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, LTX2VideoDiffusionDecodePipeline

from tests.helpers.diffusion_decoders import seeded, tiny_decoder
from tests.helpers.vaes import noise, tiny_vae
from vllm_omni_vae.config import DiffusionParallelConfig, TileExtent, VaeConfig
from vllm_omni_vae.pipelines.components import find_vaes, set_up_vae
from vllm_omni_vae.pipelines.request import Stage
from vllm_omni_vae.worker.use import UseMeter
from vllm_omni_vae.worker.watch import StageClock, VaeWatch


def pipeline(vae: Any = None) -> LTX2VideoDiffusionDecodePipeline:
    return LTX2VideoDiffusionDecodePipeline(tiny_decoder(tiled=False), FlowMatchEulerDiscreteScheduler(), vae)


def test_it_is_found_beside_a_vae() -> None:
    assert list(find_vaes(pipeline())) == ["diffusion_decoder"]
    assert list(find_vaes(pipeline(tiny_vae("ltx-2")))) == ["diffusion_decoder", "vae"]


def test_the_operator_s_tiles_are_set_on_it() -> None:
    decoder = pipeline().diffusion_decoder
    tiles = VaeConfig(vae_tile_size=TileExtent(20, 16, 16), vae_tile_stride=TileExtent(12, 12, 8))
    set_up_vae(decoder, tiles, DiffusionParallelConfig(vae_patch_parallel_size=2))
    assert decoder.use_tiling
    assert (decoder.tile_sample_min_height, decoder.tile_sample_stride_num_frames) == (20, 8)


@torch.no_grad()
def test_a_decode_is_watched() -> None:
    decoder = pipeline().diffusion_decoder
    clock, told = StageClock(), list[tuple[Stage, int, int]]()
    meter = UseMeter(0)
    watch = VaeWatch([decoder], [], clock, lambda *told_of: told.append(told_of), lambda: None, lambda: None, meter)
    z = noise(1, 4, 1, 3, 3)
    with watch.watching():
        sample = decoder.decode(z, generator=seeded()).sample
    assert torch.equal(sample, decoder.decode(z, generator=seeded()).sample)
    assert list(clock.seconds) == [Stage.DECODE.value]
    assert told[-1] == (Stage.DECODE, 0, 1)
    assert watch.finite
    assert [decision.strategy.value for decision in watch.decisions] == ["direct"]
    assert [(use.operation, use.strategy, use.tiles) for use in meter.uses] == [("decode", "direct", 0)]
