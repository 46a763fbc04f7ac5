# SPDX-License-Identifier: Apache-2.0
"""Finished images on the wire, as the `openai` client reads them: one object, or a stream of events."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

from .errors import error_body
from .events import KEEP_ALIVE, KEEP_ALIVE_S
from .job import Job
from .runner import JobRunner

# The client's types know no other words for the quality of an answer.
_EFFORTS = frozenset({"low", "medium", "high", "xhigh", "max"})
# Tokens are not counted here, and the client's types have no word for that.
_USAGE = {
    "input_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
    "output_tokens": 0,
    "total_tokens": 0,
}


def images_body(job: Job, quality: str) -> bytes:
    """Return the answer of a finished job as JSON, with its seed, the VAE's decisions and their cost besides OpenAI's.

    Blocking: it takes time with many large images.

    Args:
        job: Completed, of an image model.
        quality: What the request said of it.
    """
    assert job.outcome is not None
    effort = quality if quality in _EFFORTS else None
    body = {"created": job.completed_at, "data": list(_items(job)), **_common(job), "quality": effort, "usage": _USAGE}
    outcome = job.outcome
    ours = {"seed": job.request.seed, "vae": outcome.vae, "vae_use": outcome.vae_use, "traces": outcome.traces}
    return json.dumps({**body, **ours}).encode()


async def image_events(
    job: Job, runner: JobRunner, *, kind: str, quality: str, keep_alive: float = KEEP_ALIVE_S
) -> AsyncIterator[str]:
    """Yield server-sent events: ``KIND.completed`` for each image of the job, or one ``error``.

    All images come when the job is over, those of one layered image bottom first. Until then a comment goes out every
    ``keep_alive`` seconds.

    Args:
        job: Of an image model; not finished yet, or finished.
        runner: Runs it.
        kind: ``image_generation`` or ``image_edit``.
        quality: What the request said of it.
        keep_alive: Seconds.
    """
    over = asyncio.ensure_future(runner.wait(job))
    try:
        while not (await asyncio.wait({over}, timeout=keep_alive))[0]:
            yield KEEP_ALIVE
    finally:
        over.cancel()
    if job.error is not None:
        yield _event("error", {"type": "error", **error_body(job.error.status, job.error.message, code=job.error.code)})
        return
    effort = quality if quality in _EFFORTS else "auto"
    common = {"type": f"{kind}.completed", "created_at": job.completed_at, **_common(job)}
    items = _items(job)
    while (item := await asyncio.to_thread(next, items, None)) is not None:
        yield _event(f"{kind}.completed", {**common, **item, "quality": effort, "usage": _USAGE})


def _event(name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


def _common(job: Job) -> dict[str, Any]:
    assert job.encoding is not None
    return {
        "size": f"{job.request.width}x{job.request.height}",
        "output_format": job.encoding.format,
        "background": "transparent" if job.encoding.transparency else "opaque",
    }


def _items(job: Job) -> Iterator[dict[str, Any]]:
    assert job.outcome is not None
    layers = job.request.layers
    for place, picture in enumerate(job.outcome.pictures):
        run, layer = divmod(place, layers or 1)
        item = {"b64_json": base64.b64encode(picture).decode(), "seed": (job.request.seed or 0) + run}
        yield item if layers is None else {**item, "layer": layer}
