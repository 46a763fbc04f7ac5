# SPDX-License-Identifier: Apache-2.0
"""Record what one rank does in one job, and write it down for a trace viewer."""

from __future__ import annotations

import contextlib
import gzip
import logging
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..autoencoders.dry_run import NETWORKS
from ..distributed import span
from ..pipelines.request import Stage

logger = logging.getLogger(__name__)

MOST_BYTES = 2**29
"""A trace that takes more before it is compressed is dropped."""


class JobTrace:
    """One job on one rank: every operator, and by name the denoiser's steps, the autoencoders' calls and networks.

    Args:
        folder: Where the operator wants traces.
        job_id: The job.
        rank: This rank.
    """

    def __init__(self, folder: str, job_id: str, rank: int):
        self._folder = Path(folder)
        self._name = f"{job_id}/rank{rank}.json.gz"
        self._step: contextlib.ExitStack | None = None
        self._steps = 0
        self.written = ""

    @contextlib.contextmanager
    def recording(self, vaes: Iterable[Any], denoisers: Iterable[Any]) -> Iterator[None]:
        """Record the block, also one that raises. `written` is then the file's name, or empty if there is none.

        Args:
            vaes: Autoencoders, shared or not.
            denoisers: What runs once or more in each step; none on a rank that only has autoencoders.
        """
        networks = [
            (f"vae {name}", network) for vae in vaes for name, network in vae.named_children() if name in NETWORKS
        ]
        profiler = torch.profiler.profile(activities=torch.profiler.supported_activities())
        with contextlib.ExitStack() as hooks:
            for name, network in networks:
                hooks.enter_context(_named(network, name))
            for denoiser in denoisers:
                handle = denoiser.register_forward_pre_hook(lambda *_: self._begin_step())
                hooks.callback(handle.remove)
            profiler.start()
            try:
                yield
            finally:
                self.end_step(Stage.DENOISE)
                profiler.stop()
                self._write(profiler)

    def _begin_step(self) -> None:
        if self._step is None:
            self._steps += 1
            self._step = contextlib.ExitStack()
            self._step.enter_context(span(f"denoise step {self._steps}"))

    def end_step(self, stage: Stage) -> None:
        """A unit of ``stage`` is done; one of denoising ends the range that its first network call began."""
        step, self._step = (self._step, None) if stage is Stage.DENOISE else (None, self._step)
        if step is not None:
            step.close()

    def _write(self, profiler: torch.profiler.profile) -> None:
        """Put the file in its place; a disk that refuses it costs the trace and not the job."""
        path = self._folder / self._name
        raw = path.with_suffix(".part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(raw))
            if raw.stat().st_size > MOST_BYTES:
                logger.warning("the trace took more than %d MiB and was dropped; trace fewer steps", MOST_BYTES >> 20)
                return
            packed = raw.with_suffix(".gz.part")
            with raw.open("rb") as source, gzip.open(packed, "wb", compresslevel=5) as target:
                shutil.copyfileobj(source, target)
            packed.replace(path)
            self.written = self._name
        except (OSError, RuntimeError) as error:
            logger.warning("the trace could not be written: %s", error)
        finally:
            for leftover in (raw, raw.with_suffix(".gz.part")):
                leftover.unlink(missing_ok=True)


@contextlib.contextmanager
def _named(network: torch.nn.Module, name: str) -> Iterator[None]:
    """Within it every call of ``network`` is a range, also one that raises."""
    running: list[contextlib.ExitStack] = []

    def begin(*_: Any) -> None:
        running.append(contextlib.ExitStack())
        running[-1].enter_context(span(name))

    def end(*_: Any) -> None:
        running.pop().close()

    handles = [network.register_forward_pre_hook(begin), network.register_forward_hook(end, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
