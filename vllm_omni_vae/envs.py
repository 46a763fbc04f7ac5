# SPDX-License-Identifier: Apache-2.0
"""The only place that reads the process environment."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class Launched:
    """What torchrun tells a process that it started.

    Attributes:
        rank: Among all that it started.
        world_size: How many those are.
        local_rank: Among those of this machine.
    """

    rank: int
    world_size: int
    local_rank: int


def log_level() -> str:
    """Level of this package's logger: ``VLLM_OMNI_VAE_LOG_LEVEL``, else vLLM's ``VLLM_LOGGING_LEVEL``, else INFO."""
    return os.environ.get("VLLM_OMNI_VAE_LOG_LEVEL") or os.environ.get("VLLM_LOGGING_LEVEL") or "INFO"


def vae_split(operation: str) -> tuple[str, str] | None:
    """What an ``encode`` or ``decode`` is cut into where no flag says so: the variable and its text; None: not set.

    ``VLLM_OMNI_VAE_ENCODE_SPLIT``, ``VLLM_OMNI_VAE_DECODE_SPLIT``; and ``VLLM_OMNI_WAN_VAE_ENCODE_SPLIT``, which
    vLLM-Omni reads for one family and which means the same here for every family, where the first is not set.
    """
    return _first_set(operation, "SPLIT")


def vae_margin(operation: str) -> tuple[str, str] | None:
    """The margin of such a split: as `vae_split`, with ``MARGIN`` for ``SPLIT``."""
    return _first_set(operation, "MARGIN")


def _first_set(operation: str, what: str) -> tuple[str, str] | None:
    setting = f"VAE_{operation.upper()}_{what}"
    names = [f"VLLM_OMNI_{setting}"] + ([f"VLLM_OMNI_WAN_{setting}"] if operation == "encode" else [])
    return next(((name, os.environ[name]) for name in names if os.environ.get(name)), None)


def worker_environment(threads: int) -> dict[str, str]:
    """The environment of a rank process: this one's, and settings that the user may override.

    Args:
        threads: Compute threads of one rank on the CPU.
    """
    return {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"} | dict(os.environ)


def actor_environment(threads: int, *, one_machine: bool) -> dict[str, str]:
    """What the environment of a rank in a Ray actor is given besides that of its node.

    Args:
        threads: Compute threads of one rank on the CPU, unless this process has a number of its own.
        one_machine: Whether all ranks are known to be on this machine.
    """
    threads_only = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    return threads_only | ({"GLOO_SOCKET_IFNAME": "lo"} if one_machine else {})


def settle(settings: Mapping[str, str]) -> None:
    """Add ``settings`` to the environment of this process, before anything reads it."""
    os.environ.update(settings)


def ray_address() -> str | None:
    """Address of the Ray cluster to connect to: ``RAY_ADDRESS``."""
    return os.environ.get("RAY_ADDRESS") or None


def launched() -> Launched | None:
    """What torchrun tells this process; None where it did not start it."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if not all(os.environ.get(name, "").isdecimal() for name in names):
        return None
    return Launched(*(int(os.environ[name]) for name in names))


@contextlib.contextmanager
def added(settings: Mapping[str, str]) -> Iterator[None]:
    """Have ``settings`` in the environment of processes that are started meanwhile, unless it has such settings."""
    new = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)
