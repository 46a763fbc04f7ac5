# SPDX-License-Identifier: Apache-2.0
"""The VAE's own process groups."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from ..errors import ConfigurationError
from .communicator import Communicator
from .staged import communicator

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class VaeGroups:
    """Which ranks share the VAE's work, and which ranks call it.

    Attributes:
        work: The ranks that share the work, or None on a rank outside of them.
        domain: All ranks that call the VAE; a broadcast result reaches all of these.
        workers: The working ranks as ranks of ``domain``, ascending; their order in ``work``.
        halo: The working ranks once more, for messages in the middle of the work, which a rank that fails abandons so
            that nobody waits for it; None where ``work`` serves for these too.
        output: Index into ``workers`` of the rank that owns a result which is not broadcast.
    """

    work: Communicator | None
    domain: Communicator
    workers: tuple[int, ...]
    output: int = 0
    halo: Communicator | None = None

    @classmethod
    def over(cls, comm: Communicator, output: int = 0) -> VaeGroups:
        """Every rank of ``comm`` calls, and all of them share the work. Not collective.

        Args:
            comm: The ranks.
            output: Which of them owns a result that is not broadcast.
        """
        return cls(comm, comm, tuple(range(comm.size)), output)

    @classmethod
    def create(
        cls,
        size: int,
        group: dist.ProcessGroup | Sequence[int] | None = None,
        output_rank: int = 0,
        timeout: timedelta | None = None,
    ) -> VaeGroups:
        """Collective. Make groups of the VAE's own, so that its messages never meet anyone else's.

        Args:
            size: Ranks that share the work. More than there are fall back to all of them, with one warning.
            group: None: the first ``size`` ranks of the world. A process group: its first ``size`` ranks; only its
                members call. A sequence of global ranks: these work, and every rank of the world calls.
            output_rank: Place, in the working ranks as they were given, of the one that owns decoded samples.
            timeout: How long a rank waits for another in these groups. Default: torch's.

        Raises:
            ConfigurationError: torch.distributed is not initialised, or the ranks asked for do not exist.
        """
        if not dist.is_initialized():
            raise ConfigurationError(
                f"{size} VAE ranks were asked for but torch.distributed is not initialised; "
                "start with torchrun and call torch.distributed.init_process_group first"
            )
        world = list(range(dist.get_world_size()))
        if group is None:
            domain, workers = world, world[:size]
        elif isinstance(group, dist.ProcessGroup):
            domain = dist.get_process_group_ranks(group)
            workers = domain[:size]
        else:
            domain, workers = world, list(group)[:size]
        if not set(workers) <= set(domain) or len(set(workers)) < len(workers):
            raise ConfigurationError(f"VAE ranks {workers} are not distinct ranks of {domain}")
        if len(workers) < size:
            logger.warning("VAE parallel size %d falls back to %d, all the ranks there are", size, len(workers))
        if not 0 <= output_rank < len(workers):
            raise ConfigurationError(
                f"output_rank {output_rank} is not one of the {len(workers)} VAE ranks, counted from 0"
            )
        owner = workers[output_rank]
        workers = sorted(workers, key=domain.index)
        everyone = domain == world
        whole = communicator(_new_group(domain, everyone, timeout), timeout)
        whole.connect()
        inside = dist.get_rank() in workers
        halo = work = None
        if everyone or inside:
            groups = [_new_group(workers, everyone, timeout) for _ in range(2)]
            halo, work = (communicator(group, timeout) if inside else None for group in groups)
            for comm in (halo, work):
                if comm is not None:
                    comm.connect()
        return cls(work, whole, tuple(domain.index(rank) for rank in workers), workers.index(owner), halo)


def _new_group(ranks: list[int], everyone: bool, timeout: timedelta | None) -> dist.ProcessGroup:
    """Collective over the world, or over ``ranks`` alone where not ``everyone`` calls.

    Alone, torch names the group by how many groups a rank is in, so its members must be in equally many.
    """
    group: dist.ProcessGroup = dist.new_group(ranks, timeout, use_local_synchronization=not everyone)
    return group
