# SPDX-License-Identifier: Apache-2.0
"""Tiny Qwen-Image pipelines, for text and for editing: the real stages, ratios and channel relations, narrow layers."""

from dataclasses import dataclass

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImageLayeredPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from vllm_omni_vae.tiny.common import randomize, require_torchvision
from vllm_omni_vae.tiny.qwen_text import qwen_tokenizer

_LATENT_CHANNELS = 8
"""More than a picture has: the editing pipelines take a tensor with as many channels as this for latents."""
_TEXT_WIDTH = 32
_VISION_PATCH, _VISION_MERGE = 14, 2
_VISION_TOKEN_PIXELS = (_VISION_PATCH * _VISION_MERGE) ** 2


@dataclass(frozen=True, slots=True)
class _Variant:
    """How one released checkpoint differs from the others."""

    kind: type[DiffusionPipeline]
    reads_images: bool = True
    image_channels: int = 3
    layered: bool = False


_VARIANTS = {
    "qwen-image": _Variant(QwenImagePipeline, reads_images=False),
    "qwen-image-edit": _Variant(QwenImageEditPipeline),
    "qwen-image-edit-plus": _Variant(QwenImageEditPlusPipeline),
    "qwen-image-layered": _Variant(QwenImageLayeredPipeline, image_channels=4, layered=True),
}


def pipeline(family: str, generator: torch.Generator) -> DiffusionPipeline:
    """The pipeline of ``family``, every weight drawn from ``generator``.

    It takes heights and widths that are multiples of 16. The pipelines that read images scale them: to an area of
    1024x1024 pixels for the VAE, ``qwen-image-layered`` to 640x640.
    """
    variant = _VARIANTS[family]
    tokenizer = qwen_tokenizer([_system_prompt(variant)])
    components = {
        "scheduler": FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=0.9,
            base_image_seq_len=256,
            max_image_seq_len=8192,
            shift_terminal=0.02,
        ),
        "vae": _vae(variant, generator),
        "text_encoder": _text_encoder(tokenizer, generator),
        "tokenizer": tokenizer,
        "transformer": _transformer(variant, generator),
    }
    if variant.reads_images:
        components["processor"] = _processor(tokenizer)
    return variant.kind(**components)


def _system_prompt(variant: _Variant) -> str:
    """What the pipeline puts before each prompt; it drops a fixed number of tokens for it from the encoded text."""
    names = ["scheduler", "vae", "text_encoder", "tokenizer", "transformer"]
    if variant.reads_images:
        names.append("processor")
    return str(variant.kind(**dict.fromkeys(names)).prompt_template_encode).partition("{}")[0]


def _vae(variant: _Variant, generator: torch.Generator) -> AutoencoderKLQwenImage:
    """With one residual block a stage, half of the released: most of the time goes into the references' encode."""
    return randomize(
        AutoencoderKLQwenImage(
            base_dim=4,
            z_dim=_LATENT_CHANNELS,
            input_channels=variant.image_channels,
            num_res_blocks=1,
            latents_mean=[-0.8, -0.7, -0.9, 0.1, -0.2, 1.0, -0.2, 1.6],
            latents_std=[2.8, 1.5, 2.3, 2.7, 1.2, 1.8, 2.6, 2.1],
        ),
        generator,
    )


def _text_encoder(tokenizer: Qwen2Tokenizer, generator: torch.Generator) -> Qwen2_5_VLForConditionalGeneration:
    tokens = {
        name: tokenizer.convert_tokens_to_ids(f"<|{name}|>")
        for name in ("image_pad", "video_pad", "vision_start", "vision_end")
    }
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": _TEXT_WIDTH,
            "intermediate_size": 2 * _TEXT_WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]},
            "bos_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": _TEXT_WIDTH,
            "patch_size": _VISION_PATCH,
            "spatial_merge_size": _VISION_MERGE,
            "fullatt_block_indexes": [1],
        },
        image_token_id=tokens["image_pad"],
        video_token_id=tokens["video_pad"],
        vision_start_token_id=tokens["vision_start"],
        vision_end_token_id=tokens["vision_end"],
    )
    return randomize(Qwen2_5_VLForConditionalGeneration(config), generator)


def _transformer(variant: _Variant, generator: torch.Generator) -> QwenImageTransformer2DModel:
    return randomize(
        QwenImageTransformer2DModel(
            in_channels=4 * _LATENT_CHANNELS,
            out_channels=_LATENT_CHANNELS,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=_TEXT_WIDTH,
            axes_dims_rope=(2, 2, 4),
            use_additional_t_cond=variant.layered,
            use_layer3d_rope=variant.layered,
        ),
        generator,
    )


def _processor(tokenizer: Qwen2Tokenizer) -> Qwen2VLProcessor:
    """The released one, but an image becomes 16 tokens of the text encoder at most."""
    require_torchvision("processor", Qwen2VLProcessor.__name__)
    images = Qwen2VLImageProcessor(
        patch_size=_VISION_PATCH,
        merge_size=_VISION_MERGE,
        min_pixels=4 * _VISION_TOKEN_PIXELS,
        max_pixels=16 * _VISION_TOKEN_PIXELS,
    )
    return Qwen2VLProcessor(images, tokenizer, Qwen2VLVideoProcessor())
