# SPDX-License-Identifier: Apache-2.0
"""Communicators that only a measurement needs: one that sends nothing, and one for ranks that share a card."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ..distributed import NullCommunicator, TorchCommunicator, VaeGroups
from ..distributed.communicator import Communicator, Message, Reduction


class SilentCommunicator(NullCommunicator):
    """Sends nothing; what would be received is zeros, which are as fast to compute with as any picture."""

    def _exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        for _, buffer in receives:
            buffer.zero_()


def silent_groups(groups: VaeGroups) -> VaeGroups:
    """Groups of the same ranks that exchange nothing."""
    comm = SilentCommunicator(groups.domain.rank, groups.domain.size)
    return VaeGroups(comm, comm, groups.workers, groups.output)


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


def staged_groups(groups: VaeGroups) -> VaeGroups:
    """The same groups, which take tensors of an accelerator through the memory of the CPU."""
    work, halo = (comm and _staged(comm) for comm in (groups.work, groups.halo))
    return dataclasses.replace(groups, work=work, domain=_staged(groups.domain), halo=halo)


def _staged(comm: Communicator) -> Communicator:
    return StagedCommunicator(comm.group) if isinstance(comm, TorchCommunicator) else comm
