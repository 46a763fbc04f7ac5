# SPDX-License-Identifier: Apache-2.0
"""Pictures by their address, from hosts that the operator names and from nowhere else."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import socket
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from urllib.parse import urlsplit

import httpcore2

from .. import __version__
from ..errors import RequestError
from .addresses import IPAddress, is_public
from .decode import Upload

logger = logging.getLogger(__name__)

MayConnect = Callable[[IPAddress, int], bool]

TIMEOUT_S = 20.0
"""Seconds that all pictures of one request may take together."""

# Of that for one of a host's addresses, so that one which is silent leaves time for the next.
_CONNECT_S = 5.0
_PORTS = {"http": 80, "https": 443}
_ADDRESS = re.compile(r"https?://[!-~]{1,8192}", re.IGNORECASE)
_HEADERS: dict[bytes | str, bytes | str] = {
    "Accept": "image/png, image/jpeg, image/webp",
    "Accept-Encoding": "identity",
    "User-Agent": f"vllm-omni-vae/{__version__}",
}
_BROKEN = (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException)


class _NoAddressError(Exception):
    """A name leads nowhere, or only to where nothing may be fetched from."""


class ImageFetcher:
    """Gets pictures over HTTP, for `Upload`s that are addresses.

    A name is looked up once; what that gives is checked, and the connection goes to an address that passed, whatever
    the name means a moment later. No redirect is followed and no proxy used, and nothing of a client's request goes
    along but the address. Memory is bounded by ``max_bytes`` while a file streams in.

    Args:
        hosts: Names, in lower case, that an address may have. With none nothing is fetched, and addresses are left for
            `decode` to refuse.
        max_bytes: Most bytes of all pictures of one request.
        may_connect: Whether an address and port may be connected to.
        timeout: Seconds that all pictures of one request may take.
    """

    def __init__(
        self,
        hosts: Collection[str],
        max_bytes: int,
        *,
        may_connect: MayConnect = is_public,
        timeout: float = TIMEOUT_S,
    ) -> None:
        self._hosts = tuple(hosts)
        self._max_bytes = max_bytes
        self._timeout = timeout
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=httpcore2.default_ssl_context() if self._hosts else None,
            max_keepalive_connections=0,
            network_backend=_CheckedBackend(may_connect),
        )

    async def fetch(self, uploads: Sequence[Upload]) -> list[Upload]:
        """Return ``uploads`` with the bytes of those that are addresses.

        Raises:
            RequestError: 400 for an address that is not allowed or gives no file, 413 for too many bytes.
        """
        left = self._max_bytes
        fetched = []
        try:
            async with asyncio.timeout(self._timeout):
                for upload in uploads:
                    if self._hosts and isinstance(upload.source, str) and is_address(upload.source):
                        data = await self._get(upload, self._checked(upload, upload.source), left)
                        left -= len(data)
                        upload = dataclasses.replace(upload, source=data)
                    fetched.append(upload)
        except TimeoutError:
            raise _failed(uploads[len(fetched)], f"did not come within {self._timeout:g} s") from None
        return fetched

    def _checked(self, upload: Upload, url: str) -> httpcore2.URL:
        """The address in pieces: what is checked here is what is connected to, never a text that is read once more."""
        try:
            parts = urlsplit(url) if _ADDRESS.fullmatch(url) else None
            port = parts and (parts.port or _PORTS[parts.scheme])
        except ValueError:
            parts = port = None
        if parts is None or "@" in parts.netloc or not parts.hostname:
            raise upload.refusal(
                f"the address of {upload.name} is malformed; write https://host/path, in ASCII, without a user name",
                "invalid_url",
            )
        if parts.hostname not in self._hosts:
            raise upload.refusal(
                f"this server fetches nothing from {parts.hostname}, only from {', '.join(self._hosts)}; upload the "
                "image or send it as a data URL",
                "unsupported_url",
            )
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return httpcore2.URL(scheme=parts.scheme, host=parts.hostname, port=port, target=target)

    async def _get(self, upload: Upload, url: httpcore2.URL, most: int) -> bytes:
        data = bytearray()
        try:
            async with self._pool.stream("GET", url, headers=_HEADERS) as answer:
                if answer.status != 200:
                    hint = "; give the address that it leads to" if 300 <= answer.status < 400 else ""
                    raise _failed(upload, f"is answered {answer.status} and not 200{hint}")
                async for chunk in answer.aiter_stream():
                    data += chunk
                    if len(data) > most:
                        raise upload.refusal(
                            f"{upload.name} makes it more than {self._max_bytes} bytes, the most that are fetched for "
                            "one request",
                            "image_too_large",
                            413,
                        )
        except _NoAddressError:
            raise _failed(upload, "has no public address or port, and no other is connected to") from None
        except _BROKEN as error:
            logger.debug("cannot fetch a picture from %s: %r", url.host, error)
            raise _failed(upload, "could not be fetched: the connection failed") from None
        return bytes(data)


def is_address(source: str) -> bool:
    """Whether ``source`` says that it is an address of HTTP."""
    return source[:8].lower().startswith(("http://", "https://"))


def _failed(upload: Upload, what: str) -> RequestError:
    return upload.refusal(f"the address of {upload.name} {what}; or upload the image", "image_not_fetched")


class _CheckedBackend(httpcore2.AsyncNetworkBackend):
    """Connects to addresses that pass a check, and to no name."""

    def __init__(self, may_connect: MayConnect) -> None:
        self._may_connect = may_connect
        self._inner = httpcore2.AnyIOBackend()
        # Of its own, so that a resolver that hangs keeps no other work of the server waiting.
        self._resolver = ThreadPoolExecutor(4, thread_name_prefix="resolve")

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        failure: Exception = _NoAddressError(host)
        for address in await self._look_up(host, port):
            if not self._may_connect(address, port):
                logger.debug("%s port %d is %s, which is not connected to", host, port, address)
                continue
            try:
                return await self._inner.connect_tcp(str(address), port, _CONNECT_S, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
        raise failure

    async def _look_up(self, host: str, port: int) -> list[IPAddress]:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._resolver, _resolve, host, port)
        except (OSError, UnicodeError) as error:
            raise httpcore2.ConnectError(str(error)) from None
        return [ip_address(address) for address in dict.fromkeys(found)]


def _resolve(host: str, port: int) -> list[str]:
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
