# SPDX-License-Identifier: Apache-2.0
"""The HTTP application, and the process that serves it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from types import FrameType
from typing import NoReturn

import uvicorn
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from .. import envs
from ..config import EngineConfig, ServerConfig
from ..engine.engine import Engine
from ..errors import ConfigurationError
from .auth import BearerAuth
from .errors import install_error_handlers
from .fetch import ImageFetcher
from .image_intake import ImageIntake
from .images import ImageRoutes
from .jobs import JobStore
from .lifecycle import EngineLifecycle, ServingEngine
from .listen import describe, listening_socket
from .metrics import Metrics
from .models import metrics_route, model_routes
from .origins import KnownOrigins
from .page import page_routes
from .runner import JobRunner
from .table import startup_table
from .tracking import RequestTracking
from .upload import UploadLimit
from .video_intake import VideoIntake
from .videos import VideoRoutes

logger = logging.getLogger(__name__)

# Seconds that the running job gets to finish after SIGTERM; below the 30 that Kubernetes waits before SIGKILL.
SHUTDOWN_GRACE_S = 20.0
# Seconds that connections and half-written files get after that.
CLOSE_WAIT_S = 3
SWEEP_S = 30.0
RESUME_POLL_S = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class _Parts:
    app: FastAPI
    lifecycle: EngineLifecycle
    runner: JobRunner
    store: JobStore


def create_app(
    engine: ServingEngine, config: ServerConfig, *, model_name: str, fetcher: ImageFetcher | None = None
) -> FastAPI:
    """Return the application. While it runs it starts ``engine`` in the background, and closes it at the end.

    Until the engine is ready ``/health`` says why not and jobs are refused with 503.

    Args:
        engine: Not started yet.
        config: Names, keys, limits. Where to listen is the business of who runs the application.
        model_name: Name under which the model answers unless ``config`` names others.
        fetcher: Gets reference images that are addresses; None for one that ``config`` describes.
    """
    return _assemble(engine, config, model_name, fetcher).app


def _assemble(
    engine: ServingEngine, config: ServerConfig, model_name: str, fetcher: ImageFetcher | None = None
) -> _Parts:
    names = config.served_model_name or (model_name,)
    fetcher = fetcher or ImageFetcher(config.allowed_media_domains, config.max_upload_bytes)
    lifecycle = EngineLifecycle(engine)
    store = JobStore(config.media_storage_path, config.media_ttl, max_bytes=config.media_max_bytes)
    metrics = Metrics(lifecycle, config.max_queued_jobs)
    runner = JobRunner(
        lifecycle,
        store,
        metrics,
        names=names,
        max_queued_jobs=config.max_queued_jobs,
        job_timeout=config.job_timeout,
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(store.open)
        lifecycle.begin()
        tasks = [asyncio.create_task(task) for task in (_sweep(runner), _resume(lifecycle, runner))]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await runner.drain(0)
            await lifecycle.end()
            await runner.close(CLOSE_WAIT_S)
            await asyncio.to_thread(store.close)

    docs = None if config.disable_fastapi_docs else "/docs"
    schema = None if config.disable_fastapi_docs else "/openapi.json"
    app = FastAPI(
        title="vllm-omni-vae",
        lifespan=lifespan,
        root_path=config.root_path or "",
        docs_url=docs,
        redoc_url=None,
        openapi_url=schema,
    )
    install_error_handlers(app)
    app.include_router(page_routes())
    app.include_router(model_routes(lifecycle, names))
    app.include_router(metrics_route(metrics, runner))
    app.include_router(VideoRoutes(VideoIntake(engine, names, config, fetcher), runner, store).router)
    app.include_router(ImageRoutes(ImageIntake(engine, names, config, fetcher), runner).router)
    app.add_middleware(UploadLimit, max_bytes=config.max_upload_bytes)
    app.add_middleware(KnownOrigins, allowed=config.allowed_origins)
    if config.api_key:
        app.add_middleware(BearerAuth, keys=config.api_key)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
        )
    app.add_middleware(RequestTracking, metrics=metrics)
    return _Parts(app, lifecycle, runner, store)


async def _sweep(runner: JobRunner) -> None:
    while True:
        await asyncio.sleep(SWEEP_S)
        await runner.expire()


async def _resume(lifecycle: EngineLifecycle, runner: JobRunner) -> None:
    while not lifecycle.ready:
        await asyncio.sleep(RESUME_POLL_S)
    runner.resume()


class _Server(uvicorn.Server):
    """uvicorn, and: leaves when the engine does not run, and still answers while the running job finishes."""

    def __init__(self, config: uvicorn.Config, parts: _Parts) -> None:
        super().__init__(config)
        self._parts = parts
        self._announced = False

    async def on_tick(self, counter: int) -> bool:
        lifecycle = self._parts.lifecycle
        if lifecycle.ready and not self._announced:
            self._announced = True
            print(startup_table(lifecycle.engine), flush=True)
        return await super().on_tick(counter) or lifecycle.failure is not None

    async def main_loop(self) -> None:
        await super().main_loop()
        draining = asyncio.create_task(self._parts.runner.drain(SHUTDOWN_GRACE_S))
        while not draining.done() and not self.force_exit:
            await asyncio.wait({draining}, timeout=0.1)
        draining.cancel()
        await self._parts.runner.drain(0)


def run(engine_config: EngineConfig, server_config: ServerConfig) -> None:
    """Serve until SIGINT or SIGTERM; blocking, on the main thread.

    The address is taken before the model is loaded. After the signal no job is taken, the running one gets
    `SHUTDOWN_GRACE_S` seconds while clients can still ask for it (a second Ctrl-C ends that), and no process is left.

    Raises:
        ConfigurationError: an address, a certificate, a folder for videos or a checkpoint that cannot be used.
        EngineError: the engine did not start, or gave up.
        SystemExit: 0 after SIGTERM.
    """
    _show_log()
    with _exit_on_sigterm(), listening_socket(server_config) as sock:
        engine = Engine(engine_config)
        try:
            parts = _assemble(engine, server_config, engine_config.model)
            try:
                parts.store.open()
                _serve(parts, server_config, sock)
            finally:
                parts.store.close()
        finally:
            engine.close()
    if parts.lifecycle.failure is not None:
        raise parts.lifecycle.failure


def _serve(parts: _Parts, config: ServerConfig, sock: socket.socket) -> None:
    settings = uvicorn.Config(
        parts.app,
        log_level=config.uvicorn_log_level,
        access_log=not config.disable_uvicorn_access_log,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=config.ssl_cert_reqs,
        ssl_ciphers=config.ssl_ciphers,
        timeout_graceful_shutdown=CLOSE_WAIT_S,
        lifespan="on",
        ws="none",
    )
    try:
        settings.load()
    except OSError as error:
        raise ConfigurationError(f"cannot use the TLS files: {error}; check --ssl-keyfile and --ssl-certfile") from None
    logger.info("listening on %s; loading the model", describe(sock, config))
    with contextlib.suppress(KeyboardInterrupt):
        _Server(settings, parts).run(sockets=[sock])


def _show_log() -> None:
    """Write this package's log to stderr, unless whoever started the process has seen to it."""
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of what a client got wrong
    package = logging.getLogger(__name__.partition(".")[0])
    if not package.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s:     %(message)s"))
        package.addHandler(handler)
        package.setLevel(envs.log_level())


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the stack; uvicorn raises it once more when it is done, which would end the process there."""

    def leave(signum: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(0)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
