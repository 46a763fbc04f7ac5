# SPDX-License-Identifier: Apache-2.0
"""This process's membership in a Ray cluster, which all its engines share."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from .. import envs
from ..errors import ConfigurationError

_KNOCK_SECONDS = 10.0


def require_ray() -> None:
    """Check that Ray is there, without loading it.

    Raises:
        ConfigurationError: it is not installed.
    """
    if find_spec("ray") is None:
        raise ConfigurationError(
            "distributed_executor_backend ray needs Ray, which is not installed; install this package with its extra "
            '"ray", here and on every node, or use mp'
        )


class RayCluster:
    """Connects when the first engine joins, and disconnects when the last one leaves. Thread-safe.

    Taken is the cluster that this process is connected to already, else the one of ``RAY_ADDRESS``, else one that was
    started on this machine, else a new one, which only this machine can reach and which ends with the last engine.

    Attributes:
        local: Whether it is a new one.
    """

    def __init__(self) -> None:
        self.local = False
        self._lock = threading.Lock()
        self._members = 0
        self._over = threading.Event()
        self._keeper: threading.Thread | None = None

    def join(self, ranks: int) -> None:
        """Become a member.

        Args:
            ranks: Ranks for which a new cluster must have room, where they run on CPUs.

        Raises:
            ConfigurationError: ``RAY_ADDRESS`` leads nowhere.
        """
        with self._lock:
            if not self._members:
                connected: Future[None] = Future()
                self._over.clear()
                # Ray's processes end with the thread that started them, so that thread stays.
                self._keeper = threading.Thread(target=self._keep, args=(ranks, connected), name="ray", daemon=True)
                self._keeper.start()
                connected.result()
            self._members += 1

    def leave(self) -> None:
        """Give the membership back."""
        with self._lock:
            self._members -= 1
            if not self._members and self._keeper is not None:
                self._over.set()
                self._keeper.join()

    def _keep(self, ranks: int, connected: Future[None]) -> None:
        ray = importlib.import_module("ray")
        ours = not ray.is_initialized()
        self.local = False
        try:
            if ours:
                self.local = _connect(ray, ranks)
        except Exception as error:
            connected.set_exception(error)
            return
        connected.set_result(None)
        self._over.wait()
        if ours:
            ray.shutdown()


def _connect(ray: Any, ranks: int) -> bool:
    """Connect to a cluster, or start one; whether it was started."""
    address = envs.ray_address()
    if address is not None and "://" in address:
        raise ConfigurationError(
            f"RAY_ADDRESS is {address}; a Ray client has no ranks, so run this on a node of the cluster and give "
            "RAY_ADDRESS as host:port or auto"
        )
    if address != "local":
        try:
            _knock(address)
            ray.init(address=address or "auto", logging_level="ERROR")
            return False
        except OSError as error:
            if address is not None:
                raise ConfigurationError(f"RAY_ADDRESS is {address}, where no Ray cluster answers: {error}") from None
    with _loopback():
        cores = len(os.sched_getaffinity(0))
        ray.init(address="local", num_cpus=max(cores, ranks), include_dashboard=False, logging_level="ERROR")
    return True


def _knock(address: str | None) -> None:
    """Find in seconds that nobody listens at ``address``, for which Ray takes minutes.

    Raises:
        OSError: nobody does.
    """
    parts = urlsplit(f"//{address or ''}")
    if parts.hostname and parts.port:
        socket.create_connection((parts.hostname, parts.port), _KNOCK_SECONDS).close()


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    """Let a cluster that is started meanwhile listen on the loopback address alone, and report to nobody.

    Ray does so where it says that clusters are impossible, and knows no other way to ask for it.
    """
    constants: Any = importlib.import_module("ray._private.ray_constants")
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        with envs.added({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}):
            yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


CLUSTER = RayCluster()
"""The membership of this process."""
