# SPDX-License-Identifier: Apache-2.0
"""The steps ``verify`` and ``bench``: what the commands of these names measure, on processes that stay."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence

from vllm_omni_vae.cli import bench, verify
from vllm_omni_vae.cli.blank import FAMILY_PATH, Found
from vllm_omni_vae.cli.measuring import Measurement, Request, measured, plan_request
from vllm_omni_vae.config import VaeConfig
from vllm_omni_vae.distributed import is_out_of_memory
from vllm_omni_vae.errors import EngineError, VaeParallelError
from vllm_omni_vae.measure.messages import Job, Progress, RankSeen
from vllm_omni_vae.measure.processes import Ranks

from .clock import Clock, OutOfTime
from .families import NARROW_FRAMES, SIZES, config_of
from .results import Results, Status, Step

_BOTH_MERGES = ("--tile-merge", "blend", "sum")
_GUESSES = {"verify": 40.0, "bench": 60.0}


class Processes:
    """Rank processes that take one job after the other; new ones after a failure, and for another number of ranks."""

    def __init__(self) -> None:
        self._size = 0
        self._open = contextlib.ExitStack()

    def run(self, job: Job, clock: Clock) -> list[RankSeen]:
        """Run ``job`` before the time is over.

        Raises:
            EngineError: a rank failed.
            OutOfTime: it was given up.
        """
        if self._size != job.ranks:
            self.close()
            self._ranks = self._open.enter_context(Ranks(job.ranks))
            self._size = job.ranks

        def watch(_: Progress) -> None:
            clock.check()

        try:
            return self._ranks.run(dataclasses.replace(job, timeout=max(1.0, clock.left)), watch)
        except BaseException as error:
            self._size = 0
            self._open.__exit__(type(error), error, error.__traceback__)
            clock.check()
            raise

    def close(self) -> None:
        """End them."""
        self._size = 0
        self._open.close()


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One autoencoder to be verified or timed.

    Attributes:
        kind: ``verify`` or ``bench``.
        family: Which, by its name.
        dtype: Of weights and input.
        ranks: How many share the work.
        narrow: Whether it is the small one of the same structure, on a small input.
        repeats: Rounds that are timed.
    """

    kind: str
    family: str
    dtype: str
    ranks: int
    narrow: bool
    repeats: int

    @property
    def name(self) -> str:
        """What a reader of the results calls it."""
        return f"{self.family}{' (narrow)' * self.narrow}, {self.dtype}, {self.ranks} ranks"

    def request(self) -> Request:
        """What the command would measure."""
        config = config_of(self.family, narrow=self.narrow)
        found = Found(FAMILY_PATH, config["_class_name"], True, config, None)
        if self.kind == "verify" or self.narrow:
            flags = ("--vae-patch-parallel-size", str(self.ranks), "--repeats", "1", "--warmup", "0")
            frames = ("--frames", str(NARROW_FRAMES.get(found.kind, 1))) if self.narrow else ()
            small = verify.request_of(found, _parse("verify", self, (*flags, *frames)), VaeConfig())
            if self.kind == "verify":
                return small
            job = small.job
            size, tiles = small.size, VaeConfig(vae_tile_size=job.tile_size, vae_tile_stride=job.tile_stride)
        else:
            size, tiles = SIZES[self.family], VaeConfig()
        named = zip(("--frames", "--height", "--width"), map(str, size), strict=True)
        flags = ("--ranks", str(self.ranks), "--warmup", "1", "--repeats", str(self.repeats))
        args = _parse("bench", self, (*flags, *(word for pair in named for word in pair)))
        return plan_request(found, args, size, tiles, timing=True)


def _parse(command: str, case: Case, flags: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    for one in (verify, bench):
        one.add_parser(commands)
    return parser.parse_args([command, case.family, "--dtype", case.dtype, *_BOTH_MERGES, *flags])


def run_cases(cases: Sequence[Case], results: Results, clock: Clock, processes: Processes, reserve: float) -> None:
    """Run each while there is time for it; what does not fit into the memory is run narrow.

    Args:
        cases: In this order.
        results: Told of each.
        clock, processes: The run's.
        reserve: Seconds that later steps need.
    """
    for case in cases:
        step = _run(case, clock, processes, reserve)
        results.add(step)
        if step.status is Status.TOO_LARGE:
            results.add(_run(dataclasses.replace(case, narrow=True), clock, processes, reserve))


def _run(case: Case, clock: Clock, processes: Processes, reserve: float) -> Step:
    alike = f"{case.kind} {case.ranks} {case.narrow}"
    lack = clock.lacks(alike, _GUESSES[case.kind] * (0.25 if case.narrow else 1.0), reserve)
    if lack:
        return Step(case.kind, case.name, Status.LEFT_OUT, lack)
    begun = time.monotonic()
    try:
        request = case.request()
        made = measured(request, processes.run(request.job, clock))
    except OutOfTime as error:
        return Step(case.kind, case.name, Status.LEFT_OUT, f"given up: {error}", time.monotonic() - begun)
    except VaeParallelError as error:
        too_large = isinstance(error, EngineError) and is_out_of_memory(RuntimeError(str(error))) and not case.narrow
        status = Status.TOO_LARGE if too_large else Status.FAILED
        return Step(case.kind, case.name, status, str(error), time.monotonic() - begun)
    seconds = time.monotonic() - begun
    clock.learn(alike, seconds)
    weights = "narrow" if case.narrow else "full size"
    result = {"family": case.family, "weights": weights, **made.to_json(), "broken": list(_broken(made))}
    status = Status.BROKEN if made.broken else Status.DONE
    return Step(case.kind, case.name, status, "; ".join(result["broken"]), seconds, result)


def _broken(made: Measurement) -> Iterator[str]:
    for promise in made.broken:
        yield promise.removeprefix(f"{FAMILY_PATH}: ")


def quiet() -> None:
    """Keep diffusers' advice out of a run's output."""
    import logging

    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
