# SPDX-License-Identifier: Apache-2.0
"""The engine's life beside the event loop: loading, ready, given up, closing."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from ..config import EngineConfig
from ..engine.api import Health, JobHandle, Listener
from ..errors import VaeParallelError
from ..pipelines.request import ComponentReport, GenerationRequest, ModelCard

logger = logging.getLogger(__name__)

LOADING = "loading"
CLOSING = "shutting down"


class ServingEngine(Protocol):
    """What the server needs of an engine; `vllm_omni_vae.engine.engine.Engine` is the one that it gets."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def card(self) -> ModelCard: ...

    @property
    def report(self) -> Sequence[ComponentReport]: ...

    @property
    def device(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def worker_pids(self) -> Sequence[int]: ...

    @property
    def replicas(self) -> Sequence[Health]: ...

    @property
    def restarts(self) -> Mapping[str, int]: ...

    def start(self) -> None: ...

    def resolve(self, request: GenerationRequest) -> GenerationRequest: ...

    def submit(self, request: GenerationRequest, *, job_id: str, listener: Listener | None = None) -> JobHandle: ...

    def health(self) -> Health: ...

    def wait(self) -> BaseException | None: ...

    def close(self) -> None: ...


class EngineLifecycle:
    """Loads, watches and closes an engine in threads of its own, so that the event loop answers meanwhile.

    Attributes:
        failure: Why the engine could not be started or gave up, once it did.
    """

    def __init__(self, engine: ServingEngine) -> None:
        self.engine = engine
        self.failure: BaseException | None = None
        self._loaded = threading.Event()
        self._closing = False
        self._watcher = threading.Thread(target=self._watch, name="engine-watch", daemon=True)

    @property
    def ready(self) -> bool:
        """Whether the model is loaded and jobs may come."""
        return self._loaded.is_set() and self.failure is None and not self._closing

    def begin(self) -> None:
        """Start loading; returns at once."""
        self._watcher.start()

    def _watch(self) -> None:
        try:
            self.engine.start()
            self._loaded.set()
            failure = self.engine.wait()
        except Exception as error:
            failure = error
        if failure is not None and not self._closing:
            known = isinstance(failure, VaeParallelError)
            logger.error("the engine does not run: %s", failure, exc_info=None if known else failure)
        self.failure = failure

    def health(self) -> Health:
        """Whether jobs are taken and finished; the reason why not is ``loading`` while the model is being loaded."""
        if self._closing:
            return Health(False, CLOSING)
        if self.failure is not None:
            return Health(False, f"the engine does not run: {self.failure}")
        if not self._loaded.is_set():
            return Health(False, LOADING)
        return self.engine.health()

    def refuse_jobs(self) -> None:
        """Take no more jobs from now on."""
        self._closing = True

    async def end(self) -> None:
        """Close the engine, also one that is still loading; returns when its processes are gone."""
        self.refuse_jobs()
        await asyncio.to_thread(self.engine.close)
