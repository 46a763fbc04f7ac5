# SPDX-License-Identifier: Apache-2.0
"""The server as a process of its own, and a client for it."""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]


class Server:
    """A `serve_scripted` process; `output` has its lines so far.

    Args:
        within: Words before the command.
        settings: What it is started with.
    """

    def __init__(self, *within: str, **settings: Any) -> None:
        self.process = subprocess.Popen(
            [*within, sys.executable, "-m", "tests.server.serve_scripted", json.dumps(settings)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output: list[str] = []
        self._news = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.output.append(line.rstrip())
                self._news.notify_all()

    def says(self, text: str) -> bool:
        """Wait for a line that contains ``text``."""
        with self._news:
            return self._news.wait_for(lambda: any(text in line for line in self.output), 20)

    def ends(self) -> int:
        """Wait for the end and return the exit code."""
        return self.process.wait(20)


Start = Callable[..., Server]


@contextlib.contextmanager
def ready(port: int) -> Iterator[httpx.Client]:
    """A client, once the server takes jobs."""
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
        while client.get("/health").status_code != 200:
            pass
        yield client
