# SPDX-License-Identifier: Apache-2.0
"""Give this process less memory than it asks for, so that its allocator really fails; and count what it holds."""

import contextlib
import ctypes
import gc
import resource
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_BLOCK = 65536


def keep_no_reserve() -> None:
    """Take larger blocks from the system and give them back at once."""
    libc = ctypes.CDLL(None)
    for setting in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
        assert libc.mallopt(setting, _BLOCK) == 1


@contextlib.contextmanager
def at_most(extra: int | None) -> Iterator[None]:
    """Within it this process gets ``extra`` bytes and no more, also of what it has in reserve; None: no limit."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    held: list[torch.Tensor] = []
    try:
        if extra is not None:
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), before[1]))
            size = 2**26
            while size >= _BLOCK:
                try:
                    held.append(torch.empty(size, dtype=torch.uint8))
                except RuntimeError:
                    size //= 2
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + extra, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def tensor_bytes() -> int:
    """Bytes of all tensors that anything in Python still holds, errors and frames too."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a module warns when it is asked for its class
        tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
