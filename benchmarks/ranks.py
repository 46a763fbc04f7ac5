# SPDX-License-Identifier: Apache-2.0
"""Run one function on ranks that are processes of one thread each, and have them all gone afterwards."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_LEAVE_SECONDS = 10


class RanksFailed(RuntimeError):
    """A rank raised, died, or did not answer in time; says which and why."""


def run_on_ranks(body: Callable[..., T], size: int, *arguments: Any, seconds: float) -> list[T]:
    """Call ``body(rank, *arguments)`` on ``size`` new processes in one gloo group and return the results in rank order.

    Args:
        body: A function of a module; the module imports torch in it, not before, so that the thread limit holds.
        size: Ranks.
        arguments: The same on every rank.
        seconds: After these every process is ended.

    Raises:
        RanksFailed: one did not return; no process is left.
    """
    context = multiprocessing.get_context("spawn")
    deadline = time.monotonic() + seconds
    processes, answers = [], {}
    with tempfile.TemporaryDirectory(prefix="benchmark-ranks-") as folder:
        rendezvous = str(Path(folder, "rendezvous"))
        ranks: dict[Connection, int] = {}
        try:
            for rank in range(size):
                ours, theirs = context.Pipe(duplex=False)
                ranks[ours] = rank
                target = (theirs, rank, size, rendezvous, seconds, body, arguments)
                process = context.Process(target=_rank, args=target, name=f"rank-{rank}", daemon=True)
                process.start()
                processes.append(process)
                theirs.close()
            waiting = set(ranks)
            while waiting:
                heard = wait(waiting, max(0.0, deadline - time.monotonic()))
                if not heard:
                    missing = sorted(ranks[pipe] for pipe in waiting)
                    raise RanksFailed(f"ranks {missing} gave no answer within {seconds:g} s")
                for pipe in waiting.intersection(heard):
                    answers[ranks[pipe]] = _answer(pipe, ranks[pipe])
                waiting.difference_update(heard)
            for process in processes:
                process.join(_LEAVE_SECONDS)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for pipe in ranks:
                pipe.close()
    return [answers[rank] for rank in range(size)]


def _answer(pipe: Connection, rank: int) -> Any:
    try:
        fine, value = pipe.recv()
    except (EOFError, OSError):
        raise RanksFailed(f"rank {rank} died without a word") from None
    if not fine:
        raise RanksFailed(f"rank {rank}: {value}")
    return value


def _rank(
    pipe: Connection,
    rank: int,
    size: int,
    rendezvous: str,
    seconds: float,
    body: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    signal.alarm(int(seconds) + _LEAVE_SECONDS)  # should nobody be left to end this process
    os.environ["OMP_NUM_THREADS"] = "1"
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
        )
        pipe.send((True, body(rank, *arguments)))
        dist.destroy_process_group()
    except Exception as error:
        traceback.print_exc()
        pipe.send((False, f"{type(error).__name__}: {error}"))
