# SPDX-License-Identifier: Apache-2.0
"""What was started, as a table for a person."""

from __future__ import annotations

from collections.abc import Sequence

from .lifecycle import ServingEngine

_COLUMNS = ("component", "class", "parallel", "strategy, or why it is off", "self-test")


def startup_table(engine: ServingEngine) -> str:
    """Return the pipeline, ranks, device and dtype of a started engine, and a line for each of its autoencoders.

    Replicas are told where there are several; the autoencoders are those of one.
    """
    parallel = engine.config.parallel
    replicas = f"{parallel.data_parallel_size} replicas of " if parallel.data_parallel_size > 1 else ""
    ranks = f"{replicas}{parallel.world_size} rank(s)"
    title = f"{engine.card.pipeline_class} on {ranks}, {engine.device}, {engine.dtype}"
    rows = [(one.path, one.kind, "on" if one.parallel else "off", one.detail, one.selftest) for one in engine.report]
    return f"{title}\n{_align([_COLUMNS, *rows])}"


def _align(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows = [rows[0], ["-" * width for width in widths], *rows[1:]]
    padded = ((cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join("  ".join(row).rstrip() for row in padded)
