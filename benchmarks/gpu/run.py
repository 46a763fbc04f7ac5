# SPDX-License-Identifier: Apache-2.0
"""Check and time everything on the accelerators of this machine, in a given time, and write it down.

    python benchmarks/gpu/run.py --out results/

For every family of VAE: whether ranks make what one rank makes, in every strategy and for encode and decode; a clip
over HTTP on several ranks and on one; times, memory and messages against one rank; and the tests that ask for this
hardware. With fewer cards than ranks, ranks share a card and talk through the memory of the CPU.

``results.json`` and ``results.md`` in the folder hold what is known so far, after every step. The exit code is 1 when
something is not as promised or a step failed, and 2 when nothing can be run as asked. Else it is 0, also when time was
too short for some steps; these are named.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

STEPS = ("verify", "serve", "bench", "tests")
BUDGET = 570.0
HIDDEN = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_RANKS = (2, 4, 8)
_SERVE_S, _END_S = 90.0, 10.0


def main(words: Sequence[str] | None = None) -> int:
    """Run all steps for which there is time; returns the exit code."""
    args = arguments(words)
    if args.device == "cpu":
        os.environ |= dict.fromkeys(HIDDEN, "")
    from benchmarks.gpu.clock import Clock
    from benchmarks.gpu.families import families
    from benchmarks.gpu.machine import describe_machine
    from benchmarks.gpu.results import Results, Status

    clock = Clock(args.budget)
    machine = describe_machine()
    why = _refusal(args, machine, families())
    if why:
        print(f"error: {why}", file=sys.stderr)
        return 2
    asked: dict[str, Any] = {name: value for name, value in vars(args).items() if name != "out"}
    results = Results(args.out, clock, machine, asked)
    _run(args, machine, results, clock)
    results.finish()
    wrong = [*results.having(Status.BROKEN), *results.having(Status.FAILED)]
    print(f"{len(results.steps)} steps in {clock.spent:.0f} s; {args.out / 'results.md'}")
    for step in wrong:
        print(f"{step.status}: {step.kind}: {step.name}: {step.reason}", file=sys.stderr)
    return 1 if wrong else 0


def _refusal(args: argparse.Namespace, machine: dict[str, Any], known: Sequence[str]) -> str | None:
    """Why nothing can be run as asked, if so."""
    if args.device == "cuda" and not machine["cards"]:
        return "there is no accelerator that torch can use; --device cpu runs narrow VAEs on the CPU"
    unknown = [name for name in args.families or () if name not in known]
    if unknown:
        return f"--families {' '.join(unknown)} is not known; choose from {', '.join(known)}"
    few = [count for count in args.ranks or () if count < 2]
    return f"--ranks {few[0]}: one rank has nobody to share with; give at least 2" if few else None


def _run(args: argparse.Namespace, machine: dict[str, Any], results: Any, clock: Any) -> None:
    from benchmarks.gpu import selection, serving, vae
    from benchmarks.gpu.families import families

    vae.quiet()
    processes = vae.Processes()
    cards = len(machine["cards"])
    ranks = args.ranks or [count for count in _RANKS if count <= max(2, cards)]
    kept = (_SERVE_S if "serve" in args.steps and cards else 0.0) + _END_S
    with tempfile.TemporaryDirectory(prefix="vllm-omni-vae-") as folder:
        try:
            for step, dtype, count in _plan(args.steps, ranks, on_card=bool(cards)):
                if step == "serve":
                    processes.close()
                    results.add(serving.serve(Path(folder), count, clock, _END_S))
                    kept = _END_S
                elif step == "tests":
                    processes.close()
                    results.add(selection.run_tests(machine, clock))
                else:
                    cases = [
                        vae.Case(step, family, dtype, count, narrow=not cards, repeats=5 if cards else 2)
                        for family in args.families or families()
                    ]
                    vae.run_cases(cases, results, clock, processes, kept)
        finally:
            processes.close()


def _plan(steps: Sequence[str], ranks: Sequence[int], *, on_card: bool) -> Iterator[tuple[str, str, int]]:
    """Steps in the order of their worth, each with the type and the number of ranks."""
    first, *more = ranks
    usual, others = ("bfloat16", ("float16", "float32")) if on_card else ("float32", ())
    plan = [
        *((step, usual, first) for step in STEPS),
        *itertools.product(("verify", "bench"), (usual,), more),
        *(("verify", dtype, first) for dtype in others),
        *itertools.product(("verify",), others, more),
    ]
    return ((step, dtype, count) for step, dtype, count in plan if step in steps)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line asks for, or ``words`` in its place."""
    parser = argparse.ArgumentParser(description="Check and time everything on the accelerators of this machine.")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="Where the results are written.")
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cuda: the accelerators that torch finds, also AMD's. cpu: narrow VAEs on processes. Default: cuda.",
    )
    parser.add_argument(
        "--budget", type=float, default=BUDGET, metavar="SECONDS", help=f"For everything. Default: {BUDGET:g}."
    )
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), help="Default: all.")
    parser.add_argument("--families", nargs="+", metavar="NAME", help="Default: all.")
    parser.add_argument(
        "--ranks", nargs="+", type=int, metavar="N", help="Default: 2, and 4 and 8 where there are as many cards."
    )
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # as `python -m` would have it
    sys.exit(main())
