# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints of the families that a module is about (its ``CLASSES``), and how their tests look at them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline

from vllm_omni_vae import tiny

Load = Callable[..., DiffusionPipeline]


@pytest.fixture(scope="module")
def checkpoints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder of each family's checkpoint. Nobody changes them."""
    root = tmp_path_factory.mktemp("tiny")
    return {family: tiny.build(family, root / family) for family in request.module.CLASSES}


@pytest.fixture
def load(checkpoints: dict[str, Path]) -> Load:
    """Load a family's pipeline, by the class that it names or by another."""

    def load(family: str, cls: type[DiffusionPipeline] = DiffusionPipeline) -> DiffusionPipeline:
        pipe = cls.from_pretrained(checkpoints[family], local_files_only=True)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    return load


def files(folder: Path) -> dict[str, bytes]:
    """Every file below ``folder``."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def check_made_again(family: str, made: Path, again: Path) -> None:
    """Build ``family`` once more, in the folder ``again``: the bytes are those of ``made``, and nobody's numbers go."""
    torch.manual_seed(123)
    expected_state = torch.get_rng_state()
    rebuilt = files(tiny.build(family, again))
    assert torch.equal(torch.get_rng_state(), expected_state)
    assert rebuilt == files(made)
