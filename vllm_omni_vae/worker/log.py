# SPDX-License-Identifier: Apache-2.0
"""How the log lines of a rank begin: which rank says it, and about which job."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

_FORMAT = "%(levelname)s %(asctime)s [%(speaker)s] %(name)s: %(message)s"


def begin_log(level: str) -> None:
    """Write the log of a process that stands for a rank to stderr, without the progress bars of libraries."""
    logging.basicConfig(level=level, stream=sys.stderr)
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()


class RankLog(logging.Filter):
    """Puts the rank, and while it runs a job the job's id, before every line, whichever library or thread writes it.

    Args:
        rank: This rank.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = f"rank {rank}"
        self._speaker = self._rank

    def install(self, handler: logging.Handler) -> None:
        """Let ``handler`` write such lines."""
        handler.setFormatter(logging.Formatter(_FORMAT))
        handler.addFilter(self)

    @contextlib.contextmanager
    def job(self, job_id: str) -> Iterator[None]:
        """Name ``job_id`` in every line written meanwhile."""
        self._speaker = f"{self._rank}, {job_id}"
        try:
            yield
        finally:
            self._speaker = self._rank

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the speaker to ``record``, which is always let through."""
        record.speaker = self._speaker
        return True
