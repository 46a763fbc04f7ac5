# SPDX-License-Identifier: Apache-2.0
"""A job's changes as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

from .job import Job

KEEP_ALIVE_S = 15.0
KEEP_ALIVE = ": keep-alive\n\n"


async def job_events(job: Job, *, keep_alive: float = KEEP_ALIVE_S) -> AsyncIterator[str]:
    """Yield the job as it is now and at each change until it is finished or gone.

    The event's name is ``status`` when the status changed (first of all the present one), ``progress`` for a move
    within it, ``deleted`` when the job is gone. Its data is a JSON object with ``id``, ``status``, ``stage``,
    ``progress`` and ``error``. A slow reader misses steps in between, never the end. While nothing happens a comment
    goes out every ``keep_alive`` seconds.
    """
    status = None
    while True:
        changed = job.changed
        name = "deleted" if job.gone else "progress" if job.status == status else "status"
        status = job.status
        wire = job.to_json()
        data = {
            "id": job.id,
            "status": wire["status"],
            "stage": job.stage.value if job.stage else None,
            "progress": job.progress,
            "error": wire["error"],
        }
        yield f"event: {name}\ndata: {json.dumps(data)}\n\n"
        if not job.live:
            return
        while True:
            try:
                await asyncio.wait_for(changed.wait(), keep_alive)
                break
            except TimeoutError:
                yield KEEP_ALIVE
