# SPDX-License-Identifier: Apache-2.0
"""What a server process needs of the pipelines, it gets without torch."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

HEAVY = ("accelerate", "diffusers", "torch", "transformers")


def heavy_after(code: str, *arguments: str) -> set[str]:
    """The heavy modules that are loaded once ``code`` has run in a fresh interpreter."""
    tail = f"\nprint(*({{*{HEAVY}}} & sys.modules.keys()))"
    command = [sys.executable, "-c", "import sys\n" + code + tail, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_description_of_a_checkpoint_needs_no_torch(checkpoints: Mapping[str, Path]) -> None:
    code = """
from vllm_omni_vae import checkpoint
from vllm_omni_vae.config import EngineConfig
from vllm_omni_vae.pipelines.request import GenerationRequest
from vllm_omni_vae.worker.messages import Run
found = checkpoint.require(sys.argv[1])
profile = found.profile()
card = profile.card(found.folder)
assert profile.refusals(found.folder, EngineConfig(model=sys.argv[1])) == []
profile.resolve(GenerationRequest(prompt="a boat"), card, {})
"""
    assert heavy_after(code, str(checkpoints["wan2.2-t2v"])) == set()


def test_only_the_components_need_it() -> None:
    assert "torch" in heavy_after("import vllm_omni_vae.pipelines.components")
