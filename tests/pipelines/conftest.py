# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints of every Wan family, and copies of them to spoil."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from vllm_omni_vae import tiny

Spoil = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Folder of each tiny checkpoint, by family. Nobody changes them."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: tiny.build(family, root / family) for family in tiny.FAMILIES if family.startswith("wan")}


@pytest.fixture
def spoilt(checkpoints: Mapping[str, Path], tmp_path: Path) -> Spoil:
    """Make a copy of the JSON files of a checkpoint with changed entries of ``model_index.json``; None removes one."""

    def spoil(family: str, **entries: Any) -> Path:
        copy = tmp_path / family
        shutil.copytree(checkpoints[family], copy, ignore=shutil.ignore_patterns("*.safetensors"))
        index = copy / "model_index.json"
        values = json.loads(index.read_text()) | entries
        index.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
        return copy

    return spoil
