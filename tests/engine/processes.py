# SPDX-License-Identifier: Apache-2.0
"""Look at processes through /proc, by their ids; and limit, stop and end them."""

import contextlib
import gc
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

UNTIL_SECONDS = 20.0


def _stat(pid: int) -> list[str]:
    """State, parent and what follows them; empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def state(pid: int) -> str:
    """The letter of a process's state, such as S, T or Z; empty where there is none."""
    return next(iter(_stat(pid)), "")


def is_running(pid: int) -> bool:
    """Whether the process exists and has not ended. One that only waits for its parent to look has ended."""
    return state(pid) not in ("", "Z", "X")


def children() -> set[int]:
    """Every process whose parent is this one, also one that has ended and was not waited for."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return {pid for pid in pids if _stat(pid)[1:2] == [str(os.getpid())]}


def open_files() -> int:
    """How many file descriptors this process holds, without those of objects that nobody uses any more."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def until(condition: Callable[[], object], seconds: float = UNTIL_SECONDS) -> None:
    """Return once ``condition`` is true of a state that announces no change.

    Raises:
        AssertionError: it did not come true within ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"did not come true within {seconds:g} s"
        time.sleep(0.005)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Hold the process with SIGSTOP; afterwards it goes on, if it is still there."""
    stop(pid)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def stop(pid: int) -> None:
    """Hold the process with SIGSTOP and return when it stands still."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: state(pid) == "T")


def resident_bytes(pid: int) -> int:
    """Bytes of the process that are in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


@contextlib.contextmanager
def no_more_memory(pid: int, extra: int = 0) -> Iterator[Callable[[], None]]:
    """Give a function after whose call the process gets no further memory; at the end it may have some again.

    What it has now, and ``extra`` bytes, is the limit: what it takes until the call, and gives back, is no reserve to
    go on with.
    """
    before = resource.prlimit(pid, resource.RLIMIT_AS)
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])

    def limit() -> None:
        resource.prlimit(pid, resource.RLIMIT_AS, (pages * resource.getpagesize() + extra, before[1]))

    try:
        yield limit
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_AS, before)
