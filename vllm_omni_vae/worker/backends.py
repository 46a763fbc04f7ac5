# SPDX-License-Identifier: Apache-2.0
"""The ways to start ranks, by the name that ``--distributed-executor-backend`` gives them. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..config import EngineConfig
from ..config.engine import ExecutorBackend
from .external import ExternalBackend
from .group import WorkerBackend
from .multiproc import MultiprocBackend
from .ray import RayBackend

_BACKENDS: Mapping[ExecutorBackend, Callable[[EngineConfig], WorkerBackend]] = {
    ExecutorBackend.MP: MultiprocBackend,
    ExecutorBackend.RAY: RayBackend,
    ExecutorBackend.EXTERNAL_LAUNCHER: ExternalBackend,
}


def worker_backend(config: EngineConfig) -> WorkerBackend:
    """The way to start ranks that ``config`` asks for; nothing is started yet.

    Raises:
        ConfigurationError: it cannot be used here.
    """
    return _BACKENDS[config.distributed_executor_backend or ExecutorBackend.MP](config)
