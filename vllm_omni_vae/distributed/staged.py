# SPDX-License-Identifier: Apache-2.0
"""A communicator for ranks that share a card, whose backend knows the memory of the CPU only."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from .communicator import Message, Reduction, TorchCommunicator, accelerator_backend


class StagedCommunicator(TorchCommunicator):
    """Takes tensors of an accelerator through the memory of the CPU, for a backend that knows only that one."""

    def _exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        arrived = [(peer, torch.empty_like(buffer, device="cpu")) for peer, buffer in receives]
        super()._exchange([(peer, tensor.cpu()) for peer, tensor in sends], arrived)
        for (_, buffer), (_, staged) in zip(receives, arrived, strict=True):
            buffer.copy_(staged)

    def _all_gather(self, piece: torch.Tensor) -> torch.Tensor:
        return super()._all_gather(piece.cpu()).to(piece.device)

    def _all_reduce(self, tensor: torch.Tensor, op: Reduction) -> None:
        staged = tensor.cpu()
        super()._all_reduce(staged, op)
        tensor.copy_(staged)

    def _reduce(self, tensor: torch.Tensor, dst: int) -> None:
        staged = tensor.cpu()
        super()._reduce(staged, dst)
        tensor.copy_(staged)

    def _broadcast(self, tensor: torch.Tensor, src: int) -> None:
        staged = tensor.cpu()
        super()._broadcast(staged, src)
        tensor.copy_(staged)


def communicator(group: dist.ProcessGroup, timeout: timedelta | None = None) -> TorchCommunicator:
    """The communicator of ``group``: staged where there is an accelerator whose memory its backend does not know."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    staged = accelerator is not None and accelerator_backend(group) in (None, "gloo")
    return (StagedCommunicator if staged else TorchCommunicator)(group, timeout)
