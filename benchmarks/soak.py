# SPDX-License-Identifier: Apache-2.0
"""Whether the server keeps its promises under load: many clients that wait, delete, leave, and send what is wrong.

    python benchmarks/soak.py [--jobs 200] [--concurrency 16] [--seed 0] [--out FILE]

The server is the one that users start, with a tiny checkpoint and two VAE ranks on this machine's CPU. Each clip that
is downloaded must have the bytes that the same request had alone, before. The exit code is 1 if a count that must be
zero is not. Memory and latency are told and not judged; they depend on the machine and what else it does.

On Linux.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import hashlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.helpers.server import Server  # noqa: E402
from vllm_omni_vae import tiny  # noqa: E402
from vllm_omni_vae.cli.table import align  # noqa: E402

FAMILY = "wan2.2-ti2v-5b"
FLAGS = ("--vae-patch-parallel-size", "2", "--vae-tile-size", "64x64", "--vae-tile-stride", "48x48")
PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAFklEQVR42mP4"
    "z8DA8J+BkYHh////DAAe9gT9CzF8CQAAAABJRU5ErkJggg=="
)
REQUESTS: tuple[dict[str, Any], ...] = (
    {"prompt": "a boat", "size": "96x128", "num_frames": 5, "num_inference_steps": 2, "seed": 1},
    {"prompt": "a boat", "size": "128x96", "num_frames": 9, "num_inference_steps": 1, "seed": 2},
    {
        "prompt": "a cat",
        "size": "64x64",
        "num_frames": 5,
        "num_inference_steps": 4,
        "seed": 3,
        "image_reference": PICTURE,
    },
)
"""Few enough that each can be made alone before, to compare with."""

WRONG: tuple[tuple[int, dict[str, Any]], ...] = (
    (422, {}),
    (422, {"prompt": "a boat", "size": "65x64"}),
    (422, {"prompt": "a boat", "num_frames": 6}),
    (422, {"prompt": "a boat", "nothing": 1}),
    (400, {"prompt": "a boat", "model": "another"}),
    (400, {"prompt": "a boat", "image_reference": "data:image/png;base64,AAAA"}),
    (400, {"prompt": "a boat", "image_reference": "https://example.com/cat.png"}),
)
KINDS = {"wait": 10, "wait and delete": 3, "cancel": 4, "leave": 1, "wrong": 2}
"""What clients do, and how often of twenty times."""

HEALTH_S, MEMORY_S, POLL_S = 0.05, 0.25, 0.1
PATIENCE_S = 300.0


@dataclasses.dataclass(slots=True)
class Counts:
    """What happened, and what must not have happened.

    Attributes:
        lost: Jobs that did not end, or ended otherwise than the client saw to, or that the server no longer knows.
        wrong_bytes: Finished clips that are not as the same request was alone.
        wrong_answers: Bad input that was not refused as it should be, or anything else that is no right answer.
        unhealthy: Answers of /health other than 200.
        left_files: Folders of clips that belong to no completed job, or completed jobs without one.
        impatient: Refusals for a full queue that do not say when to come again.
        restarts: Ranks that are not those of the beginning.
        refused: Refusals for a full queue, after each of which a client waits as long as it is told to.
        done: What clients did, by kind.
    """

    lost: int = 0
    wrong_bytes: int = 0
    wrong_answers: int = 0
    unhealthy: int = 0
    left_files: int = 0
    impatient: int = 0
    restarts: int = 0
    refused: int = 0
    done: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def broken(self) -> dict[str, int]:
        """What must be zero."""
        names = ("lost", "wrong_bytes", "wrong_answers", "unhealthy", "left_files", "impatient", "restarts")
        return {name: getattr(self, name) for name in names}


class Soak:
    """One run against a server that is healthy.

    Args:
        server: The server.
        storage: Its folder of clips.
        jobs: How many times clients do something.
        concurrency: How many of them at a time.
        seed: Of what they do.
    """

    def __init__(self, server: Server, storage: Path, *, jobs: int, concurrency: int, seed: int) -> None:
        self._server, self._storage = server, storage
        self._jobs, self._concurrency = jobs, concurrency
        self._chance = random.Random(seed)
        self._right: list[str] = []
        self._kept: set[str] = set()
        self.counts = Counts()
        self.latencies: list[float] = []
        self.memory: dict[str, list[int]] = {}
        self.seconds = 0.0

    def run(self) -> None:
        """Make each request alone, then everything at once."""
        ranks = self._server.ranks()
        self._right = [self._alone(fields) for fields in REQUESTS]
        asyncio.run(self._together(ranks))
        self.counts.restarts = len(set(self._server.ranks()) ^ set(ranks))

    def _alone(self, fields: dict[str, Any]) -> str:
        answer = httpx.post(f"{self._server.url}/v1/videos/sync", json=fields, timeout=PATIENCE_S)
        answer.raise_for_status()
        return _digest(answer.content)

    async def _together(self, ranks: Sequence[int]) -> None:
        weighted = [kind for kind, weight in KINDS.items() for _ in range(weight)]
        # Each kind comes at least once, whatever the chances say.
        plan = [*KINDS, *(self._chance.choice(weighted) for _ in range(self._jobs - len(KINDS)))]
        tasks = [(kind, self._chance.randrange(1000), self._chance.random()) for kind in plan]
        self._chance.shuffle(tasks)
        queue = collections.deque(tasks)
        limits = httpx.Limits(max_connections=None)
        begun = time.monotonic()
        async with (
            httpx.AsyncClient(base_url=self._server.url, timeout=PATIENCE_S, limits=limits) as http,
            _beside(self._watch_health(), self._watch_memory(ranks)),
        ):

            async def client() -> None:
                while queue:
                    kind, number, wait = queue.popleft()
                    await self._do(http, kind, number, wait)
                    self.counts.done[kind] += 1

            async with asyncio.TaskGroup() as clients:
                for _ in range(self._concurrency):
                    clients.create_task(client())
            await self._check_files(http)
        self.seconds = time.monotonic() - begun

    async def _do(self, http: httpx.AsyncClient, kind: str, number: int, wait: float) -> None:
        if kind == "wrong":
            status, fields = WRONG[number % len(WRONG)]
            self.counts.wrong_answers += (await self._ask(http, fields)).status_code != status
            return
        place = number % len(REQUESTS)
        if kind == "leave":
            patience = httpx.Timeout(PATIENCE_S, read=0.2 + wait)
            with contextlib.suppress(httpx.ReadTimeout):
                answer = await http.post("/v1/videos/sync", json=REQUESTS[place], timeout=patience)
                self.counts.wrong_answers += answer.status_code not in (200, 429)
            return
        answer = await self._ask(http, REQUESTS[place])
        if answer.status_code != 200:
            self.counts.wrong_answers += 1
            return
        identity = answer.json()["id"]
        if kind == "cancel":
            await asyncio.sleep(2 * wait)  # at any moment between the queue and the file
            await self._delete(http, identity)
            return
        status = await self._end_of(http, identity)
        if status != "completed":
            self.counts.lost += 1
            return
        content = await http.get(f"/v1/videos/{identity}/content")
        self.counts.wrong_bytes += _digest(content.content) != self._right[place]
        if kind == "wait and delete":
            await self._delete(http, identity)
        else:
            self._kept.add(identity)

    async def _ask(self, http: httpx.AsyncClient, fields: dict[str, Any]) -> httpx.Response:
        """The answer to a request for a clip, once there is room in the queue."""
        while (answer := await http.post("/v1/videos", json=fields)).status_code == 429:
            self.counts.refused += 1
            seconds = answer.headers.get("retry-after", "")
            self.counts.impatient += not seconds.isdecimal()
            await asyncio.sleep(float(seconds or 1))
        return answer

    async def _end_of(self, http: httpx.AsyncClient, identity: str) -> str:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            job = (await http.get(f"/v1/videos/{identity}")).json()
            if job.get("status") not in ("queued", "in_progress"):
                return str(job.get("status"))
            await asyncio.sleep(POLL_S)
        return "late"

    async def _delete(self, http: httpx.AsyncClient, identity: str) -> None:
        answer = await http.delete(f"/v1/videos/{identity}")
        after = await http.get(f"/v1/videos/{identity}/content")
        self.counts.wrong_answers += (answer.status_code, after.status_code) != (200, 410)

    async def _check_files(self, http: httpx.AsyncClient) -> None:
        """Compare what clients know, what the server lists, and what is on the disk."""
        deadline = time.monotonic() + PATIENCE_S
        while True:  # jobs whose client has left are on their way out
            listed = await _listed(http)
            if all(job["status"] == "completed" for job in listed) or time.monotonic() > deadline:
                break
            await asyncio.sleep(POLL_S)
        self.counts.lost += len(self._kept ^ {job["id"] for job in listed})
        folders = {path.name for path in self._storage.iterdir() if path.is_dir()}
        self.counts.left_files = len(folders ^ self._kept)

    async def _watch_health(self) -> None:
        async with httpx.AsyncClient(base_url=self._server.url, timeout=PATIENCE_S) as http:
            while True:
                begun = time.monotonic()
                answer = await http.get("/health")
                self.latencies.append(time.monotonic() - begun)
                self.counts.unhealthy += answer.status_code != 200
                await asyncio.sleep(HEALTH_S)

    async def _watch_memory(self, ranks: Sequence[int]) -> None:
        names = {"server": self._server.process.pid} | {f"rank {number}": pid for number, pid in enumerate(ranks)}
        processes = {name: psutil.Process(pid) for name, pid in names.items()}
        while True:
            for name, process in processes.items():
                self.memory.setdefault(name, []).append(process.memory_info().rss)
            await asyncio.sleep(MEMORY_S)


@contextlib.asynccontextmanager
async def _beside(*watches: Any) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(watch) for watch in watches]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(ended, asyncio.CancelledError):
                raise ended


async def _listed(http: httpx.AsyncClient) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while True:
        after = {"after": found[-1]["id"]} if found else {}
        page = (await http.get("/v1/videos", params={"limit": 100, **after})).json()
        found += page["data"]
        if not page["has_more"]:
            return found


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def quarters(samples: Sequence[int]) -> tuple[float, float]:
    """The medians of the first and of the last quarter, in MiB."""
    size = max(1, len(samples) // 4)
    return statistics.median(samples[:size]) / 2**20, statistics.median(samples[-size:]) / 2**20


def result(soak: Soak) -> dict[str, Any]:
    """What a run found, for JSON."""
    counts = soak.counts
    ordered = sorted(soak.latencies)
    return {
        "seconds": soak.seconds,
        "done": dict(counts.done),
        "refused": counts.refused,
        "broken": counts.broken(),
        "health_ms": {
            "samples": len(ordered),
            "p50": 1000 * ordered[len(ordered) // 2],
            "p99": 1000 * ordered[len(ordered) * 99 // 100],
            "max": 1000 * ordered[-1],
        },
        "rss_mib": {name: quarters(samples) for name, samples in soak.memory.items()},
    }


def table(found: dict[str, Any]) -> str:
    """What a run found, for people."""
    done, health = found["done"], found["health_ms"]
    lines = [["what clients did", "times"], *([kind, str(done.get(kind, 0))] for kind in KINDS)]
    lines.append(["came again for a full queue", str(found["refused"])])
    zero = [["must be zero", "found"], *([name.replace("_", " "), str(n)] for name, n in found["broken"].items())]
    times = [["/health", "ms"], *([name, f"{health[name]:.1f}"] for name in ("p50", "p99", "max"))]
    memory = [["memory, MiB", "first quarter", "last quarter", "growth"]]
    for name, (first, last) in found["rss_mib"].items():
        memory.append([name, f"{first:.1f}", f"{last:.1f}", f"{last - first:+.1f}"])
    parts = [align(part) for part in (lines, zero, times, memory)]
    return "\n\n".join("\n".join(part) for part in parts) + f"\n\n{found['seconds']:.0f} s"


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line asks for, or ``words`` in its place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200, help="how many times clients do something (200)")
    parser.add_argument("--concurrency", type=int, default=16, help="how many of them at a time (16)")
    parser.add_argument("--seed", type=int, default=0, help="of what they do (0)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result as JSON, too")
    args = parser.parse_args(words)
    if args.jobs < len(KINDS) or args.concurrency < 1:
        parser.error(f"--jobs is at least {len(KINDS)}, --concurrency at least 1")
    return args


def main() -> int:
    """Run, print, and return the exit code."""
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder, storage = Path(name), Path(name, "media")
        model = tiny.build(FAMILY, folder / "model")
        limits = ("--max-queued-jobs", str(max(1, args.concurrency // 2)), "--media-storage-path", str(storage))
        environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        server = Server(
            ("vllm-omni-vae", "serve", str(model), *FLAGS, *limits), folder / "server", environment=environment
        )
        try:
            server.wait_until_healthy()
            soak = Soak(server, storage, jobs=args.jobs, concurrency=args.concurrency, seed=args.seed)
            soak.run()
            ended = server.stop()
        finally:
            server.close()
    found = result(soak) | {"load": os.getloadavg()[0]}
    print(table(found))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=2) + "\n")
    return int(ended != 0 or any(found["broken"].values()))


if __name__ == "__main__":
    sys.exit(main())
