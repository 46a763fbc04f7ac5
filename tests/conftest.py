# SPDX-License-Identifier: Apache-2.0
"""What holds for every test: no network, one thread per process, and only what this machine can run."""

import importlib.util
import os
from typing import Any

import pytest

from tests.helpers.mark import unmet

# Set before torch or a hub client is imported, and inherited by every process that a test starts.
os.environ.update(
    {
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine lacks."""
    has_vllm = importlib.util.find_spec("vllm") is not None
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        reason = unmet(marks) if has_vllm or "vllm" not in marks else "vLLM is not installed"
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let autoencoders believe to be on rank 0 of two; nothing here makes them talk."""
    from vllm_omni_vae.distributed import NullCommunicator, VaeGroups

    def create(size: int, group: Any = None, output_rank: int = 0, timeout: Any = None) -> VaeGroups:
        return VaeGroups.over(NullCommunicator(0, size), output_rank)

    monkeypatch.setattr(VaeGroups, "create", create)
