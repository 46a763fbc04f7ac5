# SPDX-License-Identifier: Apache-2.0
"""What the HTTP server is started with: where it listens, who may call, and its limits."""

from __future__ import annotations

import dataclasses
import re
import ssl

from ..errors import ConfigurationError
from .option import option

_HOST = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)(\.(?!-)[a-z0-9-]{1,63}(?<!-))*")
_LISTS = (
    "api_key",
    "served_model_name",
    "allowed_origins",
    "allowed_methods",
    "allowed_headers",
    "allowed_media_domains",
)
_LIMITS = (
    "media_ttl",
    "media_max_bytes",
    "max_queued_jobs",
    "max_upload_bytes",
    "max_pixels",
    "max_frames",
    "job_timeout",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The server's settings. Fields that vLLM's frontend has too keep vLLM's names and meaning.

    Raises:
        ConfigurationError: a limit below one, a host that is no name, or a TLS key without its certificate.
    """

    host: str | None = option(None, "Address to listen on. Default: all.", shared=True)
    port: int = option(8000, "Port to listen on.", shared=True)
    uds: str | None = option(None, "Unix socket to listen on instead of host and port.", shared=True)
    api_key: tuple[str, ...] = option((), "Keys of which a client must present one as a bearer token.", shared=True)
    served_model_name: tuple[str, ...] = option(
        (), "Names under which the model answers. Default: the model argument.", shared=True
    )
    allowed_origins: tuple[str, ...] = option((), "Origins that browsers may call from (CORS).", shared=True)
    allowed_methods: tuple[str, ...] = option(("*",), "Methods that browsers may use (CORS).", shared=True)
    allowed_headers: tuple[str, ...] = option(("*",), "Headers that browsers may send (CORS).", shared=True)
    allow_credentials: bool = option(False, "Let browsers send credentials (CORS).", shared=True)
    root_path: str | None = option(None, "Path prefix that a proxy strips.", shared=True)
    ssl_keyfile: str | None = option(None, "TLS key.", shared=True)
    ssl_certfile: str | None = option(None, "TLS certificate.", shared=True)
    ssl_ca_certs: str | None = option(None, "Certificate authorities for client certificates.", shared=True)
    ssl_cert_reqs: int = option(int(ssl.CERT_NONE), "Whether client certificates are required.", shared=True)
    ssl_ciphers: str | None = option(None, "TLS ciphers, in OpenSSL's form.", shared=True)
    uvicorn_log_level: str = option("info", "Log level of the HTTP server.", shared=True)
    disable_uvicorn_access_log: bool = option(False, "No line per HTTP request.", shared=True)
    disable_fastapi_docs: bool = option(False, "No /docs and /openapi.json.", shared=True)
    media_storage_path: str | None = option(
        None,
        "Folder for videos and the index of jobs, which survive a restart there. "
        "Default: a temporary folder that goes with the server.",
    )
    media_ttl: float = option(86_400.0, "Seconds that a finished video is kept.")
    media_max_bytes: int | None = option(
        None, "Bytes of finished videos from which on a new job is answered 507. Default: no limit."
    )
    max_queued_jobs: int = option(64, "Jobs that may wait; beyond it a request is answered 429.")
    max_upload_bytes: int = option(64 * 1024 * 1024, "Largest request body in bytes; a larger one is answered 413.")
    max_pixels: int = option(4096 * 4096, "Most pixels in one frame or image, asked for or uploaded.")
    max_frames: int = option(1024, "Most frames in one video, or images in one answer.")
    allowed_media_domains: tuple[str, ...] = option(
        (),
        "Hosts from which reference images may be fetched over http and https. Default: none; images come as files and "
        "data URLs.",
        shared=True,
    )
    job_timeout: float = option(3600.0, "Seconds that one job may run before it fails.")

    def __post_init__(self) -> None:
        for name in _LISTS:
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value or ()))
        object.__setattr__(self, "allowed_media_domains", tuple(map(_host, self.allowed_media_domains)))
        for name in _LIMITS:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigurationError(f"{name} is {value}; give a number above 0")
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ConfigurationError("ssl_keyfile and ssl_certfile go together; one of them is missing")


def _host(text: str) -> str:
    name = text.lower()
    if len(name) > 253 or not _HOST.fullmatch(name):
        raise ConfigurationError(
            f"allowed_media_domains {text!r} is no host name; write it as images.example.com, without https:// and "
            "path, in ASCII"
        )
    return name
