# SPDX-License-Identifier: Apache-2.0
"""Jobs that wait, in the order in which they were submitted."""

from __future__ import annotations

import threading
from collections import deque

from .job import EngineJob


class JobQueue:
    """First come, first served, for any number of replicas. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: deque[EngineJob] = deque()
        self._closed = False

    def put(self, job: EngineJob) -> bool:
        """Add ``job`` at the end; False once the queue is closed."""
        with self._lock:
            if not self._closed:
                self._jobs.append(job)
            return not self._closed

    def take(self) -> EngineJob | None:
        """The next job whose owner still waits for it; it is the caller's to end. None while there is none."""
        while True:
            with self._lock:
                if not self._jobs:
                    return None
                job = self._jobs.popleft()
            if job.future.set_running_or_notify_cancel():
                return job

    def cancel(self, job: EngineJob) -> bool:
        """Mark ``job`` as cancelled and forget it if it waits; whether it did."""
        with self._lock:
            job.cancelled = True
            waits = job in self._jobs
            if waits:
                self._jobs.remove(job)
            return waits

    def close(self) -> list[EngineJob]:
        """Take no more jobs; return those that waited. Idempotent."""
        with self._lock:
            self._closed = True
            waiting = list(self._jobs)
            self._jobs.clear()
            return waiting
