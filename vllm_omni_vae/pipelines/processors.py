# SPDX-License-Identifier: Apache-2.0
"""Which processors of a checkpoint can be loaded on this machine; torch is not imported for that."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

NEED_TORCHVISION = frozenset({"PixtralProcessor", "Qwen2VLProcessor"})
"""Classes of transformers that cannot even be made without torchvision."""


def missing_torchvision(components: Mapping[str, Any]) -> list[str]:
    """Say which components cannot be loaded because torchvision is not installed; empty when all can.

    Args:
        components: A ``model_index.json``: names with the library and the class of each.
    """
    if find_spec("torchvision") is not None:
        return []
    needing = {
        name: entry[-1]
        for name, entry in components.items()
        if isinstance(entry, list) and entry[-1] in NEED_TORCHVISION
    }
    return [
        f"{name}: {kind} of transformers needs torchvision, which is not installed; "
        "install the extra, as in `pip install 'vllm-omni-vae[images]'`"
        for name, kind in needing.items()
    ]
