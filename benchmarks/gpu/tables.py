# SPDX-License-Identifier: Apache-2.0
"""The results of a run as a page, which documentation may quote."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

_MIB = 2**20
_MB = 10**6


def markdown(told: dict[str, Any]) -> str:
    """The page of what ``results.json`` holds."""
    return "\n".join(_lines(told)) + "\n"


def _lines(told: dict[str, Any]) -> Iterator[str]:
    machine = told["machine"]
    cards = [f"{card['name']} ({card['memory_bytes'] / 2**30:.0f} GiB)" for card in machine["cards"]]
    yield f"# Run of {told['begun']}"
    yield ""
    versions = [f"{name} {machine[name]}" for name in ("torch", "cuda", "hip", "cudnn", "nccl") if machine[name]]
    yield f"{', '.join(cards) or 'no card'}; {machine['cpus']} CPUs; {', '.join((*versions, *machine['driver']))}; "
    yield f"commit {machine['commit']}{' with changes' if machine['uncommitted_changes'] else ''}."
    state = "whole" if told["complete"] else "cut off"
    yield f"The run is {state}: {told['spent_s']} s of {told['asked']['budget']} s."
    for kind, title, rows in (
        ("verify", "Promises", _promises),
        ("bench", "Time and memory", _times),
        ("serve", "Over HTTP", _served),
        ("tests", "Tests", _tests),
    ):
        steps = [step for step in told["steps"] if step["kind"] == kind]
        table = [row for step in steps if step["result"] for row in rows(step)]
        if table:
            yield from ("", f"## {title}", "", *_table(_HEADS[kind], table))
    rest = [(f"{s['kind']}: {s['name']}", s["status"], s["reason"]) for s in told["steps"] if s["status"] != "done"]
    if rest:
        yield from ("", "## Not well, or not run", "", *_table(("step", "status", "why"), rest))


_HEADS = {
    "verify": ("family", "weights", "type", "ranks", "messages by", "operation", "strategy", "error", "limit", ""),
    "bench": (
        *("family", "weights", "type", "ranks", "messages by", "operation", "strategy", "s [P10 - P90]", "speed"),
        *("peak MiB", "messages", "MB"),
    ),
    "serve": ("checkpoint", "ranks", "max difference", "exit code", "left processes"),
    "tests": ("selection", "exit code", "summary"),
}


def _about(step: dict[str, Any]) -> tuple[Any, ...]:
    made = step["result"]
    return made["family"], made["weights"], made["dtype"], made["ranks"], made["backend"]


def _arms(step: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for operation, made in step["result"]["operations"].items():
        for name, arm in made["arms"].items():
            yield operation, name, arm


def _promises(step: dict[str, Any]) -> Iterator[Sequence[Any]]:
    for operation, name, arm in _arms(step):
        found = arm["comparison"]
        if found is not None and found["promise"] is not None:
            yield *_about(step), operation, name, f"{found['error']:.2g}", f"{found['limit']:.2g}", found["promise"]


def _times(step: dict[str, Any]) -> Iterator[Sequence[Any]]:
    for operation, name, arm in _arms(step):
        wall = arm["wall_s"]
        seconds = f"{wall['median']:.4f} [{wall['p10']:.4f} - {wall['p90']:.4f}]"
        peak = f"{max(arm['peak_bytes']) / _MIB:.0f}"
        sent = sum(arm["bytes"]) + sum(arm["reduced_bytes"]) + sum(arm["broadcast_bytes"])
        speed = f"{arm['speed']:.2f}x"
        yield *_about(step), operation, name, seconds, speed, peak, sum(arm["messages"]), f"{sent / _MB:.2f}"


def _served(step: dict[str, Any]) -> Iterator[Sequence[Any]]:
    made = step["result"]
    yield made["checkpoint"], made["ranks"], made["max_difference"], made["exit_codes"], made["left_processes"]


def _tests(step: dict[str, Any]) -> Iterator[Sequence[Any]]:
    made = step["result"]
    yield f"`{made['selection']}`", made["exit_code"], made["summary"]


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *rows):
        yield "| " + " | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in row) + " |"
