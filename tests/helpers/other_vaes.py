# SPDX-License-Identifier: Apache-2.0
"""Tiny random autoencoders of the classes that have no family file, and their inputs."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import diffusers
import torch
from diffusers.models.normalization import RMSNorm

from vllm_omni_vae.autoencoders import Operation
from vllm_omni_vae.tiny.common import randomize

from .vaes import noise


class _WideNorm(RMSNorm):
    """Diffusers' norm in the precision of its input. Diffusers' own rounds to float32, also where all else is float64.

    Then its sums come out in other bits for another layout of memory, and 1e-12 could not be told from 1e-7.
    """

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        normal = hidden_states * torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.weight is not None:
            normal = normal * self.weight
        return normal if self.bias is None else normal + self.bias


@dataclasses.dataclass(frozen=True, slots=True)
class OtherVae:
    """One configuration.

    Attributes:
        name: The diffusers class.
        layers: What it is made with.
        latents: Channels of its latents.
        ratio: Pixels that make a latent, along height and width.
        frames: Frames to encode and latent frames to decode; None for pictures.
        more: Further arguments of decode.
        extents: Latent rows and columns of the inputs.
    """

    name: str
    layers: Mapping[str, Any]
    latents: int
    ratio: int = 8
    frames: tuple[int, int] | None = None
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    extents: tuple[int, int] = (3, 5)

    def made(self, dtype: torch.dtype = torch.float64) -> Any:
        """The autoencoder, with the same random weights in every process."""
        vae = randomize(getattr(diffusers, self.name)(**self.layers), torch.Generator().manual_seed(0))
        if dtype == torch.float64:
            for part in vae.modules():
                part.__class__ = _WideNorm if type(part) is RMSNorm else type(part)
        return torch.nn.Module.to(vae, dtype)

    def given(self, operation: Operation, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Input of `extents`."""
        rows, cols = self.extents
        encode = operation is Operation.ENCODE
        scale = self.ratio if encode else 1
        time = () if self.frames is None else (self.frames[0 if encode else 1],)
        return noise(self.batch, 3 if encode else self.latents, *time, rows * scale, cols * scale, dtype=dtype)

    @property
    def batch(self) -> int:
        """Items of an input; a decoder that is told the number of frames takes them as a batch."""
        return int(self.more.get("num_frames", 1))

    def arguments(self, operation: Operation) -> dict[str, Any]:
        """Further arguments of a public call."""
        return dict(self.more) if operation is Operation.DECODE else {}


_UP_DOWN = {"down_block_types": ("DownEncoderBlock2D",) * 3, "up_block_types": ("UpDecoderBlock2D",) * 3}

_LTX_0_9_5 = {
    "block_out_channels": (8, 16, 32, 64),
    "decoder_block_out_channels": (8, 16, 32),
    "latent_channels": 8,
    "down_block_types": ("LTXVideo095DownBlock3D",) * 4,
    "layers_per_block": (1,) * 5,
    "decoder_layers_per_block": (1,) * 4,
    "decoder_inject_noise": (False,) * 4,
    "spatio_temporal_scaling": (True,) * 4,
    "decoder_spatio_temporal_scaling": (True,) * 3,
    "downsample_type": ("spatial", "temporal", "spatiotemporal", "spatiotemporal"),
    "upsample_residual": (True,) * 3,
    "upsample_factor": (2,) * 3,
    "timestep_conditioning": True,
    "patch_size": 4,
    "decoder_causal": False,
    "encoder_causal": True,
}

_FOUR_LEVELS = {"block_out_channels": (8,) * 4, "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2}

_COSMOS = {
    "encoder_block_out_channels": (8,) * 4,
    "decode_block_out_channels": (8,) * 4,
    "latent_channels": 4,
    "attention_resolutions": (8,),
    "resolution": 64,
    "num_layers": 1,
}

OTHERS: Mapping[str, OtherVae] = {
    "ltx": OtherVae(
        "AutoencoderKLLTXVideo",
        {
            "block_out_channels": (8,) * 4,
            "decoder_block_out_channels": (8,) * 4,
            "latent_channels": 8,
            "layers_per_block": (1,) * 5,
            "decoder_layers_per_block": (1,) * 5,
        },
        8,
        ratio=32,
        frames=(9, 2),
    ),
    "ltx 0.9.5": OtherVae(
        "AutoencoderKLLTXVideo", _LTX_0_9_5, 8, ratio=32, frames=(9, 2), more={"temb": torch.tensor([0.05]).double()}
    ),
    "ltx noise": OtherVae(
        "AutoencoderKLLTXVideo",
        _LTX_0_9_5 | {"decoder_inject_noise": (True,) * 4},
        8,
        ratio=32,
        frames=(9, 2),
        more={"temb": torch.tensor([0.05]).double()},
    ),
    "hunyuan video": OtherVae(
        "AutoencoderKLHunyuanVideo",
        _FOUR_LEVELS,
        4,
        frames=(9, 3),
    ),
    "hunyuan video in tiles of time": OtherVae(
        "AutoencoderKLHunyuanVideo",
        _FOUR_LEVELS,
        4,
        frames=(21, 6),
        extents=(3, 4),
    ),
    "hunyuan video 1.5": OtherVae(
        "AutoencoderKLHunyuanVideo15",
        {"block_out_channels": (8,) * 5, "latent_channels": 4, "layers_per_block": 1},
        4,
        ratio=16,
        frames=(5, 2),
    ),
    "cogvideox": OtherVae(
        "AutoencoderKLCogVideoX",
        _FOUR_LEVELS,
        4,
        frames=(9, 3),
        extents=(5, 6),
    ),
    "mochi": OtherVae(
        "AutoencoderKLMochi",
        {
            "encoder_block_out_channels": (32,) * 4,
            "decoder_block_out_channels": (32,) * 4,
            "latent_channels": 4,
            "layers_per_block": (1,) * 5,
        },
        4,
        frames=(6, 2),
        extents=(7, 9),
    ),
    "cosmos": OtherVae(
        "AutoencoderKLCosmos",
        _COSMOS,
        4,
        frames=(9, 2),
        extents=(5, 6),
    ),
    "cosmos rearranged": OtherVae(
        "AutoencoderKLCosmos",
        _COSMOS | {"patch_type": "rearrange"},
        4,
        frames=(9, 2),
        extents=(5, 6),
    ),
    "dc": OtherVae(
        "AutoencoderDC",
        {
            "latent_channels": 4,
            "attention_head_dim": 4,
            "encoder_block_out_channels": (8,) * 4,
            "decoder_block_out_channels": (8,) * 4,
            "encoder_layers_per_block": (1,) * 4,
            "decoder_layers_per_block": (1,) * 4,
            "encoder_qkv_multiscales": ((), (), (), ()),
            "decoder_qkv_multiscales": ((), (), (), ()),
        },
        4,
    ),
    "dc with attention": OtherVae(
        "AutoencoderDC",
        {
            "latent_channels": 4,
            "attention_head_dim": 4,
            "encoder_block_types": ("ResBlock", "ResBlock", "ResBlock", "EfficientViTBlock"),
            "decoder_block_types": ("ResBlock", "ResBlock", "ResBlock", "EfficientViTBlock"),
            "encoder_block_out_channels": (8,) * 4,
            "decoder_block_out_channels": (8,) * 4,
            "encoder_layers_per_block": (1,) * 4,
            "decoder_layers_per_block": (1,) * 4,
            "encoder_qkv_multiscales": ((), (), (), (5,)),
            "decoder_qkv_multiscales": ((), (), (), (5,)),
        },
        4,
    ),
    "tiny": OtherVae(
        "AutoencoderTiny",
        {"encoder_block_out_channels": (8,) * 4, "decoder_block_out_channels": (8,) * 4},
        4,
    ),
    "temporal decoder": OtherVae(
        "AutoencoderKLTemporalDecoder",
        {"down_block_types": ("DownEncoderBlock2D",) * 2, "block_out_channels": (32, 32)},
        4,
        ratio=2,
        more={"num_frames": 3},
    ),
    "allegro": OtherVae(
        "AutoencoderKLAllegro",
        {"block_out_channels": (8,) * 4, "layers_per_block": 1, "norm_num_groups": 2},
        4,
        frames=(8, 2),
    ),
    "magvit": OtherVae(
        "AutoencoderKLMagvit",
        _FOUR_LEVELS,
        4,
        frames=(9, 3),
    ),
    "hunyuan image": OtherVae(
        "AutoencoderKLHunyuanImage",
        {
            "in_channels": 3,
            "out_channels": 3,
            "latent_channels": 4,
            "block_out_channels": (32,) * 4,
            "layers_per_block": 1,
            "spatial_compression_ratio": 8,
            "sample_size": 64,
        },
        4,
    ),
    "hunyuan image refiner": OtherVae(
        "AutoencoderKLHunyuanImageRefiner",
        {"block_out_channels": (8,) * 5, "latent_channels": 4, "layers_per_block": 1},
        4,
        ratio=16,
        frames=(5, 2),
    ),
    "asymmetric": OtherVae(
        "AsymmetricAutoencoderKL",
        {
            **_UP_DOWN,
            "down_block_out_channels": (8,) * 3,
            "up_block_out_channels": (8,) * 3,
            "norm_num_groups": 2,
        },
        4,
        ratio=4,
    ),
    "vq": OtherVae(
        "VQModel",
        {**_UP_DOWN, "block_out_channels": (8,) * 3, "num_vq_embeddings": 16, "norm_num_groups": 2},
        3,
        ratio=4,
    ),
    "vidtok": OtherVae(
        "AutoencoderVidTok", {"ch": 11, "ch_mult": (1, 1, 1, 1), "num_res_blocks": 1}, 4, frames=(5, 2), extents=(7, 9)
    ),
    "kvae": OtherVae(
        "AutoencoderKLKVAE", {"channels": 32, "num_enc_blocks": 1, "num_dec_blocks": 1, "z_channels": 4}, 4
    ),
    "kvae video": OtherVae(
        "AutoencoderKLKVAEVideo",
        {"ch": 32, "ch_mult": (1, 1, 1, 1), "num_res_blocks": 1, "z_channels": 4},
        4,
        frames=(9, 3),
        extents=(5, 6),
    ),
    "minimax": OtherVae(
        "AutoencoderKLMiniMaxH3",
        {
            "latent_channels": 4,
            "block_out_channels": (8,) * 6,
            "layers_per_block": 1,
            "norm_num_groups": 2,
            "decoder_num_layers": 1,
            "decoder_num_attention_heads": 2,
            "decoder_attention_head_dim": 16,
        },
        4,
        ratio=16,
        frames=(5, 7),
    ),
    "kandinsky": OtherVae(
        "Kandinsky6SRVAE",
        {
            "latent_channels": 4,
            "encoder_block_out_channels": (8,) * 5,
            "decoder_block_out_channels": (8,) * 5,
            "layers_per_block": 1,
        },
        4,
        ratio=16,
        frames=(5, 2),
        extents=(5, 6),
    ),
}
"""Every configuration that is tested, by name."""
