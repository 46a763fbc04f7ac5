# SPDX-License-Identifier: Apache-2.0
"""Named ranges in a trace of torch's profiler."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """Name what runs within the block in the trace that this thread records, if it records one.

    Within a spatial shard too, which refuses operators that it does not know: the profiler's own do not concern it.
    """
    if not torch._C._autograd._profiler_enabled():
        yield
        return
    mark: contextlib.AbstractContextManager[object] = torch.profiler.record_function(name)
    with torch._C.DisableTorchFunction():
        mark.__enter__()
    try:
        yield
    finally:
        with torch._C.DisableTorchFunction():
            mark.__exit__(None, None, None)
