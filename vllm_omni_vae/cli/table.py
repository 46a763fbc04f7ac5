# SPDX-License-Identifier: Apache-2.0
"""Lines of cells in columns."""

from __future__ import annotations

from collections.abc import Sequence


def align(table: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left, the others to the right; a rule below the first line."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]).rstrip()
        for line in table
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]
