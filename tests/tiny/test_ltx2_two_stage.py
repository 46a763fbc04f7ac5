# SPDX-License-Identifier: Apache-2.0
"""The tiny LTX-2 checkpoint with an upsampler: it lies beside the pipeline, doubles latents, and one seed makes one."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline, LTX2Pipeline
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel

from tests.tiny.conftest import check_made_again, files

CLASSES = {"ltx2-two-stage": LTX2Pipeline}
MAX_BYTES = 12 * 2**20


@pytest.fixture
def checkpoint(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["ltx2-two-stage"]


def test_the_upsampler_lies_beside_a_pipeline_that_does_not_name_it(checkpoint: Path) -> None:
    assert sum(len(content) for content in files(checkpoint).values()) <= MAX_BYTES
    index = json.loads((checkpoint / "model_index.json").read_text())
    assert index["_class_name"] == "LTX2Pipeline" and "latent_upsampler" not in index
    assert (checkpoint / "latent_upsampler/config.json").is_file()
    assert type(DiffusionPipeline.from_pretrained(checkpoint, local_files_only=True)) is LTX2Pipeline


def test_latents_become_twice_as_high_and_wide_and_stay_alive(checkpoint: Path) -> None:
    upsampler = LTX2LatentUpsamplerModel.from_pretrained(checkpoint, subfolder="latent_upsampler")
    latents = torch.randn(1, upsampler.config.in_channels, 2, 3, 5, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        large = upsampler(latents)
    assert large.shape == (1, upsampler.config.in_channels, 2, 6, 10)
    assert large.isfinite().all() and 0.1 < float(large.std()) < 10


def test_same_seed_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    check_made_again("ltx2-two-stage", checkpoint, tmp_path / "again")
