# SPDX-License-Identifier: Apache-2.0
"""Tiny Wan 2.1 and 2.2 pipelines: the real stages, compression ratios and channel relations, narrow layers."""

from dataclasses import dataclass

import torch
from diffusers import (
    AutoencoderKLWan,
    DiffusionPipeline,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel

from vllm_omni_vae.tiny.common import randomize, t5_tokenizer, umt5_text_encoder

_LATENT_CHANNELS = 4
_MASK_CHANNELS = 4
_TEXT_WIDTH = 32
_IMAGE_WIDTH = 32


@dataclass(frozen=True, slots=True)
class _Variant:
    """How one released checkpoint differs from the others."""

    image_to_video: bool = False
    clip: bool = False
    boundary_ratio: float | None = None
    wan22_vae: bool = False
    flow_shift: float = 3.0


_VARIANTS = {
    "wan2.1-t2v": _Variant(),
    "wan2.1-i2v": _Variant(image_to_video=True, clip=True),
    "wan2.2-t2v": _Variant(boundary_ratio=0.875),
    "wan2.2-i2v": _Variant(image_to_video=True, boundary_ratio=0.9),
    "wan2.2-ti2v-5b": _Variant(wan22_vae=True, flow_shift=5.0),
}


def pipeline(family: str, generator: torch.Generator) -> DiffusionPipeline:
    """The pipeline of ``family``, every weight drawn from ``generator``.

    It takes 4n+1 frames and heights and widths that are multiples of 16, for ``wan2.2-ti2v-5b`` of 32.
    """
    variant = _VARIANTS[family]
    tokenizer = t5_tokenizer()
    components = {
        "tokenizer": tokenizer,
        "text_encoder": umt5_text_encoder(tokenizer, generator, width=_TEXT_WIDTH),
        "vae": _vae(variant, generator),
        "scheduler": UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=variant.flow_shift
        ),
        "transformer": _transformer(variant, generator),
        "transformer_2": _transformer(variant, generator) if variant.boundary_ratio is not None else None,
        "boundary_ratio": variant.boundary_ratio,
        "expand_timesteps": variant.wan22_vae,
    }
    if not variant.image_to_video:
        return WanPipeline(**components)
    if variant.clip:
        components |= {"image_encoder": _image_encoder(generator), "image_processor": CLIPImageProcessorPil()}
    return WanImageToVideoPipeline(**components)


def _vae(variant: _Variant, generator: torch.Generator) -> AutoencoderKLWan:
    if variant.wan22_vae:
        vae = AutoencoderKLWan(
            base_dim=4,
            decoder_base_dim=6,
            z_dim=_LATENT_CHANNELS,
            is_residual=True,
            patch_size=2,
            in_channels=12,
            out_channels=12,
            scale_factor_spatial=16,
            latents_mean=[-0.2, 0.0, -0.1, -0.3],
            latents_std=[0.5, 1.0, 0.6, 0.7],
        )
    else:
        vae = AutoencoderKLWan(
            base_dim=4,
            z_dim=_LATENT_CHANNELS,
            latents_mean=[-0.8, -0.7, -0.9, 0.1],
            latents_std=[2.8, 1.5, 2.3, 2.7],
        )
    return randomize(vae, generator)


def _transformer(variant: _Variant, generator: torch.Generator) -> WanTransformer3DModel:
    mask_and_image = _MASK_CHANNELS + _LATENT_CHANNELS
    return randomize(
        WanTransformer3DModel(
            num_attention_heads=4,
            attention_head_dim=12,
            in_channels=_LATENT_CHANNELS + (mask_and_image if variant.image_to_video else 0),
            out_channels=_LATENT_CHANNELS,
            text_dim=_TEXT_WIDTH,
            freq_dim=32,
            ffn_dim=96,
            num_layers=2,
            image_dim=_IMAGE_WIDTH if variant.clip else None,
            added_kv_proj_dim=48 if variant.clip else None,
        ),
        generator,
    )


def _image_encoder(generator: torch.Generator) -> CLIPVisionModel:
    config = CLIPVisionConfig(
        hidden_size=_IMAGE_WIDTH,
        intermediate_size=2 * _IMAGE_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=224,
        patch_size=14,
        hidden_act="gelu",
    )
    return randomize(CLIPVisionModel(config), generator)
