# SPDX-License-Identifier: Apache-2.0
"""The verbs with which ranks move tensors, counted."""

from __future__ import annotations

import dataclasses
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..errors import DisagreementError, PeerLostError
from .span import span

Reduction = Literal["sum", "max"]
Message = tuple[int, torch.Tensor]


@dataclasses.dataclass(slots=True)
class Traffic:
    """What one rank has sent: point-to-point messages, their bytes, and collectives by name.

    Attributes:
        reduced_bytes: Bytes that it brought to sums of which others get the result; a backend decides on which ways,
            and so how often, they travel.
    """

    messages: int = 0
    bytes: int = 0
    broadcast_bytes: int = 0
    reduced_bytes: int = 0
    collectives: dict[str, int] = dataclasses.field(default_factory=dict)

    def count(self, collective: str) -> None:
        """Note one collective."""
        self.collectives[collective] = self.collectives.get(collective, 0) + 1


class Communicator(ABC):
    """Ranks 0 .. `size` - 1 of one group. Every method is collective: all ranks call it in the same order.

    Tensors are sent as they lie in memory, so a tensor that is not contiguous is copied first: a backend may deliver
    other values for a cropped view without saying so.

    Attributes:
        rank: This rank's number in the group.
        size: Ranks in the group.
        control_device: Where small integer tensors must live to travel through this group.
        traffic: What this rank has sent so far.
    """

    def __init__(self, rank: int, size: int, control_device: torch.device | None = None):
        self.rank = rank
        self.size = size
        self.control_device = control_device or torch.device("cpu")
        self.traffic = Traffic()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Collective among the named peers. Send and receive all messages in one batch.

        Args:
            sends: (peer, tensor) in an order that the peer's receives share.
            receives: (peer, contiguous buffer); filled on return.

        Raises:
            DisagreementError: a buffer that is not contiguous, which could not be filled.
        """
        for peer, buffer in receives:
            if not buffer.is_contiguous():
                raise DisagreementError(f"the buffer for rank {peer} is a view with gaps; give a contiguous one")
        packed = [(peer, tensor.contiguous()) for peer, tensor in sends]
        self.traffic.messages += len(packed)
        self.traffic.bytes += sum(tensor.nbytes for _, tensor in packed)
        if packed or receives:
            self._exchange(packed, receives)

    def room(self, piece: torch.Tensor, sizes: Sequence[int], dst: int) -> list[torch.Tensor]:
        """What `gather` with these arguments needs memory for on this rank; without communication."""
        if self.rank != dst:
            return []
        return [piece if rank == dst else piece.new_empty(size) for rank, size in enumerate(sizes)]

    def gather(
        self, piece: torch.Tensor, sizes: Sequence[int], dst: int, room: list[torch.Tensor] | None = None
    ) -> list[torch.Tensor] | None:
        """Collective. Bring each rank's 1-D ``piece`` to ``dst`` in its exact size; nothing is padded.

        Args:
            piece: ``sizes[rank]`` elements.
            sizes: Elements of every rank's piece, known to all; 0 sends nothing.
            dst: Rank that owns the result.
            room: What `room` gave, by which a rank learns beforehand that it has no memory for the result.

        Returns:
            On ``dst`` the pieces in rank order (its own is ``piece`` itself); elsewhere None.
        """
        self.traffic.count("gather")
        if self.rank != dst:
            with span("gather"):
                self.exchange([(dst, piece)] if sizes[self.rank] else [], [])
            return None
        pieces = self.room(piece, sizes, dst) if room is None else room
        with span("gather"):
            self.exchange([], [(rank, p) for rank, p in enumerate(pieces) if rank != dst and sizes[rank]])
        return pieces

    def all_gather(self, piece: torch.Tensor) -> torch.Tensor:
        """Collective. Stack every rank's equally shaped ``piece`` along a new first dim, on every rank."""
        self.traffic.count("all_gather")
        return self._all_gather(piece.contiguous())

    def all_gather_uneven(self, piece: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Collective. Bring each rank's 1-D ``piece`` to every rank in its exact size, one message to each peer.

        Args:
            piece: ``sizes[rank]`` elements.
            sizes: Elements of every rank's piece, known to all.

        Returns:
            The pieces in rank order; its own is ``piece`` itself.
        """
        self.traffic.count("all_gather_uneven")
        pieces = [piece if rank == self.rank else piece.new_empty(size) for rank, size in enumerate(sizes)]
        peers = [rank for rank in range(self.size) if rank != self.rank]
        self.exchange([(peer, piece) for peer in peers], [(peer, pieces[peer]) for peer in peers])
        return pieces

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "sum") -> None:
        """Collective. Reduce the contiguous ``tensor`` over the ranks, in place."""
        self.traffic.count("all_reduce")
        self.traffic.reduced_bytes += tensor.nbytes
        self._all_reduce(tensor, op)

    def reduce(self, tensor: torch.Tensor, dst: int) -> None:
        """Collective. Sum the contiguous ``tensor`` over the ranks, in place on ``dst``; elsewhere it may be lost."""
        self.traffic.count("reduce")
        if self.rank != dst:
            self.traffic.reduced_bytes += tensor.nbytes
        self._reduce(tensor, dst)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Collective. Fill the contiguous ``tensor`` of every rank with that of ``src``, in place."""
        self.traffic.count("broadcast")
        if self.rank == src:
            self.traffic.broadcast_bytes += tensor.nbytes
        self._broadcast(tensor, src)

    @property
    def abandoned(self) -> bool:
        """Whether `abandon` was called and `renew` was not."""
        return False

    def abandon(self) -> None:
        """Let go of the group, so that ranks which wait for this one in it raise `PeerLostError` at once.

        Every rank of the group abandons it in the end; `renew` brings it back.
        """
        return

    def renew(self) -> None:
        """Collective. Make an abandoned group anew; does nothing when it is there."""
        return

    @abstractmethod
    def _exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None: ...

    @abstractmethod
    def _all_gather(self, piece: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def _all_reduce(self, tensor: torch.Tensor, op: Reduction) -> None: ...

    @abstractmethod
    def _reduce(self, tensor: torch.Tensor, dst: int) -> None: ...

    @abstractmethod
    def _broadcast(self, tensor: torch.Tensor, src: int) -> None: ...


class TorchCommunicator(Communicator):
    """A `torch.distributed` process group; peers are ranks of the group, whatever their global numbers."""

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta | None = None):
        self._timeout = timeout
        super().__init__(dist.get_rank(group), dist.get_world_size(group), _control_device(group))
        self._group: dist.ProcessGroup | None = group
        self._global = dist.get_process_group_ranks(group)
        self._name = group.group_name
        self._renewals = 0

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group.

        Raises:
            PeerLostError: it was abandoned.
        """
        if self._group is None:
            raise PeerLostError("the process group was abandoned after a rank failed in it")
        return self._group

    @property
    def abandoned(self) -> bool:
        return self._group is None

    def abandon(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            # To destroy a group of NCCL is to wait for its messages, and those of a lost peer never come.
            leave = c10d._abort_process_group if accelerator_backend(group) == "nccl" else dist.destroy_process_group
            leave(group)
            del group
            gc.collect()

    def connect(self) -> None:
        """Collective. Have the backend connect all ranks now, so that later messages need only those they are for.

        NCCL connects a group at its first call, for which it waits for all ranks of the group; in a `gather` those that
        have nothing to send make none.
        """
        if accelerator_backend(self.group) not in (None, "gloo"):
            self._all_reduce(torch.zeros(1, device=torch.accelerator.current_accelerator()), "sum")

    def renew(self) -> None:
        """Collective. Make an abandoned group anew, under a name that all its ranks come to alike.

        `torch.distributed.new_group` would name it by how many groups each process is in, and those differ.
        """
        if self._group is not None:
            return
        self._renewals += 1
        backend, store = c10d._world.pg_map[c10d._get_default_group()]
        self._group, _ = c10d._new_process_group_helper(
            self.size,
            self.rank,
            self._global,
            c10d.Backend(backend),
            store,
            group_name=c10d.GroupName(f"{self._name}/{self._renewals}"),
            timeout=self._timeout or c10d._get_default_timeout(c10d.Backend(backend)),
        )
        c10d._world.pg_group_ranks[self._group] = {rank: place for place, rank in enumerate(self._global)}
        self.connect()

    def _exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        def batch() -> None:
            messages = [dist.P2POp(dist.isend, tensor, self._global[peer], self.group) for peer, tensor in sends]
            messages += [dist.P2POp(dist.irecv, tensor, self._global[peer], self.group) for peer, tensor in receives]
            for work in dist.batch_isend_irecv(messages):
                work.wait()

        self._or_lose(batch)

    def _all_gather(self, piece: torch.Tensor) -> torch.Tensor:
        pieces = [torch.empty_like(piece) for _ in range(self.size)]
        self._or_lose(lambda: dist.all_gather(pieces, piece, group=self.group))
        return torch.stack(pieces)

    def _all_reduce(self, tensor: torch.Tensor, op: Reduction) -> None:
        reduction = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        self._or_lose(lambda: dist.all_reduce(tensor, reduction, group=self.group))

    def _reduce(self, tensor: torch.Tensor, dst: int) -> None:
        self._or_lose(lambda: dist.reduce(tensor, self._global[dst], group=self.group))

    def _broadcast(self, tensor: torch.Tensor, src: int) -> None:
        self._or_lose(lambda: dist.broadcast(tensor, self._global[src], group=self.group))

    def _or_lose(self, call: Callable[[], object]) -> None:
        """Make ``call``. When it breaks off abandon the group, so that the ranks that wait for this one hear of it too.

        Backends say in their own ways that a peer is gone, all of them by RuntimeError. It is raised anew after its
        traceback is gone: that would keep the group's connections open.
        """
        try:
            call()
            return
        except PeerLostError:
            raise
        except RuntimeError as error:
            reason = str(error)
        self.abandon()
        raise PeerLostError(f"an exchange with the other ranks broke off: {reason}")


def accelerator_backend(group: dist.ProcessGroup) -> str | None:
    """Name of the backend by which ``group`` moves tensors of this machine's accelerator; None where it cannot."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator not in group._device_types:
        return None
    return str(group._get_backend(accelerator).name())


def _control_device(group: dist.ProcessGroup) -> torch.device:
    cpu = torch.device("cpu")
    if cpu in group._device_types or dist.get_backend(group) == "gloo":
        return cpu
    return torch.device(torch.accelerator.current_accelerator() or cpu)


class NullCommunicator(Communicator):
    """Moves nothing: what a rank computes with it takes as long as if exchanges were free.

    Received buffers keep what they hold, so results are meaningless; only times and shapes are not.
    """

    def _exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        return

    def _all_gather(self, piece: torch.Tensor) -> torch.Tensor:
        return torch.stack([piece] * self.size)

    def _all_reduce(self, tensor: torch.Tensor, op: Reduction) -> None:
        return

    def _reduce(self, tensor: torch.Tensor, dst: int) -> None:
        return

    def _broadcast(self, tensor: torch.Tensor, src: int) -> None:
        return
