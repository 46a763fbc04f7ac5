# SPDX-License-Identifier: Apache-2.0
"""Measurements as tables for a person."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..measure.messages import Difference
from ..measure.result import ArmResult, OperationResult
from ..measure.statistics import Spread
from .bars import Bar, draw_bars
from .measuring import Measurement
from .table import align

_BENCH_COLUMNS = (
    "",
    "s [P10 - P90]",
    "CPU s",
    "speed",
    "peak MiB",
    "messages",
    "MB",
    "max diff to un-tiled",
)
_BENCH_LEGEND = """\
s         seconds until the last rank is done: the median, and between which four fifths of the repeats lie
CPU s     seconds of computing on the rank that computes most, median
speed     against un-tiled on one rank, by s
peak MiB  most bytes at one time, from the input on, on the rank that holds most: {memory}; not in it: weights
messages  that all ranks together send in one run, and their MB (10^6 bytes), results that are sent to all and sums
          that ranks bring to a reduction included
without messages: the same with nothing sent, which is as fast as sending could make it; its pixels have no meaning"""
_MEMORY = {True: "of tensors", False: "of the allocator"}


def head(measured: Measurement, model: str) -> str:
    """What was measured, and on what."""
    request, job = measured.request, measured.request.job
    frames, height, width = request.size
    clip = f"{frames} frame{'s' * (frames > 1)} of {height}x{width}"
    threads = f"{measured.threads} thread{'s' * (measured.threads > 1)}"
    return (
        f"{model}: {request.found.kind}, {clip} on {job.ranks} ranks of {threads} each "
        f"({measured.device.partition(':')[0]}, {measured.backend}), {job.dtype}\n"
        f"{job.repeats} repeat{'s' * (job.repeats > 1)} after {job.warmup} of warm-up"
    )


def bench_text(measured: Measurement, model: str) -> str:
    """Tables and bars."""
    return "\n\n".join(_bench_sections(measured, model))


def _bench_sections(measured: Measurement, model: str) -> Iterator[str]:
    yield head(measured, model)
    for operation in measured.operations:
        table = [_BENCH_COLUMNS, *(_bench_cells(one, operation.untiled) for one in operation.arms)]
        yield "\n".join([shapes(operation), "", *align(table), *_left_out(operation)])
        yield "\n".join(_memory_lines(measured, operation))
        yield "\n".join([f"{operation.operation}: s, the line ends at P90", *draw_bars(bars(operation))])
    yield _BENCH_LEGEND.format(memory=_MEMORY[measured.device == "cpu"])


def shapes(operation: OperationResult) -> str:
    """What goes in and what comes out."""
    given, made = ("x".join(map(str, shape)) for shape in (operation.shape, operation.made))
    return f"{operation.operation}: {given} to {made}; {operation.auto}"


def bars(operation: OperationResult) -> list[Bar]:
    """Seconds of every arm."""
    return [Bar(one.arm.title, one.wall_s) for one in operation.arms]


def _memory_lines(measured: Measurement, operation: OperationResult) -> list[str]:
    ranks = range(measured.request.job.ranks)
    table = [("", *(title for rank in ranks for title in (f"rank {rank}", "on top")))]
    weights = measured.weight_bytes
    for one in operation.arms:
        pairs = zip(one.peak_bytes, one.incremental_peak_bytes, strict=True)
        cells = [("", "") if not peak else (_mib(weights + peak), f"+{_mib(more)}") for peak, more in pairs]
        table.append((one.arm.title, *(cell for pair in cells for cell in pair)))
    return [
        f"{operation.operation}: MiB of each rank at its peak, {_mib(weights)} of weights and the input included, and "
        "what comes on top of both",
        "",
        *align(table),
    ]


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f}"


def _left_out(operation: OperationResult) -> list[str]:
    return [f"{mode}  not run: {why}" for mode, why in operation.left_out.items()]


def _bench_cells(one: ArmResult, untiled: ArmResult) -> tuple[str, ...]:
    sent = sum(one.bytes) + sum(one.broadcast_bytes) * (len(one.bytes) - 1) + sum(one.reduced_bytes)
    quiet = not sent
    return (
        one.arm.title,
        seconds(one.wall_s),
        f"{one.cpu_s.median:.3f}",
        f"{untiled.wall_s.median / one.wall_s.median:.2f}x",
        f"{max(one.peak_bytes) / 2**20:.1f}",
        "" if quiet else str(sum(one.messages)),
        "" if quiet else f"{sent / 1e6:.2f}",
        "" if one.comparison is None else number(one.comparison.to_untiled.max),
    )


def seconds(spread: Spread) -> str:
    """Median and percentiles."""
    return f"{spread.median:.3f} [{spread.p10:.3f} - {spread.p90:.3f}]"


def number(value: float) -> str:
    """Three digits; nothing but 0 reads as 0."""
    return f"{value:.3g}" if value else "0"


_VERIFY_COLUMNS = (
    "",
    "to un-tiled: max, mean",
    "to tiles: max, mean",
    "promise",
    "s [P10 - P90]",
    "peak MiB of each rank",
)
_VERIFY_LEGEND = """\
promise   what the result must equal, and how near it is (see the guide "Measure and verify"): error <= limit
s         seconds until the last rank is done: the median, and between which four fifths of the repeats lie
peak MiB  most bytes at one time, from the input on: {memory}; not in it: weights"""


def verify_text(measured: Measurement, model: str) -> str:
    """One table for each operation."""
    return "\n\n".join(_verify_sections(measured, model))


def _verify_sections(measured: Measurement, model: str) -> Iterator[str]:
    yield head(measured, f"{model}, {measured.request.found.path}")
    for operation in measured.operations:
        table = [_VERIFY_COLUMNS, *map(_verify_cells, operation.arms)]
        yield "\n".join([shapes(operation), "", *align(table), *_left_out(operation)])
    yield _VERIFY_LEGEND.format(memory=_MEMORY[measured.device == "cpu"])


def _verify_cells(one: ArmResult) -> Sequence[str]:
    found = one.comparison
    assert found is not None
    promise = ""
    if found.against is not None:
        sign, word = (">", "BROKEN") if found.broken else ("<=", "holds")
        promise = f"{found.against}: {number(found.error)} {sign} {number(found.limit)}  {word}"
    alone = one.arm.alone
    return (
        one.arm.title,
        _both(found.to_untiled),
        _both(found.to_tiles),
        promise,
        seconds(one.wall_s),
        ", ".join(f"{peak / 2**20:.1f}" for peak in (one.peak_bytes[:1] if alone else one.peak_bytes)),
    )


def _both(apart: Difference) -> str:
    return f"{number(apart.max)}, {number(apart.mean)}"
