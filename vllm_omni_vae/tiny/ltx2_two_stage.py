# SPDX-License-Identifier: Apache-2.0
"""A tiny LTX-2.0 checkpoint with the latent upsampler that goes between two stages."""

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel

from vllm_omni_vae.tiny import ltx2
from vllm_omni_vae.tiny.common import randomize

_NARROWEST = 32
"""Channels of the upsampler: its norms have this many groups."""


@dataclass(frozen=True, slots=True)
class TwoStages:
    """A pipeline, and an upsampler that its index does not name."""

    stages: DiffusionPipeline
    latent_upsampler: LTX2LatentUpsamplerModel

    def save_pretrained(self, folder: Path) -> None:
        """Write the pipeline, and the upsampler beside its components."""
        self.stages.save_pretrained(folder)
        self.latent_upsampler.save_pretrained(folder / "latent_upsampler")


def pipeline(family: str, generator: torch.Generator) -> TwoStages:
    """The two stages of ``family``, every weight drawn from ``generator``.

    Both stages are the pipeline ``ltx2-t2v``. It takes widths and heights that are multiples of 64, from 128 on.
    """
    stages = ltx2.pipeline("ltx2-t2v", generator)
    upsampler = LTX2LatentUpsamplerModel(
        in_channels=stages.vae.config.latent_channels, mid_channels=_NARROWEST, num_blocks_per_stage=1
    )
    return TwoStages(stages, randomize(upsampler, generator))
