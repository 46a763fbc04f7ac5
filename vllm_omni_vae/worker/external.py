# SPDX-License-Identifier: Apache-2.0
"""Ranks that torchrun started: this process is one of them. Imports no torch before the rank begins."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

from .. import envs
from ..config import EngineConfig
from ..errors import ConfigurationError
from .group import packed
from .messages import FromRank, LoadFailed, Setup, Stop
from .pipes import RankPipes

logger = logging.getLogger(__name__)

_LEAVE_SECONDS = 5.0
_SCHEME = "vllm-omni-vae"
_NUMBERS = itertools.count(1)


class ExternalBackend:
    """The one rank of this process. It cannot be started again: torchrun does that, with all ranks.

    Args:
        config: What the ranks are to load.

    Raises:
        ConfigurationError: torchrun did not start this process, or started another number of ranks than is needed.
    """

    max_restarts = 0

    def __init__(self, config: EngineConfig):
        launched = envs.launched()
        if launched is None:
            raise ConfigurationError(
                "external_launcher: torchrun did not start this process (RANK, WORLD_SIZE and LOCAL_RANK are not set); "
                "start the program with torchrun, or leave distributed_executor_backend out"
            )
        needed = config.parallel.world_size
        if launched.world_size != needed:
            raise ConfigurationError(
                f"external_launcher: torchrun started {launched.world_size} ranks, but the parallelism needs {needed}; "
                "start as many as it needs"
            )
        meeting = f"{_SCHEME}://group-{next(_NUMBERS)}"
        self._setup = Setup(config, launched.rank, launched.world_size, meeting, launched.local_rank)

    def group(self, replica: int) -> ExternalGroup:
        """This process's rank, not started yet."""
        return ExternalGroup(self._setup)

    def close(self) -> None:
        """Nothing is shared."""


class ExternalGroup:
    """The rank of this process, on a thread with a pipe of its own. The other ranks are the business of theirs.

    Args:
        setup: Who it is and what to load.
    """

    size = 1

    def __init__(self, setup: Setup):
        self._setup = setup
        self.has_output = setup.rank == 0
        self._pipes = RankPipes(setup.config.worker_timeout)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to load on a thread."""
        self._thread = threading.Thread(target=self._live, args=(self._pipes.open(),), name="rank", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        """This process, while the rank runs in it."""
        return [os.getpid()] if self._thread is not None else []

    def send_packed(self, data: bytes) -> None:
        """Send what `packed` made to the rank."""
        for rank in range(len(self._pipes)):
            self._pipes.send(rank, data)

    def receive(self, also: socket.socket, timeout: float | None) -> list[tuple[int, FromRank | None]]:
        """As `WorkerGroup.receive`."""
        return self._pipes.receive(also, timeout)

    def describe_exit(self, rank: int) -> str:
        """Say that the rank's thread has ended."""
        return f"rank {self._setup.rank}, which is this process, has left"

    def close(self, grace: float = 0.0) -> None:
        """Ask the rank to leave. One that waits for others for ever cannot be ended without this process. Idempotent.

        Args:
            grace: Seconds that it gets besides those it gets in any case.
        """
        self.send_packed(packed(Stop()))
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(grace + _LEAVE_SECONDS)
            if thread.is_alive():
                logger.error("rank %d waits for ranks that do not come; end this process", self._setup.rank)
        self._pipes.close()

    def _live(self, connection: Connection) -> None:
        """Thread body: the same life as that of a rank in a process of its own."""
        import torch.distributed as dist

        from .log import RankLog
        from .worker import RankWorker

        with connection, contextlib.suppress(EOFError, OSError):
            if dist.is_initialized():
                said = "torch.distributed is initialized already; with external_launcher, Omni does it, so leave it out"
                connection.send(LoadFailed(said, configuration=True))
                return
            _name_meetings()
            try:
                RankWorker(connection, self._setup, RankLog(self._setup.rank)).serve()
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()


@functools.cache
def _name_meetings() -> None:
    """Let torch know meetings of a name each: torchrun's store never forgets where ranks were that met before."""
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

    def meet(url: str, **settings: Any) -> Iterator[Any]:
        parts = urlsplit(url)
        for store, rank, world_size in rendezvous(f"env://?{parts.query}", **settings):
            yield PrefixStore(parts.netloc, store), rank, world_size

    register_rendezvous_handler(_SCHEME, meet)
