# SPDX-License-Identifier: Apache-2.0
"""One autoencoder that can run as every arm, with one set of weights."""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch

from ..autoencoders import Decision, Operation, ParallelState, distribute, families_by_name
from ..autoencoders.compare import needed_arguments, noise, run, run_alone, run_exactly, run_pieces_alone
from ..autoencoders.mixin import DistributedVaeMixin
from ..autoencoders.twin import switches
from ..config import DiffusionParallelConfig, VaeConfig
from ..distributed import VaeGroups
from ..distributed.communicator import Traffic
from ..errors import UnsupportedError
from ..pipelines.components import set_up_vae
from ..tiny.common import randomize
from .arms import Arm, Kind
from .messages import Job, Source
from .transport import silent_groups

_SEED = 0


class Subject:
    """Collective. The autoencoder of a job, and its groups.

    Args:
        job: What is measured.
        device: Where this rank computes.

    Attributes:
        device: As given.
        decisions: Those of the last run.
    """

    def __init__(self, job: Job, device: torch.device):
        self.device = device
        self.decisions: list[Decision] = []
        self._vae = load(job.source, getattr(torch, job.dtype), device)
        tiles = VaeConfig(vae_use_tiling=True, vae_tile_size=job.tile_size, vae_tile_stride=job.tile_stride)
        set_up_vae(self._vae, tiles, DiffusionParallelConfig(vae_patch_parallel_size=job.ranks))
        distribute(self._vae, size=job.ranks, timeout=timedelta(seconds=job.timeout))
        self._groups: VaeGroups = self._vae.parallel_state.groups
        self._silent = silent_groups(self._groups)
        self._chunk = job.chunk
        self._switches = dict(switches(self._vae))
        self._states: dict[Arm, ParallelState] = {}

    @property
    def weight_bytes(self) -> int:
        """Bytes of parameters and buffers."""
        return sum(tensor.nbytes for tensor in (*self._vae.parameters(), *self._vae.buffers()))

    def input(self, operation: Operation, shape: tuple[int, ...]) -> torch.Tensor:
        """Noise, the same in every process."""
        return noise(operation, shape, self._vae)

    @torch.no_grad()
    def run(self, arm: Arm, operation: Operation, x: torch.Tensor) -> torch.Tensor:
        """Collective, but of an arm that is one rank's alone. Moments or sample; a decoded one is rank 0's."""
        self.decisions.clear()
        vars(self._vae).update(self._switches)
        arguments = needed_arguments(self._vae, operation, x)
        if arm.alone:
            return run_alone(self._vae, operation, x, arguments, tiled=arm.kind is Kind.SEQUENTIAL)
        self._vae._vae_parallel = self._state(arm)
        return run(self._vae, operation, x, arguments)

    @torch.no_grad()
    def run_exactly(self, operation: Operation, x: torch.Tensor) -> torch.Tensor:
        """What the un-tiled arm would give in float64."""
        vars(self._vae).update(self._switches)
        return run_exactly(self._vae, operation, x, needed_arguments(self._vae, operation, x))

    @torch.no_grad()
    def run_pieces(self, operation: Operation, x: torch.Tensor) -> torch.Tensor:
        """What this rank makes of the pieces of the last run, which was split by rank, one after the other."""
        vars(self._vae).update(self._switches)
        arguments = needed_arguments(self._vae, operation, x)
        return run_pieces_alone(self._vae, operation, x, arguments, self.decisions[-1])

    def countable(self) -> AbstractContextManager[None]:
        """Within it `LiveBytes` can count what a run holds; its result may be anything."""
        context: AbstractContextManager[None] = self._vae.spec.countable(self._vae)
        return context

    def traffic(self, arm: Arm) -> Traffic:
        """What this rank has sent so far through the groups of ``arm``; nothing, where they exchange nothing."""
        total = Traffic()
        if arm.kind is not Kind.SHARED:
            return total
        groups = self._state(arm).groups
        for comm in {id(c): c for c in (groups.work, groups.domain, groups.halo) if c is not None}.values():
            sent = comm.traffic
            total.messages += sent.messages
            total.bytes += sent.bytes
            total.broadcast_bytes += sent.broadcast_bytes
            total.reduced_bytes += sent.reduced_bytes
            for name, count in sent.collectives.items():
                total.collectives[name] = total.collectives.get(name, 0) + count
        return total

    def _state(self, arm: Arm) -> ParallelState:
        if arm not in self._states:
            assert arm.mode is not None
            groups = self._silent if arm.kind is Kind.SILENT else self._groups
            self._states[arm] = state = ParallelState(groups, arm.mode, False, merge=arm.merge, splits=arm.splits)
            state.on_decision = self.decisions.append
            state.chunk = self._chunk
            state.retry_in_tiles = False
        return self._states[arm]


def load(source: Source, dtype: torch.dtype, device: torch.device) -> Any:
    """The diffusers autoencoder of ``source`` in evaluation mode, with equal weights in every process."""
    kind: Any = _family(source.class_name).spec.base_class
    if source.model is None:
        vae = randomize(kind.from_config(dict(source.config)), torch.Generator().manual_seed(_SEED))
    else:
        vae = kind.from_pretrained(source.model, subfolder=source.subfolder, dtype=dtype)
    torch.nn.Module.to(vae, device, dtype)  # diffusers' own `to` writes a line for every cast
    return vae.requires_grad_(False).eval()


def _family(class_name: str) -> type[DistributedVaeMixin]:
    families = families_by_name()
    if class_name not in families:
        raise UnsupportedError(f"{class_name} cannot be shared among ranks; those that can: {', '.join(families)}")
    return families[class_name]


def check_runs_as(arm: Arm, decision: Decision) -> None:
    """Refuse to time one strategy under another's name.

    Raises:
        UnsupportedError: what was decided instead.
    """
    if arm.mode is not None and decision.strategy.value != arm.strategy:
        raise UnsupportedError(f"{arm.strategy} was to be measured, but {decision} ran")
