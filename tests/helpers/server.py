# SPDX-License-Identifier: Apache-2.0
"""A server as a user starts it: a command line, an address once it listens, a log, and ranks behind it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai

BIN = Path(sys.executable).parent
TOOLS = Path(__file__).resolve().parents[2] / "tools"
ANSWER_SECONDS = 10.0
START_SECONDS = 180.0
STOP_SECONDS = 60.0

_TOKEN = "VLLM_OMNI_VAE_TEST_SERVER"
_LISTENING = re.compile(r"listening on (http://\S+);")
_LOG_TAIL = 12_000
_QUIET = "--disable-uvicorn-access-log"
_CPU_TIMES = slice(10, 12)
_START_TIME = 18
_NAMED = ("prompt", "size", "seconds", "input_reference")

# Tools are scripts and belong to no package.
holders: Callable[[bytes], dict[int, str]] = runpy.run_path(str(TOOLS / "no_leftovers.py"))["holders"]


class Server:
    """One process of a command line and all that it starts. It is usable once `wait_until_healthy` has returned.

    It listens on a free port of its own choice, so that servers never compete for one, and has a folder of its own for
    temporary files. ``http`` and ``openai`` are clients for its ``url``, which wait `ANSWER_SECONDS` for an answer.

    Args:
        command: Program (of this environment) and arguments, without an address.
        folder: For the log and the temporary files.
        environment: Variables to set for it.
        patience: Seconds that it may take to load the model, also when its ranks start again.
    """

    url: str
    http: httpx.Client
    openai: openai.OpenAI

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        *,
        environment: Mapping[str, str] | None = None,
        patience: float = START_SECONDS,
    ):
        self.patience = patience
        self.log_file = folder / "log"
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        self._token = f"{_TOKEN}={uuid.uuid4().hex}"
        name, _, token = self._token.partition("=")
        own = {name: token, "TMPDIR": str(self.temporary)}
        program, *arguments = command
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [str(BIN / program), *arguments, _QUIET, "--host", "127.0.0.1", "--port", "0"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | dict(environment or {}) | own,
            )

    @property
    def log(self) -> str:
        """What it has printed, from the end back."""
        return self.log_file.read_text(errors="replace")[-_LOG_TAIL:]

    def wait_until_healthy(self) -> None:
        """Return when it takes jobs.

        Raises:
            AssertionError: it ended, or is not healthy within its patience; has the log.
        """
        deadline = time.monotonic() + self.patience
        while not hasattr(self, "http"):
            found = _LISTENING.search(self.log_file.read_text(errors="replace"))
            if found:
                self.url = found[1]
                self.http = httpx.Client(base_url=self.url, timeout=ANSWER_SECONDS)
                self.openai = openai.OpenAI(
                    base_url=self.url + "/v1", api_key="none", timeout=ANSWER_SECONDS, max_retries=0
                )
            self._still_starting(deadline)
        while self.http.get("/health").status_code != 200:
            self._still_starting(deadline)

    def _still_starting(self, deadline: float) -> None:
        assert self.process.poll() is None, f"the server ended with exit code {self.process.returncode}:\n{self.log}"
        assert time.monotonic() < deadline, f"the server was not healthy within {self.patience:g} s:\n{self.log}"
        time.sleep(0.05)

    def wait_until_ended(self) -> int:
        """Return the exit code of a server that ends by itself; nothing that it started is left.

        Raises:
            AssertionError: it goes on, or left a process.
        """
        try:
            return self.process.wait(self.patience)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the server still runs after {self.patience:g} s:\n{self.log}") from None
        finally:
            self.close()

    def stop(self) -> int:
        """Ask it to stop by SIGTERM and return the exit code; nothing that it started is left.

        Raises:
            AssertionError: it goes on, or left a process.
        """
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the server still runs {STOP_SECONDS:g} s after SIGTERM:\n{self.log}") from None
        finally:
            self.close()

    def close(self) -> None:
        """End it by force if it still runs. Idempotent.

        Raises:
            AssertionError: a process of it outlived it; it is ended now.
        """
        if hasattr(self, "http"):
            self.http.close()
            self.openai.close()
        self.process.kill()
        self.process.wait()
        deadline = time.monotonic() + ANSWER_SECONDS
        while (left := holders(self._token.encode())) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert not left, f"processes outlived the server: {left}"

    def ranks(self) -> list[int]:
        """Process ids of its ranks, in the order in which they were started: that of the ranks."""
        workers = [pid for pid, line in holders(self._token.encode()).items() if "vllm_omni_vae.worker" in line]
        return sorted(workers, key=lambda pid: (_stat(pid)[_START_TIME], pid))

    def cpu_seconds(self) -> list[float]:
        """CPU seconds that each rank has used so far: work done, however busy the machine is."""
        return [sum(_stat(pid)[_CPU_TIMES]) / os.sysconf("SC_CLK_TCK") for pid in self.ranks()]

    def generate(self, **fields: Any) -> Any:
        """Make a clip as a user of the `openai` client does and return its job, which is completed.

        Args:
            fields: Of the request; those that the client has no name for travel in its ``extra_body``.

        Raises:
            AssertionError: the job failed.
        """
        job = self.openai.videos.create_and_poll(poll_interval_ms=50, **_arguments(fields))
        assert job.status == "completed", job.error
        return job

    def submit(self, **fields: Any) -> str:
        """Queue a clip as a user of the `openai` client does and return the id of its job."""
        return str(self.openai.videos.create(**_arguments(fields)).id)

    def content(self, video_id: str, variant: Any = "video") -> bytes:
        """Download a file of a finished clip."""
        return self.openai.videos.download_content(video_id, variant=variant).content

    def clip(self, **fields: Any) -> bytes:
        """Make a clip and return its mp4 file."""
        return self.content(self.generate(**fields).id)

    def events(self, video_id: str) -> Iterator[dict[str, Any]]:
        """Follow a job until it is finished or gone: the data of its events, and ``event`` with their names."""
        name = ""
        with self.http.stream("GET", f"/v1/videos/{video_id}/events", timeout=3 * ANSWER_SECONDS) as response:
            for line in response.iter_lines():
                key, _, value = line.partition(": ")
                if key == "event":
                    name = value
                elif key == "data":
                    yield {"event": name, **json.loads(value)}

    def wait_for_stage(self, video_id: str, stage: str) -> None:
        """Return when a job is in ``stage``.

        Raises:
            AssertionError: it ended before.
        """
        last = None
        for last in self.events(video_id):
            if last["stage"] == stage and last["status"] == "in_progress":
                return
        raise AssertionError(f"the job never was in {stage}; at last it said {last}")


def _stat(pid: int) -> list[int]:
    """The numbers of /proc/PID/stat that follow the state of the process."""
    # The name of the program, in parentheses, may hold anything.
    return [int(word) for word in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1:]]


def _arguments(fields: Mapping[str, Any]) -> dict[str, Any]:
    named = {name: value for name, value in fields.items() if name in _NAMED}
    others = {name: value for name, value in fields.items() if name not in _NAMED}
    return named | {"extra_body": others}
