# SPDX-License-Identifier: Apache-2.0
"""Tiny LTX-2.0, 2.3 and 2.5 pipelines with sound: the real stages, ratios and channel relations, narrow layers."""

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    LTX2ImageToVideoPipeline,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2DurationHead, LTX2TextConnectors, LTX2Vocoder, LTX2VocoderWithBWE
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    GemmaTokenizer,
)

from vllm_omni_vae.tiny.common import randomize

_LATENT_CHANNELS = 8
_TEXT_WIDTH = 32
_TEXT_LAYERS = 2
_VIDEO_HEADS, _VIDEO_HEAD = 4, 16
_AUDIO_HEADS, _AUDIO_HEAD = 4, 8
_VIDEO_WIDTH, _AUDIO_WIDTH = _VIDEO_HEADS * _VIDEO_HEAD, _AUDIO_HEADS * _AUDIO_HEAD
_MEL_BINS = 16
_AUDIO_LATENT_CHANNELS = 4
_AUDIO_PACKED = _AUDIO_LATENT_CHANNELS * _MEL_BINS // 4
"""Channels of an audio token; the audio VAE's statistics have as many entries as its base channels, so those too."""
_STEREO = 2

DECODER_2_3: Mapping[str, Any] = {
    "decoder_block_out_channels": (8, 16, 16, 32),
    "decoder_layers_per_block": (1, 1, 1, 1, 1),
    "decoder_spatio_temporal_scaling": (True, True, True, True),
    "decoder_inject_noise": (False, False, False, False, False),
    "upsample_type": ("spatiotemporal", "spatiotemporal", "temporal", "spatial"),
    "upsample_residual": (False, False, False, False),
    "upsample_factor": (2, 2, 1, 2),
    "decoder_spatial_padding_mode": "zeros",
}
"""LTX-2.3's video decoder with narrow layers."""


@dataclass(frozen=True, slots=True)
class _Variant:
    """How one released checkpoint differs from the others."""

    image_to_video: bool = False
    v23: bool = False
    """LTX-2.3 or later."""
    v25: bool = False


_VARIANTS = {
    "ltx2-t2v": _Variant(),
    "ltx2-i2v": _Variant(image_to_video=True),
    "ltx2.3-t2v": _Variant(v23=True),
    "ltx2.3-i2v": _Variant(v23=True, image_to_video=True),
    "ltx2.5-t2v": _Variant(v23=True, v25=True),
    "ltx2.5-i2v": _Variant(v23=True, v25=True, image_to_video=True),
}


def pipeline(family: str, generator: torch.Generator) -> DiffusionPipeline:
    """The pipeline of ``family``, every weight drawn from ``generator``.

    It takes 8n+1 frames and heights and widths that are multiples of 32, from 64 on. Its sound is stereo: 24 kHz, from
    LTX-2.3 on 48 kHz. LTX-2.5 is the distilled model, whose schedule is used as it is given.
    """
    variant = _VARIANTS[family]
    tokenizer = _tokenizer()
    kind = LTX2ImageToVideoPipeline if variant.image_to_video else LTX2Pipeline
    return kind(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=not variant.v25,
            base_shift=0.95,
            max_shift=2.05,
            base_image_seq_len=1024,
            max_image_seq_len=4096,
            shift_terminal=None if variant.v25 else 0.1,
        ),
        vae=_vae(variant, generator),
        audio_vae=_audio_vae(generator),
        text_encoder=(_gemma_4 if variant.v25 else _gemma_3)(tokenizer, generator),
        tokenizer=tokenizer,
        connectors=_connectors(variant, generator),
        transformer=_transformer(variant, generator),
        vocoder=_vocoder(variant, generator),
        duration_head=_duration_head(generator) if variant.v25 else None,
    )


def _tokenizer() -> GemmaTokenizer:
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "\u2581"]
    characters = string.digits + string.ascii_letters + string.punctuation
    vocabulary = {token: place for place, token in enumerate([*specials, *characters])}
    return GemmaTokenizer(vocab=vocabulary, merges=[], model_max_length=1024)


def _gemma_3(tokenizer: GemmaTokenizer, generator: torch.Generator) -> Gemma3ForConditionalGeneration:
    """Gemma 3 with its vision tower, which the pipelines leave unused unless a prompt is to be enhanced."""
    config = Gemma3Config(
        text_config={
            "vocab_size": len(tokenizer) + 4,
            "hidden_size": _TEXT_WIDTH,
            "intermediate_size": 2 * _TEXT_WIDTH,
            "num_hidden_layers": _TEXT_LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "sliding_window": 64,
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
        boi_token_index=len(tokenizer),
        eoi_token_index=len(tokenizer) + 1,
        image_token_index=len(tokenizer) + 2,
    )
    return randomize(Gemma3ForConditionalGeneration(config), generator)


def _gemma_4(tokenizer: GemmaTokenizer, generator: torch.Generator) -> Gemma4UnifiedForConditionalGeneration:
    """Gemma 4 with one layer of either kind of attention, and what embeds pictures and sound, which stays unused."""
    special = ("boi_token_id", "eoi_token_id", "image_token_id", "video_token_id", "boa_token_id", "eoa_token_index")
    config = Gemma4UnifiedConfig(
        text_config={
            "vocab_size": len(tokenizer) + len(special) + 1,
            "hidden_size": _TEXT_WIDTH,
            "intermediate_size": 2 * _TEXT_WIDTH,
            "num_hidden_layers": _TEXT_LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        vision_config={
            "patch_size": 4,
            "pooling_kernel_size": 1,
            "mm_embed_dim": 16,
            "mm_posemb_size": 16,
            "output_proj_dims": _TEXT_WIDTH,
        },
        audio_config={"audio_embed_dim": 16},
        audio_token_id=len(tokenizer) + len(special),
        **{name: len(tokenizer) + place for place, name in enumerate(special)},
    )
    return randomize(Gemma4UnifiedForConditionalGeneration(config), generator)


def _duration_head(generator: torch.Generator) -> LTX2DurationHead:
    return randomize(
        LTX2DurationHead(
            video_cross_attention_dim=_VIDEO_WIDTH,
            audio_cross_attention_dim=_AUDIO_WIDTH,
            pooler_hidden_dim=16,
            mlp_hidden_dim=16,
        ),
        generator,
    )


def _connectors(variant: _Variant, generator: torch.Generator) -> LTX2TextConnectors:
    """One projection of the text for both streams; LTX-2.3 has one for each, as wide as the stream."""
    video, audio = (_VIDEO_HEAD, _AUDIO_HEAD) if variant.v23 else (_TEXT_WIDTH // 4, _TEXT_WIDTH // 4)
    return randomize(
        LTX2TextConnectors(
            caption_channels=_TEXT_WIDTH,
            text_proj_in_factor=_TEXT_LAYERS + 1,
            video_connector_num_attention_heads=4,
            video_connector_attention_head_dim=video,
            video_connector_num_layers=1,
            video_gated_attn=variant.v23,
            audio_connector_num_attention_heads=4,
            audio_connector_attention_head_dim=audio,
            audio_connector_num_layers=1,
            audio_gated_attn=variant.v23,
            rope_type="split",
            per_modality_projections=variant.v23,
            video_hidden_dim=_VIDEO_WIDTH,
            audio_hidden_dim=_AUDIO_WIDTH,
            proj_bias=variant.v23,
        ),
        generator,
    )


def _transformer(variant: _Variant, generator: torch.Generator) -> LTX2VideoTransformer3DModel:
    v23 = variant.v23
    return randomize(
        LTX2VideoTransformer3DModel(
            in_channels=_LATENT_CHANNELS,
            out_channels=_LATENT_CHANNELS,
            num_attention_heads=_VIDEO_HEADS,
            attention_head_dim=_VIDEO_HEAD,
            cross_attention_dim=_VIDEO_WIDTH,
            gated_attn=v23,
            cross_attn_mod=v23,
            audio_in_channels=_AUDIO_PACKED,
            audio_out_channels=_AUDIO_PACKED,
            audio_num_attention_heads=_AUDIO_HEADS,
            audio_attention_head_dim=_AUDIO_HEAD,
            audio_cross_attention_dim=_AUDIO_WIDTH,
            audio_gated_attn=v23,
            audio_cross_attn_mod=v23,
            num_layers=2,
            caption_channels=_TEXT_WIDTH,
            rope_type="split",
            use_prompt_embeddings=not v23,
            perturbed_attn=v23,
            ff_bias=not variant.v25,
            use_keyframes_abs_pos_embedding=variant.v25,
        ),
        generator,
    )


def _vae(variant: _Variant, generator: torch.Generator) -> AutoencoderKLLTX2Video:
    """The ratios are given, since diffusers counts others from the blocks."""
    decoder: dict[str, Any] = {
        "decoder_block_out_channels": (8, 16, 32),
        "decoder_layers_per_block": (1, 1, 1, 1),
        "decoder_spatial_padding_mode": "reflect",
    }
    if variant.v23:
        decoder = dict(DECODER_2_3)
    return randomize(
        AutoencoderKLLTX2Video(
            latent_channels=_LATENT_CHANNELS,
            block_out_channels=(8, 8, 8, 8),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_causal=False,
            spatial_compression_ratio=32,
            temporal_compression_ratio=8,
            **decoder,
        ),
        generator,
    )


def _audio_vae(generator: torch.Generator) -> AutoencoderKLLTX2Audio:
    return randomize(
        AutoencoderKLLTX2Audio(
            base_channels=_AUDIO_PACKED,
            output_channels=_STEREO,
            num_res_blocks=1,
            in_channels=_STEREO,
            resolution=32,
            latent_channels=_AUDIO_LATENT_CHANNELS,
            ch_mult=(1, 2, 2),
            norm_type="pixel",
            causality_axis="height",
            mel_bins=_MEL_BINS,
        ),
        generator,
    )


def _vocoder(variant: _Variant, generator: torch.Generator) -> LTX2Vocoder | LTX2VocoderWithBWE:
    """Mel frames of 10 ms to samples; LTX-2.3 makes 16 kHz first and extends that to 48 kHz."""
    resnets = {"resnet_kernel_sizes": [3], "resnet_dilations": [[1, 3]]}
    channels = _STEREO * _MEL_BINS
    if not variant.v23:
        return randomize(LTX2Vocoder(in_channels=channels, hidden_channels=64, **resnets), generator)
    vocoder = LTX2VocoderWithBWE(
        in_channels=channels,
        hidden_channels=128,
        **resnets,
        bwe_in_channels=channels,
        bwe_hidden_channels=64,
        **{f"bwe_{name}": value for name, value in resnets.items()},
        num_mel_channels=_MEL_BINS,
    )
    return _completed(randomize(vocoder, generator), generator)


@torch.no_grad()
def _completed(vocoder: LTX2VocoderWithBWE, generator: torch.Generator) -> LTX2VocoderWithBWE:
    """Fill the buffers of the spectrogram, which a checkpoint brings along and the class leaves at zero.

    Both outputs become so quiet that the samples stay between -1 and 1, where they would be cut.
    """
    stft = vocoder.mel_stft
    stft.stft_fn.forward_basis.uniform_(-0.1, 0.1, generator=generator)
    stft.stft_fn.inverse_basis.uniform_(-0.1, 0.1, generator=generator)
    stft.mel_basis.uniform_(0, 0.1, generator=generator)
    for stage in (vocoder.vocoder, vocoder.bwe_generator):
        stage.conv_out.weight.div_(100)
    return vocoder
