# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints, running engines and diffusers' own results, one of each for all tests here."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.engine.engines import Engines
from tests.engine.reference import Reference
from vllm_omni_vae import tiny

# Ranks inherit them. Blocks of this size then come from the system, and no thread keeps a reserve of its own, so that a
# rank which gets no more memory notices.
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "262144")
os.environ.setdefault("MALLOC_ARENA_MAX", "1")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Folder of each tiny checkpoint, by family. Nobody changes them."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: tiny.build(family, root / family) for family in tiny.FAMILIES if family.startswith("wan2.2")}


@pytest.fixture(scope="session")
def engines(checkpoints: Mapping[str, Path]) -> Iterator[Engines]:
    """Engines by the name of their setup."""
    running = Engines(checkpoints)
    yield running
    running.close()


@pytest.fixture(scope="session")
def reference(checkpoints: Mapping[str, Path]) -> Reference:
    """Diffusers in this process."""
    return Reference(checkpoints)
