# SPDX-License-Identifier: Apache-2.0
"""Make one real clip with two VAE ranks through stock ``vllm serve``, and the same with one rank, and compare them.

A tiny Wan 2.2 image-to-video checkpoint with random weights is built on the spot, so the clip shows that everything
works and not what a trained model would draw. Nothing is downloaded: the photograph comes with matplotlib.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import matplotlib
import numpy as np
import openai

from vllm_omni_vae import tiny

FAMILY = "wan2.2-i2v"
PROMPT = "the admiral turns to the camera and smiles"
SIZE: Any = "320x384"  # the client's types know four sizes; the model makes any multiple of 16
FIELDS = {"num_frames": 17, "fps": 16, "num_inference_steps": 4, "seed": 7}
START_SECONDS = 300.0
BIN = Path(sys.executable).parent
PHOTO = Path(matplotlib.get_data_path(), "sample_data", "grace_hopper.jpg")


@contextlib.contextmanager
def server(command: list[str], log: Path) -> Iterator[str]:
    """Run a server until the block ends; yields its address once it is healthy."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*command, "--host", "127.0.0.1", "--port", str(port)]
    print("$", " ".join(command).replace(str(BIN) + "/", ""), flush=True)
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | quiet)
    try:
        wait_healthy(process, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def wait_healthy(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    """Return when ``/health`` answers 200; stop the program with the server's own words if it ended."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            words = log.read_text(errors="replace")[-3000:]
            sys.exit(f"the server ended with exit code {process.returncode}:\n{words}")
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(address + "/health", timeout=5)
            return
        time.sleep(0.2)
    sys.exit(f"the server was not healthy after {START_SECONDS:.0f} s; see {log}")


def make(address: str, path: Path) -> Any:
    """Ask for the clip as a user would, wait for it and save it to ``path``; returns the finished job."""
    client = openai.OpenAI(base_url=address + "/v1", api_key="none", max_retries=0)
    job = client.videos.create_and_poll(
        prompt=PROMPT, size=SIZE, input_reference=PHOTO, extra_body=FIELDS, poll_interval_ms=100
    )
    if job.status != "completed":
        sys.exit(f"the job failed: {job.error}")
    client.videos.download_content(job.id).write_to_file(path)
    return job


def frames(path: Path) -> np.ndarray:
    """Every frame of a video, ``(T, H, W, 3)`` uint8."""
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def main() -> None:
    """Run the two servers one after the other and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for the results")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore", "The Sora API", DeprecationWarning)

    checkpoint = tiny.build(FAMILY, out / FAMILY)
    print(f"tiny {FAMILY} checkpoint: {checkpoint}\nreference: {PHOTO}\n")
    tiled = ["--vae-use-tiling", "--vae-parallel-mode", "tile"]
    two = [str(BIN / "vllm"), "serve", str(checkpoint), "--vae-patch-parallel-size", "2", *tiled]
    one = [str(BIN / "vllm-omni-vae"), "serve", str(checkpoint), "--vae-patch-parallel-size", "1", *tiled]
    with server(two, out / "two_ranks.log") as address:
        job = make(address, out / "two_ranks.mp4")
    with server(one, out / "one_rank.log") as address:
        alone = make(address, out / "one_rank.mp4")

    clip, reference = frames(out / "two_ranks.mp4"), frames(out / "one_rank.mp4")
    count, height, width, _ = clip.shape
    print(f"\nvideo: {(out / 'two_ranks.mp4').resolve()}")
    print(f"       {width}x{height}, {count} frames, {count / FIELDS['fps']:.2f} s at {FIELDS['fps']} fps")
    for decision in job.vae:
        grid = "x".join(map(str, decision["grid"]))
        share = decision["tiles_per_rank"]
        print(f"       {decision['operation']}: {decision['strategy']} {grid}, tiles per rank {share}")
    print(f"\n{'stage':10}{'two ranks':>12}{'one rank':>12}")
    for stage, seconds in job.stage_durations.items():
        print(f"{stage:10}{seconds:10.2f} s{alone.stage_durations[stage]:10.2f} s")
    if clip.shape != reference.shape:
        sys.exit(f"one rank made {reference.shape}, two made {clip.shape}")
    difference = int(np.abs(clip.astype(int) - reference).max())
    print(f"\nmax difference to one rank: {difference}")
    if difference or any(len(d["tiles_per_rank"]) != 2 or d["strategy"] != "tile" for d in job.vae):
        sys.exit("two ranks should have shared the tiles and given the same pixels")


if __name__ == "__main__":
    main()
