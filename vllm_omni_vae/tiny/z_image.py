# SPDX-License-Identifier: Apache-2.0
"""A tiny Z-Image pipeline: the real stages, ratios and channel relations, narrow layers."""

import torch
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    ZImagePipeline,
    ZImageTransformer2DModel,
)

from vllm_omni_vae.tiny.common import randomize
from vllm_omni_vae.tiny.qwen_text import qwen3_text_encoder, qwen_tokenizer

_LATENT_CHANNELS = 4
_TEXT_WIDTH = 32


def pipeline(family: str, generator: torch.Generator) -> DiffusionPipeline:
    """The pipeline of ``family``, every weight drawn from ``generator``.

    It takes heights and widths that are multiples of 16. Its VAE tiles what is larger than 64 pixels.
    """
    tokenizer = qwen_tokenizer()
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_vae(generator),
        text_encoder=qwen3_text_encoder(tokenizer, generator, width=_TEXT_WIDTH, layers=3).model,
        tokenizer=tokenizer,
        transformer=_transformer(generator),
    )


def _vae(generator: torch.Generator) -> AutoencoderKL:
    return randomize(
        AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(8, 8, 16, 16),
            layers_per_block=2,
            norm_num_groups=4,
            latent_channels=_LATENT_CHANNELS,
            sample_size=64,
            scaling_factor=0.3611,
            shift_factor=0.1159,
            use_quant_conv=False,
            use_post_quant_conv=False,
            force_upcast=False,
        ),
        generator,
    )


def _transformer(generator: torch.Generator) -> ZImageTransformer2DModel:
    return randomize(
        ZImageTransformer2DModel(
            in_channels=_LATENT_CHANNELS,
            dim=64,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=4,
            n_kv_heads=4,
            cap_feat_dim=_TEXT_WIDTH,
            axes_dims=[4, 6, 6],
            axes_lens=[1024, 512, 512],
        ),
        generator,
    )
