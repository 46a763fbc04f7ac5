# SPDX-License-Identifier: Apache-2.0
"""Run an autoencoder on tensors without values (`torch.device("meta")`), to count what it sends and holds."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..distributed import NullCommunicator
from ..distributed.communicator import Message, Traffic

NETWORKS = ("encoder", "decoder")
"""Modules of a diffusers autoencoder that it may call once for each stretch of a clip."""


class CountingCommunicator(NullCommunicator):
    """Moves nothing and counts by purpose.

    Attributes:
        tally: Collectives by name; and ``(purpose) calls``, ``(purpose) messages`` and ``(purpose) bytes`` for the
            purposes ``halo`` (exchanges), ``attention`` (uneven all-gathers) and ``result`` (gathers).
    """

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)
        self.tally: Counter[str] = Counter()
        self.traffic = Traffic(collectives=self.tally)
        self._purpose = "halo"

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        if sends or receives:
            self.tally[f"{self._purpose} calls"] += 1
            self.tally[f"{self._purpose} messages"] += len(sends)
            self.tally[f"{self._purpose} bytes"] += sum(tensor.nbytes for _, tensor in sends)
        super().exchange(sends, receives)

    def gather(
        self, piece: torch.Tensor, sizes: Sequence[int], dst: int, room: list[torch.Tensor] | None = None
    ) -> list[torch.Tensor] | None:
        with self._for("result"):
            return super().gather(piece, sizes, dst, room)

    def all_gather_uneven(self, piece: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        with self._for("attention"):
            return super().all_gather_uneven(piece, sizes)

    @contextlib.contextmanager
    def _for(self, purpose: str) -> Iterator[None]:
        before, self._purpose = self._purpose, purpose
        try:
            yield
        finally:
            self._purpose = before


@dataclasses.dataclass(frozen=True, slots=True)
class _Blank:
    """A tensor without values that can be made again."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, value: Any) -> Any:
        """``value`` with a blank for every tensor, and tuples for lists."""
        if isinstance(value, torch.Tensor):
            return cls(tuple(value.shape), value.stride(), value.dtype, value.device)
        return tuple(map(cls.of, value)) if isinstance(value, (list, tuple)) else value

    @classmethod
    def fill(cls, value: Any) -> Any:
        """``value`` with a new tensor for every blank."""
        if isinstance(value, cls):
            return torch.empty_strided(value.size, value.stride, dtype=value.dtype, device=value.device)
        return tuple(map(cls.fill, value)) if isinstance(value, tuple) else value


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that exist: of every storage made within the block, until it is freed.

    What an operator takes for itself while it runs (a convolution's workspace) and what an allocator rounds up or
    keeps are not seen. A number that is read off a tensor without values is 0.

    Args:
        known: Results of operators on tensors without values, and where more are noted; None: run every operator.

    Attributes:
        live: Bytes now.
        peak: Most bytes so far.
    """

    def __init__(self, known: dict[Any, Any] | None = None) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known = known
        self._held: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 0
        kwargs = kwargs or {}
        if not _makes_new(func):
            return func(*args, **kwargs)
        out, made = self._run(func, args, kwargs)
        for tensor in made:
            self._hold(tensor)
        return out

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, list[torch.Tensor]]:
        """What ``func`` returns, and those tensors of it that have memory of their own."""
        known = {} if self._known is None else self._known
        key = (func, _kind(args), _kind(kwargs))
        if key in known:
            out = _Blank.fill(known[key])
            return out, _tensors(out)
        out = func(*args, **kwargs)
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((*args, *kwargs.values()))}
        found = _tensors(out)
        made = [tensor for tensor in found if tensor.untyped_storage()._cdata not in given]
        if len(made) == len(found) and all(tensor.is_meta for tensor in made):
            known[key] = _Blank.of(out)
        return out, made

    def _hold(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._held:
            return
        self._held[storage._cdata] = size = storage.nbytes()
        weakref.finalize(storage, self._free, storage._cdata).atexit = False
        self.live += size
        self.peak = max(self.peak, self.live)

    def _free(self, storage: int) -> None:
        self.live -= self._held.pop(storage)


def _kind(value: Any) -> Any:
    """All there is to know of arguments without values, to look it up by."""
    if isinstance(value, torch.Tensor):
        return _Blank.of(value)
    if isinstance(value, dict):
        return tuple((name, _kind(one)) for name, one in value.items())
    return tuple(map(_kind, value)) if isinstance(value, (list, tuple)) else (type(value), value)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for one in value for tensor in _tensors(one)] if isinstance(value, (list, tuple)) else []


@functools.cache
def _makes_new(func: Any) -> bool:
    """Whether an operator leaves its arguments alone and returns no view of them, by what it declares."""
    return not func._schema.is_mutable and not any(value.alias_info for value in func._schema.returns)


@dataclasses.dataclass(frozen=True, slots=True)
class _Record:
    """What one network call did: its result, what it left in the lists it was given, what it sent and held."""

    result: Any
    lists: list[Any]
    tally: Counter[str]
    rise: int


@dataclasses.dataclass(frozen=True, slots=True)
class Memo:
    """What was found out already.

    Attributes:
        calls: Network calls, of ranks that send alike.
        operators: Results of single operators, which depend on no rank.
    """

    calls: dict[Any, _Record] = dataclasses.field(default_factory=dict)
    operators: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def elsewhere(self) -> Memo:
        """What also holds on a rank that sends something else."""
        return Memo(operators=self.operators)


class DryRun:
    """Within ``with run:`` tensors are counted, and network calls that repeat an earlier one are not run again.

    A call repeats another when its arguments have the same shapes, strides, types and plain values, also inside lists:
    a causal cache is such a list. Then it sends as much, holds as much and leaves as much behind. Attention counts as
    a fused kernel, which does not write its scores down.

    Args:
        vae: The autoencoder.
        comm: Where it sends.
        memo: What was seen on an equal rank, and where more is noted; None: run everything.
    """

    def __init__(self, vae: Any, comm: CountingCommunicator, memo: Memo | None):
        self.bytes = LiveBytes(None if memo is None else memo.operators)
        self.network_calls = 0
        self._tally = comm.tally
        self._calls = None if memo is None else memo.calls
        self._networks = {name: module for name, module in vae.named_children() if name in NETWORKS}
        self._countable = vae.spec.countable(vae)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> DryRun:
        for name, network in self._networks.items():
            network.forward = _Replayed(self, name, network.forward)
            self._stack.callback(delattr, network, "forward")
        for context in (torch.no_grad(), self._countable, _FusedAttention(), self.bytes):
            self._stack.enter_context(context)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def call(self, name: str, forward: Any, args: Any, kwargs: Any) -> Any:
        """Run or replay one network call."""
        self.network_calls += 1
        if self._calls is None:
            return forward(*args, **kwargs)
        key = (name, _kind(args), _kind(kwargs))
        lists = [value for value in (*args, *kwargs.values()) if isinstance(value, list)]
        if key not in self._calls:
            result, self._calls[key] = self._record(lambda: forward(*args, **kwargs), lists)
            return result
        return self._replay(self._calls[key], lists)

    def _record(self, run: Any, lists: list[list[Any]]) -> tuple[Any, _Record]:
        sent, start, peak = Counter(self._tally), self.bytes.live, self.bytes.peak
        self.bytes.peak = start
        result = run()
        rise = self.bytes.peak - start
        self.bytes.peak = max(peak, self.bytes.peak)
        left = [_Blank.of(values) for values in lists]
        return result, _Record(_Blank.of(result), left, self._tally - sent, rise)

    def _replay(self, record: _Record, lists: list[list[Any]]) -> Any:
        peak = max(self.bytes.peak, self.bytes.live + record.rise)
        for values, left in zip(lists, record.lists, strict=True):
            values[:] = _Blank.fill(left)
        result = _Blank.fill(record.result)
        self._tally.update(record.tally)
        self.bytes.peak = peak
        return result


@dataclasses.dataclass(frozen=True, slots=True)
class _Replayed:
    """Stands in for the ``forward`` of a network."""

    run: DryRun
    name: str
    forward: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run.call(self.name, self.forward, args, kwargs)


class _FusedAttention(TorchFunctionMode):
    """Attention without values makes its result and nothing else; torch would take the kernel that stores scores."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fused = _attend if func is F.scaled_dot_product_attention else func
        return fused(*args, **(kwargs or {}))


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if query.is_meta:
        return query.new_empty((*query.shape[:-1], value.shape[-1]))
    return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)
