# SPDX-License-Identifier: Apache-2.0
"""Tiny FLUX.2 pipelines, [dev] and [klein]: the real stages, ratios and channel relations, narrow layers."""

import torch
from diffusers import (
    AutoencoderKLFlux2,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
)
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralImageProcessor,
    PixtralProcessor,
    PreTrainedTokenizerFast,
)

from vllm_omni_vae.tiny.common import randomize, require_torchvision
from vllm_omni_vae.tiny.qwen_text import qwen3_text_encoder, qwen_tokenizer

_LATENT_CHANNELS = 4
_LATENTS_IN_A_TOKEN = 4
_TEXT_WIDTH = 32
_TEXT_STATES = 3
"""The denoiser reads so many hidden states of the text encoder side by side; the pipelines number its layers."""
_MISTRAL_LAYERS = 30
_QWEN_LAYERS = 28
_VISION_PATCH, _VISION_MERGE = 14, 2

_MISTRAL_SPECIALS = (
    "<unk>",
    "<s>",
    "</s>",
    "<pad>",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[INST]",
    "[/INST]",
    "[IMG]",
    "[IMG_BREAK]",
    "[IMG_END]",
)
_MISTRAL_CHAT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set mark = 'SYSTEM_PROMPT' if message.role == 'system' else 'INST' %}[{{ mark }}]"
    "{% for part in message.content %}{{ '[IMG]' if part.type == 'image' else part.text }}{% endfor %}"
    "[/{{ mark }}]{% endfor %}"
)


def pipeline(family: str, generator: torch.Generator) -> DiffusionPipeline:
    """The pipeline of ``family``, every weight drawn from ``generator``.

    It takes heights and widths that are multiples of 16, with or without reference images. Its VAE tiles what is larger
    than 64 pixels. The text encoder is as deep as the hidden states that the pipeline reads by default.
    """
    shared = {
        "scheduler": FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=1.15,
            base_image_seq_len=256,
            max_image_seq_len=4096,
            shift=3.0,
        ),
        "vae": _vae(generator),
    }
    if family == "flux2":
        processor = _processor()
        return Flux2Pipeline(
            **shared,
            text_encoder=_mistral(processor.tokenizer, generator),
            tokenizer=processor,
            transformer=_transformer(generator, guidance=True),
        )
    tokenizer = qwen_tokenizer()
    return Flux2KleinPipeline(
        **shared,
        text_encoder=qwen3_text_encoder(tokenizer, generator, width=_TEXT_WIDTH, layers=_QWEN_LAYERS),
        tokenizer=tokenizer,
        transformer=_transformer(generator, guidance=False),
        is_distilled=True,
    )


@torch.no_grad()
def _vae(generator: torch.Generator) -> AutoencoderKLFlux2:
    """With statistics of the latents, which are buffers that training fills."""
    vae = randomize(
        AutoencoderKLFlux2(
            block_out_channels=(8, 8, 16, 16),
            norm_num_groups=4,
            latent_channels=_LATENT_CHANNELS,
            sample_size=64,
        ),
        generator,
    )
    vae.bn.running_mean.uniform_(-0.1, 0.1, generator=generator)
    vae.bn.running_var.uniform_(0.5, 1.5, generator=generator)
    return vae


def _transformer(generator: torch.Generator, *, guidance: bool) -> Flux2Transformer2DModel:
    return randomize(
        Flux2Transformer2DModel(
            in_channels=_LATENTS_IN_A_TOKEN * _LATENT_CHANNELS,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=_TEXT_STATES * _TEXT_WIDTH,
            timestep_guidance_channels=32,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=guidance,
        ),
        generator,
    )


def _processor() -> PixtralProcessor:
    """Every byte of a prompt is a token."""
    require_torchvision("tokenizer", PixtralProcessor.__name__)
    tokens = [*_MISTRAL_SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    spelling = Tokenizer(BPE(vocab={token: place for place, token in enumerate(tokens)}, merges=[]))
    spelling.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelling.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=spelling,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens=list(_MISTRAL_SPECIALS),
        padding_side="left",
        model_max_length=4096,
    )
    return PixtralProcessor(
        PixtralImageProcessor(
            patch_size=_VISION_PATCH * _VISION_MERGE, size={"longest_edge": 4 * _VISION_PATCH * _VISION_MERGE}
        ),
        tokenizer,
        patch_size=_VISION_PATCH,
        spatial_merge_size=_VISION_MERGE,
        chat_template=_MISTRAL_CHAT,
    )


def _mistral(tokenizer: PreTrainedTokenizerFast, generator: torch.Generator) -> Mistral3ForConditionalGeneration:
    config = Mistral3Config(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": _TEXT_WIDTH,
            "intermediate_size": 2 * _TEXT_WIDTH,
            "num_hidden_layers": _MISTRAL_LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": _TEXT_WIDTH // 4,
            "max_position_embeddings": 4096,
            "sliding_window": None,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 8 * _VISION_PATCH * _VISION_MERGE,
            "patch_size": _VISION_PATCH,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=_VISION_MERGE,
    )
    return randomize(Mistral3ForConditionalGeneration(config), generator)
