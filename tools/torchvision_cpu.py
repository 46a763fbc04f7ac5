# SPDX-License-Identifier: Apache-2.0
"""Lets torchvision be imported where its library does not load; copied into an environment by setup_env.py.

The package index has a CUDA build of torchvision for Linux, whose library does not load beside the CPU build of torch.
Torchvision itself goes on without it, but its import then describes two operators that do not exist. They are declared
here, before it does so. Everything written in Python works after that, image transforms among it; the operators
themselves raise an error when called.

Importing this module changes nothing until torchvision is imported, and nothing at all where its library loads.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_kept: list[object] = []


def _declare_missing(package: str) -> None:
    import torch

    try:
        torch.ops.load_library(f"{package}/_C.so")
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)


class _BeforeExtension:
    """Finds no module; it is asked for ``torchvision.extension`` just before torchvision loads its library."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "torchvision.extension" and path and not _kept:
            _declare_missing(path[0])
        return None


sys.meta_path.insert(0, _BeforeExtension)
