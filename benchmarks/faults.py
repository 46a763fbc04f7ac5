# SPDX-License-Identifier: Apache-2.0
"""What a client sees of each fault of the server, and how long it takes until the next clip is right.

    python benchmarks/faults.py [--ranks 2 3] [--json FILE]

Every fault is a real one: processes are killed and stopped, memory and disks end, clients leave. The server is the one
that users start, with a tiny checkpoint, and the ranks are processes of this machine's CPU. After each fault the same
clip is asked for at once; it must have the bytes that it had before all faults, and every rank must be there again.
The exit code is 1 if a client saw something else than it should, or a clip was wrong.

On Linux. The disk that ends is a small file system in memory; where mounting one is not allowed, that row is not run.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.helpers.server import Server  # noqa: E402
from tests.helpers.weights import spoil  # noqa: E402
from vllm_omni_vae import tiny  # noqa: E402

FAMILY = "wan2.2-t2v"
CLIP: dict[str, Any] = {
    "prompt": "a boat leaves the harbour",
    "size": "144x144",
    "num_frames": 5,
    "num_inference_steps": 2,
    "seed": 11,
    "boundary_ratio": 0.0,  # the first expert alone
}
LONG = CLIP | {"num_frames": 9, "size": "272x272"}
"""Takes long enough to be met in each of its stages."""
TILES = ("--vae-tile-size", "64x64", "--vae-tile-stride", "48x48")
MOST_STEPS = 200
LEAVE_SECONDS = 1.0
STALL_SECONDS = 6
DISK_MIB = 16
SPARE_BYTES = 8192
PATIENCE = 120.0


@dataclasses.dataclass(slots=True)
class Stand:
    """A server with ranks, and what it makes while all is well."""

    model: Path
    folder: Path
    storage: Path
    ranks: int
    server: Server
    right: bytes = b""

    def restart(self) -> None:
        """Start a server on the same folder of clips."""
        self.folder = Path(tempfile.mkdtemp(dir=self.folder.parent))
        self.server = start(self.model, self.folder, self.storage, self.ranks)

    def in_stage(self, stage: str, **fields: Any) -> str:
        """A job that is in ``stage``."""
        job = self.server.submit(**LONG, **fields)
        self.server.wait_for_stage(job, stage)
        return job

    def outcome(self, job: str) -> str:
        """How a job ended, as a client hears of it."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            answer = self.server.http.get(f"/v1/videos/{job}")
            if answer.status_code != 200:
                return f"{answer.status_code} {answer.json()['error']['code']}"
            body = answer.json()
            if body["status"] == "failed":
                return f"job failed, {body['error']['code']}"
            if body["status"] == "completed":
                return "job completed"
            time.sleep(0.02)
        return "nothing"


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        name: What happens.
        expected: What a client is to see.
        provoke: Makes it happen; returns the moment of it and what the client saw.
    """

    name: str
    expected: str
    provoke: Callable[[Stand], tuple[float, str]]


class NotPossible(Exception):
    """This machine does not let the fault happen; says why."""


def killed(stage: str, rank: int) -> Callable[[Stand], tuple[float, str]]:
    def provoke(stand: Stand) -> tuple[float, str]:
        job = stand.in_stage(stage)
        at = time.monotonic()
        os.kill(stand.server.ranks()[rank], signal.SIGKILL)
        return at, stand.outcome(job)

    return provoke


def stopped(stand: Stand) -> tuple[float, str]:
    job = stand.in_stage("decode")
    at = time.monotonic()
    os.kill(stand.server.ranks()[-1], signal.SIGSTOP)
    return at, stand.outcome(job)


def without_memory(stand: Stand) -> tuple[float, str]:
    """The address space of one rank ends where it is now."""
    job = stand.in_stage("denoise")
    pid = stand.server.ranks()[-1]
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    before = resource.prlimit(pid, resource.RLIMIT_AS)
    at = time.monotonic()
    resource.prlimit(pid, resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE"), before[1]))
    try:
        return at, stand.outcome(job)
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_AS, before)


def not_a_number(stand: Stand) -> tuple[float, str]:
    """The second expert of the checkpoint is spoilt; no other request asks for it."""
    at = time.monotonic()
    return at, stand.outcome(stand.server.submit(**CLIP | {"boundary_ratio": 1.0}))


def without_disk(stand: Stand) -> tuple[float, str]:
    if not stand.storage.is_mount():
        raise NotPossible("mounting a file system is not allowed here")
    theirs = stand.storage / "theirs"
    job = stand.in_stage("denoise")
    at = time.monotonic()
    disk = os.statvfs(stand.storage)
    theirs.write_bytes(bytes(max(0, disk.f_bavail * disk.f_bsize - SPARE_BYTES)))
    try:
        return at, stand.outcome(job)
    finally:
        theirs.unlink()


def deleted(stand: Stand) -> tuple[float, str]:
    job = stand.in_stage("decode")
    at = time.monotonic()
    answer = stand.server.http.delete(f"/v1/videos/{job}")
    assert answer.json()["deleted"] is True, answer.text
    return at, stand.outcome(job)


def left(stand: Stand) -> tuple[float, str]:
    """A client of /v1/videos/sync closes its connection."""
    before = cancelled(stand)
    with contextlib.suppress(httpx.ReadTimeout):
        asked = LONG | {"num_inference_steps": MOST_STEPS}
        httpx.post(f"{stand.server.url}/v1/videos/sync", json=asked, timeout=LEAVE_SECONDS)
    at = time.monotonic()
    while cancelled(stand) == before:
        if time.monotonic() > at + PATIENCE:
            return at, "nobody is there; the job goes on"
        time.sleep(0.02)
    return at, "nobody is there; the job is cancelled"


def cancelled(stand: Stand) -> float:
    """How many jobs of the server were cancelled so far."""
    metrics = text_string_to_metric_families(stand.server.http.get("/metrics").text)
    samples = (sample for metric in metrics for sample in metric.samples)
    ended = [s for s in samples if s.name == "vllm_omni_vae_jobs_finished_total" and s.labels["state"] == "cancelled"]
    return sum(sample.value for sample in ended)


def slow(stand: Stand) -> tuple[float, str]:
    """A client begins to download and reads no further, while another asks for a clip."""
    job = stand.server.generate(**CLIP).id
    with stand.server.http.stream("GET", f"/v1/videos/{job}/content") as response:
        at = time.monotonic()
        seen = stand.outcome(stand.server.submit(**CLIP))
        whole = response.read()
    return at, f"{seen}; the slow one: {'whole file' if whole == stand.right else 'other bytes'}"


def malformed(stand: Stand) -> tuple[float, str]:
    """Two requests that cannot be, while a third runs."""
    job = stand.in_stage("denoise")
    at = time.monotonic()
    size = stand.server.http.post("/v1/videos", json=CLIP | {"size": "143x144"})
    json_text = stand.server.http.post(
        "/v1/videos", content=b'{"prompt": ', headers={"Content-Type": "application/json"}
    )
    return at, f"{size.status_code} and {json_text.status_code}; the other: {stand.outcome(job)}"


def server_killed(stand: Stand) -> tuple[float, str]:
    """kill -9 of the whole server, with one job running and one waiting; another server takes its folder."""
    running = stand.in_stage("decode")
    waiting = stand.server.submit(**CLIP)
    at = time.monotonic()
    stand.server.close()
    stand.restart()
    stand.server.wait_until_healthy()
    first, second = stand.outcome(running), stand.outcome(waiting)
    same = stand.server.content(waiting) == stand.right if second == "job completed" else False
    return at, f"{first}; the one that waited: {second}, {'right' if same else 'wrong'}"


FAULTS = (
    Fault("first rank: kill -9 while denoising", "job failed, worker_died", killed("denoise", 0)),
    Fault("last rank: kill -9 in decode", "job failed, worker_died", killed("decode", -1)),
    Fault("last rank: SIGSTOP in decode", "job failed, worker_stalled", stopped),
    Fault("last rank: no more memory in decode", "job failed, out_of_memory", without_memory),
    Fault("latents that are not numbers", "job failed, invalid_output", not_a_number),
    Fault("disk full", "job failed, storage_full", without_disk),
    Fault("DELETE in decode", "404 video_not_found", deleted),
    Fault("client leaves", "nobody is there; the job is cancelled", left),
    Fault("client stops reading", "job completed; the slow one: whole file", slow),
    Fault("malformed requests beside a job", "422 and 400; the other: job completed", malformed),
    Fault(
        "server: kill -9, then started again",
        "job failed, server_restarted; the one that waited: job completed, right",
        server_killed,
    ),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """What came of a fault.

    Attributes:
        heard_s: Seconds from the fault until the client knew.
        right_s: Seconds from the fault until the next clip was there.
        held: Whether the client saw what it should, the clip was right and every rank there.
        left_out: Why it was not run, if it was not.
    """

    fault: str
    ranks: int
    expected: str
    seen: str = ""
    heard_s: float = 0.0
    right_s: float = 0.0
    held: bool = True
    left_out: str = ""


def start(model: Path, folder: Path, storage: Path, ranks: int) -> Server:
    flags = ("--vae-patch-parallel-size", str(ranks), *TILES, "--worker-timeout", str(STALL_SECONDS))
    kept = ("--media-storage-path", str(storage))
    environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return Server(("vllm-omni-vae", "serve", str(model), *flags, *kept), folder, environment=environment)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of its own at ``folder``, if that is allowed."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


def spoilt(folder: Path) -> Path:
    """A checkpoint of which the second expert makes no numbers."""
    model = tiny.build(FAMILY, folder)
    spoil(model / "transformer_2" / "diffusion_pytorch_model.safetensors", "proj_out.bias", float("nan"))
    return model


def run(ranks: int, names: list[str], folder: Path) -> Iterator[Row]:
    """One server with ``ranks``, and its faults one after the other."""
    model, storage = spoilt(folder / "model"), folder / "clips"
    storage.mkdir()
    with small_disk(storage):
        (first := folder / "server").mkdir()
        stand = Stand(model, first, storage, ranks, start(model, first, storage, ranks))
        try:
            stand.server.wait_until_healthy()
            stand.right = stand.server.clip(**CLIP)
            for fault in FAULTS:
                if not names or any(name in fault.name for name in names):
                    yield tried(fault, stand)
            assert stand.server.stop() == 0, stand.server.log
        finally:
            stand.server.close()


def tried(fault: Fault, stand: Stand) -> Row:
    """Let ``fault`` happen, and ask for a clip."""
    row = Row(fault.name, stand.ranks, fault.expected)
    try:
        at, seen = fault.provoke(stand)
    except NotPossible as reason:
        return dataclasses.replace(row, left_out=str(reason))
    heard = time.monotonic()
    clip = stand.server.clip(**CLIP)
    right = time.monotonic()
    held = seen == fault.expected and clip == stand.right and len(stand.server.ranks()) == stand.ranks
    return dataclasses.replace(row, seen=seen, heard_s=heard - at, right_s=right - at, held=held)


def table(rows: list[Row]) -> str:
    """A Markdown table of ``rows``."""
    head = ("fault", "ranks", "what the client sees", "s until it knows", "s until the next clip is there")
    lines = [head, ("---",) * len(head)]
    for row in rows:
        seen, times = row.seen, (f"{row.heard_s:.1f}", f"{row.right_s:.1f}")
        if row.left_out:
            seen, times = f"not run: {row.left_out}", ("", "")
        elif not row.held:
            seen = f"**{row.seen}**; it should be: {row.expected}, then the right clip from {row.ranks} ranks"
        lines.append((row.fault, str(row.ranks), seen, *times))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def arguments() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3], help="ranks of one server after another")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="only the faults whose name has TEXT")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every row there")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="vllm-omni-vae-faults-") as folder:
        for ranks in args.ranks:
            (own := Path(folder) / str(ranks)).mkdir()
            for row in run(ranks, args.only, own):
                print(f"{ranks} ranks, {row.fault}: {row.seen or row.left_out}", file=sys.stderr, flush=True)
                rows.append(row)
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=2) + "\n")
    return 0 if rows and all(row.held for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
