# SPDX-License-Identifier: Apache-2.0
"""Where ranks meet, and by which backend they then talk."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

logger = logging.getLogger(__name__)


def meet(init_method: str, rank: int, world_size: int, device: torch.device, timeout: timedelta) -> str:
    """Collective over the world. Make the default process group, with a backend that fits the ranks' devices.

    That is gloo on the CPU, and torch's own choice for ranks with an accelerator each, NCCL on CUDA. It refuses two
    ranks on one device, so ranks that share one talk by gloo, through the memory of the CPU.

    Args:
        init_method: As `torch.distributed.init_process_group` takes it.
        rank, world_size: Who this rank is.
        device: Where it computes.
        timeout: How long it waits for another.

    Returns:
        By what tensors of ``device`` travel, in words.
    """
    given, _, _ = next(rendezvous(init_method, rank, world_size, timeout=timeout))
    given.set_timeout(timeout)
    backend = _backend(PrefixStore("devices", given), rank, world_size, device)
    store = PrefixStore("default_pg", given)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    if backend == "gloo" and rank == 0:
        logger.warning(
            "there are fewer devices than ranks, so ranks share them and their messages go through the memory of the "
            "CPU; that is right but slow"
        )
    return "gloo through the CPU" if backend == "gloo" else str(dist.get_default_backend_for_device(device))


def ranks_share_devices() -> bool:
    """Whether `meet` found several ranks on one accelerator."""
    return dist.is_initialized() and dist.get_backend() == "gloo"


def _backend(store: Store, rank: int, world_size: int, device: torch.device) -> str | None:
    """Collective over the world. The same on every rank; what they say to each other is which device they have."""
    if device.type == "cpu":
        return "cpu:gloo"
    store.set(str(rank), identity(device))
    devices = [store.get(str(peer)).decode() for peer in range(world_size)]
    return shared_backend(devices)


def shared_backend(devices: Sequence[str]) -> str | None:
    """The backend of ranks on accelerators: None for torch's own choice.

    Args:
        devices: `identity` of each rank's.
    """
    return "gloo" if len(set(devices)) < len(devices) else None


def identity(device: torch.device) -> str:
    """Unlike that of any other accelerator, also of another machine, whichever of them a process can see."""
    name = str(device.index)
    if device.type in ("cuda", "xpu"):
        name = str(torch.get_device_module(device).get_device_properties(device).uuid)
    return f"{socket.gethostname()}/{name}"
