# SPDX-License-Identifier: Apache-2.0
"""The step ``serve``: one clip over HTTP, made on several VAE ranks and on one."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from .clock import Clock
from .results import Status, Step

CHECKPOINT = "wan2.2-ti2v-5b"
_TILES = ("--vae-tile-size", "64x64", "--vae-tile-stride", "48x48")
_ASKED = {"prompt": "a boat leaves the harbour", "num_inference_steps": 2, "num_frames": 9, "fps": 8, "seed": 11}
_SIZE = {"size": "160x128"}
_GUESS = 90.0


def serve(folder: Path, ranks: int, clock: Clock, reserve: float) -> Step:
    """Serve a tiny checkpoint with ``ranks`` VAE ranks and with one, ask each for a clip, and compare the pixels.

    The clip is made twice on one rank: if these two differ, nothing can be said of the others. Both servers must end
    by SIGTERM with code 0 and leave no process.

    Args:
        folder: For the checkpoint, the logs and the clips.
        ranks: How many share the work.
        clock, reserve: The run's time, and seconds of it that later steps need.
    """
    name = f"tiny {CHECKPOINT}, {ranks} ranks and 1"
    lack = clock.lacks("serve", _GUESS, reserve)
    if lack:
        return Step("serve", name, Status.LEFT_OUT, lack)
    begun = time.monotonic()
    result: dict[str, Any] = {"checkpoint": CHECKPOINT, "ranks": ranks}
    try:
        status, reason = _compare(folder, ranks, clock, result)
    except ModuleNotFoundError as error:
        return Step("serve", name, Status.LEFT_OUT, f"{error}; install the extra dev")
    except Exception as error:  # of the server, its client or the video file: whichever it is, the run goes on
        return Step("serve", name, Status.FAILED, f"{type(error).__name__}: {error}", time.monotonic() - begun)
    return Step("serve", name, status, reason, time.monotonic() - begun, result)


def _compare(folder: Path, ranks: int, clock: Clock, result: dict[str, Any]) -> tuple[Status, str]:
    from tests.e2e.media import max_difference, read_clip
    from vllm_omni_vae import tiny

    model = str(tiny.build(CHECKPOINT, folder / CHECKPOINT))
    shared, jobs, code = _make(folder / "several", ranks, 1, model, clock)
    alone, _, code_alone = _make(folder / "one", 1, 2, model, clock)
    once, again, several = (read_clip(file).pixels for file in (*alone, *shared))
    result |= {
        "max_difference": max_difference(several, once),
        "max_difference_of_one_rank_to_itself": max_difference(once, again),
        "vae": jobs[0].vae,
        "stage_durations": jobs[0].stage_durations,
        "exit_codes": [code, code_alone],
        "left_processes": 0,
    }
    ran = {(one["strategy"], len(one["tiles_per_rank"])) for one in jobs[0].vae}
    if ran != {("tile", ranks)}:
        return Status.FAILED, f"not what was to be compared: {jobs[0].vae}"
    if result["max_difference_of_one_rank_to_itself"]:
        return Status.FAILED, "one rank does not make the same clip twice here, so nothing can be compared"
    if result["max_difference"]:
        return Status.BROKEN, f"pixels differ by up to {result['max_difference']} from those of one rank"
    if [code, code_alone] != [0, 0]:
        return Status.BROKEN, f"the servers ended with {[code, code_alone]}"
    return Status.DONE, ""


def _make(folder: Path, ranks: int, clips: int, model: str, clock: Clock) -> tuple[list[bytes], list[Any], int]:
    """Files and jobs of as many clips, and how the server ended."""
    from tests.helpers.server import Server

    seconds = str(max(1, int(clock.left)))
    shared = ("--vae-use-tiling", "--vae-patch-parallel-size", str(ranks), *_TILES, "--job-timeout", seconds)
    folder.mkdir(parents=True, exist_ok=True)
    server = Server(["vllm-omni-vae", "serve", model, *shared], folder, patience=max(1.0, clock.left))
    with contextlib.closing(server):
        server.wait_until_healthy()
        jobs = [server.generate(**_ASKED, **_SIZE) for _ in range(clips)]
        return [server.content(job.id) for job in jobs], jobs, server.stop()
