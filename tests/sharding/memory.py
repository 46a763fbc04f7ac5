# SPDX-License-Identifier: Apache-2.0
"""How many bytes of tensors are alive at once."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators of this thread make, until each is freed; works on ``meta`` tensors too.

    Attributes:
        live: Bytes alive now.
        peak: The most that were alive after any operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage(), given)
        self.peak = max(self.peak, self.live)
        return out

    def _note(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key = id(storage)
        if key in self._known or key in given:
            return
        self._known.add(key)
        self.live += storage.nbytes()
        weakref.finalize(storage, self._freed, key, storage.nbytes()).atexit = False

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size
