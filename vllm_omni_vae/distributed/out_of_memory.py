# SPDX-License-Identifier: Apache-2.0
"""Know an error that means "no memory left", whoever raises it, and give back what it still holds."""

from __future__ import annotations

import gc
import re

import torch

from ..errors import RankMemoryError

_SAID = re.compile(
    r"can't allocate memory|not enough memory|out of memory|bad_alloc|ALLOC_FAILED"
    r"|could not create a primitive(?! descriptor)"
)
"""What says so in a plain RuntimeError: the CPU's allocator on Linux and elsewhere, drivers, C++, CUDA's libraries; and
oneDNN, which has no memory for code or scratch, while an operation that it lacks has no descriptor."""

_ASKED = re.compile(r"tried to allocate ([\d.]+ ?\w+)", re.IGNORECASE)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether ``error`` says that memory could not be had, on the CPU, an accelerator or another rank."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError, RankMemoryError)):
        return True
    return isinstance(error, RuntimeError) and _SAID.search(str(error)) is not None


def asked_for(reason: str) -> str:
    """What the allocator was asked for, as in ``2.00 GiB``, where ``reason`` says it; else nothing."""
    found = _ASKED.search(reason)
    return found[1] if found else ""


def give_back(device: torch.device) -> None:
    """Free what a failed call has left: call it when its error is gone, whose traceback holds every local variable.

    Frames and the errors caught in them hold each other, so that only the collector finds them.
    """
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.memory.empty_cache()
