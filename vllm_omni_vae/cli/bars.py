# SPDX-License-Identifier: Apache-2.0
"""Bars with a line to the ninetieth percentile, drawn with characters or as a PNG."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from ..measure.statistics import Spread
from .drawing import save_png

_CHARACTERS = 50
_WIDTH = 560
_LABELS = 180
_VALUES = 130
_ROW = 22
_TITLE = 28
_MARGIN = 24
_FILL = "#8fb8de"


@dataclasses.dataclass(frozen=True, slots=True)
class Bar:
    """One bar.

    Attributes:
        label: Before it.
        spread: Its length is the median; the line goes from the tenth percentile to the ninetieth.
    """

    label: str
    spread: Spread


@dataclasses.dataclass(frozen=True, slots=True)
class Chart:
    """Bars of one scale under a title."""

    title: str
    bars: tuple[Bar, ...]


def draw_bars(bars: Sequence[Bar]) -> list[str]:
    """A line of characters for each bar; the longest with its line fills the width."""
    longest = _longest(bars)
    left = max(len(bar.label) for bar in bars)
    lines = []
    for bar in bars:
        full = round(_CHARACTERS * bar.spread.median / longest)
        line = round(_CHARACTERS * bar.spread.p90 / longest) - full
        lines.append(f"{bar.label.ljust(left)}  {'#' * full}{'-' * line}  {bar.spread.median:.3f}")
    return lines


def draw_png(charts: Sequence[Chart], file: Path) -> None:
    """Draw the charts one below the other, each to its own scale, and write them to ``file``.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    from PIL import Image, ImageDraw

    height = sum(_TITLE + _ROW * len(chart.bars) + _MARGIN for chart in charts)
    image = Image.new("RGB", (2 * _MARGIN + _LABELS + _WIDTH + _VALUES, _MARGIN + height), "white")
    canvas = ImageDraw.Draw(image)
    top, left = _MARGIN, _MARGIN + _LABELS
    for chart in charts:
        canvas.text((_MARGIN, top), chart.title, fill="black")
        top += _TITLE
        longest = _longest(chart.bars)
        for bar in chart.bars:
            middle, spread = top + _ROW // 2, bar.spread
            low, end, high = (left + round(_WIDTH * x / longest) for x in (spread.p10, spread.median, spread.p90))
            canvas.text((_MARGIN, middle), bar.label, fill="black", anchor="lm")
            canvas.rectangle((left, top + 3, end, top + _ROW - 4), fill=_FILL, outline="black")
            canvas.line((low, middle, high, middle), fill="black", width=2)
            canvas.text((left + _WIDTH + 8, middle), f"{spread.median:.3f} s", fill="black", anchor="lm")
            top += _ROW
        top += _MARGIN
    save_png(image, file)


def _longest(bars: Sequence[Bar]) -> float:
    return max(max(bar.spread.median, bar.spread.p90) for bar in bars) or 1.0
