# SPDX-License-Identifier: Apache-2.0
"""Bring ranks that only hold the autoencoder to the leader's encode and decode calls."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..autoencoders import Operation
from ..autoencoders.arguments import PLAIN_TYPES
from ..distributed import Communicator, give_back, span
from ..errors import Cancelled, UnsupportedError, VaeParallelError
from .use import UseMeter

logger = logging.getLogger(__name__)

_END = 0
_OPERATIONS = tuple(Operation)
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_HEADER = 12
_BITS_OF_DIM = 4
_DENSE = torch.contiguous_format


class LeaderRendezvous:
    """On the ranks that run the pipeline: says what comes, and makes all inputs the leader's.

    Before a collective decode the latents of world rank 0 go to every rank, so that ranks cannot disagree about them.
    Pixels are computed alike on every denoiser rank and only travel when there are followers. Inputs keep their order
    in memory, on which the last bits of a convolution depend. Tensors among the further arguments go the same way as
    the input; plain ones are told to the followers, as JSON.

    Args:
        name: Which autoencoder this is: its place among the pipeline's.
        domain: All ranks that call the autoencoder; rank 0 leads.
        control: The leader and the followers, or None on other ranks and where there are no followers.
        followers: Whether any rank only holds the autoencoder.
    """

    def __init__(self, name: int, domain: Communicator, control: Communicator | None, followers: bool):
        self._name = name
        self._domain = domain
        self._control = control
        self._followers = followers

    def announce(
        self, operation: Operation, x: torch.Tensor, arguments: Mapping[str, Any]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Collective. Tell the followers what comes; return the leader's ``x`` and tensor arguments on every rank.

        Raises:
            UnsupportedError: there are followers and an argument cannot be told them; on every rank alike.
        """
        text = _pack(arguments) if self._followers else b""
        if self._control is not None and self._control.rank == 0:
            order = sum(dim << _BITS_OF_DIM * place for place, dim in enumerate(_order(x)))
            code = [1 + _OPERATIONS.index(operation), self._name, _DTYPES.index(x.dtype), len(text), order, x.dim()]
            self._control.broadcast(_header([*code, *x.shape]), 0)
            self._control.broadcast(torch.tensor(list(text), dtype=torch.uint8), 0)
        given = dict(arguments)
        if self._followers or operation is Operation.DECODE:
            tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
            values = (x, *(value.to(x.device).contiguous() for value in tensors.values()))
            x, *shared = (self._lead(value) for value in values)
            given.update(zip(tensors, shared, strict=True))
        return x, given

    def _lead(self, x: torch.Tensor) -> torch.Tensor:
        """Collective. The leader's ``x``."""
        order = _order(x)
        sent = x.permute(order)
        sent = sent.contiguous() if self._domain.rank == 0 else torch.empty_like(sent, memory_format=_DENSE)
        self._domain.broadcast(sent, 0)
        return _put_back(sent, order)


def dismiss(control: Communicator | None) -> None:
    """Collective with `follow`, on the leader: the job is over."""
    if control is not None:
        control.broadcast(_header([_END]), 0)


@torch.no_grad()
def follow(
    vaes: Mapping[str, Any],
    control: Communicator,
    device: torch.device,
    cancelled: Callable[[], bool],
    meter: UseMeter | None = None,
) -> None:
    """Collective, on a rank that only holds autoencoders: take part in every call of one job until it is over.

    A call that fails on all ranks alike leaves this rank waiting for the next one.

    Args:
        vaes: The autoencoders, in the order of the pipeline's.
        control: The leader and the followers.
        device: Where inputs belong.
        cancelled: Whether this rank was told to stop; asked between tiles.
        meter: Measures what each call costs this rank, if it is given.
    """

    def on_tile(done: int, total: int) -> None:
        if cancelled():
            raise Cancelled("the job was cancelled")
        if meter:
            meter.on_progress(done)

    by_place = list(vaes.values())
    while True:
        header = _header([])
        control.broadcast(header, 0)
        code, name, dtype, length, packed, dims, *sizes = header.tolist()
        if code == _END:
            return
        vae = by_place[name]
        domain = vae.parallel_state.groups.domain
        text = torch.empty(length, dtype=torch.uint8)
        control.broadcast(text, 0)
        order = [packed >> _BITS_OF_DIM * place & 2**_BITS_OF_DIM - 1 for place in range(dims)]
        sent = torch.empty([sizes[dim] for dim in order], dtype=_DTYPES[dtype], device=device)
        domain.broadcast(sent, 0)
        x = _put_back(sent, order)
        arguments = _unpack(bytes(text.tolist()), device)
        for value in arguments.values():
            if isinstance(value, torch.Tensor):
                domain.broadcast(value, 0)
        operation = _OPERATIONS[code - 1]
        run = vae.tiled_encode if operation is Operation.ENCODE else vae.tiled_decode
        vae.parallel_state.executor.observer = on_tile
        vae.parallel_state.on_decision = meter.decided if meter else None
        failed = False
        try:
            with span(f"vae {operation}"), meter.call(vae, operation, device) if meter else contextlib.nullcontext():
                if meter:
                    meter.decided(vae.decide(vae.parallel_state, operation, vae.spec.extents(x.shape), x.shape[0]))
                run(x, **arguments)
        except VaeParallelError as error:
            logger.debug("left a call with every other rank: %s", error)
            vae.spec.reset(vae)
            failed = True
        finally:
            vae.parallel_state.executor.observer = vae.parallel_state.on_decision = None
        if failed:
            give_back(device)


def _order(x: torch.Tensor) -> list[int]:
    """The dims of ``x`` as they follow in memory, the one of the longest steps first; as they are where it has gaps."""
    steps = x.stride()
    order = sorted(range(x.dim()), key=lambda dim: -steps[dim])
    return order if x.permute(order).is_contiguous() else list(range(x.dim()))


def _put_back(sent: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Undo ``permute(order)``."""
    return sent.permute([order.index(dim) for dim in range(sent.dim())])


def _header(values: list[int]) -> torch.Tensor:
    return torch.tensor(values + [0] * (_HEADER - len(values)), dtype=torch.int64)


def _pack(arguments: Mapping[str, Any]) -> bytes:
    """Names and plain values, and shape and type of tensors."""
    told: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            told[name] = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        elif isinstance(value, PLAIN_TYPES):
            told[name] = value
        else:
            raise UnsupportedError(
                f"ranks that only hold the autoencoder cannot be told the argument {name} of type "
                f"{type(value).__name__}; give a plain value or a tensor"
            )
    return json.dumps(told).encode()


def _unpack(text: bytes, device: torch.device) -> dict[str, Any]:
    """Arguments of which the tensors have no values yet."""
    return {
        name: torch.empty(value["shape"], dtype=getattr(torch, value["dtype"]), device=device)
        if isinstance(value, dict)
        else value
        for name, value in json.loads(text).items()
    }
