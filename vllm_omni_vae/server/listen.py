# SPDX-License-Identifier: Apache-2.0
"""The socket that the server listens on, taken before anything slow is begun."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator

from ..config import ServerConfig
from ..errors import ConfigurationError

BACKLOG = 2048


@contextlib.contextmanager
def listening_socket(config: ServerConfig) -> Iterator[socket.socket]:
    """Listen as ``config`` says; on leaving, close the socket and remove the file of a Unix one.

    Raises:
        ConfigurationError: the address is taken, unknown or not allowed.
    """
    sock = _unix(config.uds) if config.uds else _tcp(config.host or "", config.port)
    try:
        yield sock
    finally:
        sock.close()
        if config.uds:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(config.uds)


def describe(sock: socket.socket, config: ServerConfig) -> str:
    """Return the socket's address as a person would write it."""
    if config.uds:
        return f"unix:{config.uds}"
    host, port = sock.getsockname()[:2]
    scheme = "https" if config.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _tcp(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise ConfigurationError(
            f"cannot listen on host {host or '(all)'}, port {port}: {error}; choose another with --host and --port"
        ) from None


def _unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        sock.bind(path)
        os.chmod(path, 0o666)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigurationError(f"cannot listen on {path}: {error}; choose another path with --uds") from None
    return sock


def _remove_stale(path: str) -> None:
    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
