# SPDX-License-Identifier: Apache-2.0
"""Which rank has which part of the picture, drawn with characters or as a PNG."""

from __future__ import annotations

import colorsys
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

Span = tuple[int, int]

_PANEL = 640
_MARGIN = 24
_TITLE = 28


@dataclasses.dataclass(frozen=True, slots=True)
class Panel:
    """One picture cut into rows and columns of parts.

    Attributes:
        title: What is shown.
        rows, cols: First pixel, and the pixel after the last, of every row and column of parts.
        owners: Rank of each part, row by row.
    """

    title: str
    rows: tuple[Span, ...]
    cols: tuple[Span, ...]
    owners: tuple[int, ...]

    def parts(self) -> Iterator[tuple[int, Span, Span]]:
        """(rank, rows, columns) of every part, row by row."""
        spans = ((row, col) for row in self.rows for col in self.cols)
        for owner, (row, col) in zip(self.owners, spans, strict=True):
            yield owner, row, col

    def to_json(self) -> dict[str, Any]:
        """JSON-ready values, without the title."""
        return {"rows": self.rows, "cols": self.cols, "owners": self.owners}


def draw_text(panel: Panel) -> str:
    """The rank of each part in a box, with the first pixel row and column of each beside and above it."""
    left = max(len(str(start)) for start, _ in panel.rows)
    cell = 2 + max(len(str(n)) for n in (*panel.owners, *(start for start, _ in panel.cols)))
    line = " " * (left + 1) + "+" + ("-" * cell + "+") * len(panel.cols)
    head = " " * (left + 2) + " ".join(str(start).ljust(cell) for start, _ in panel.cols)
    lines = [panel.title, head.rstrip(), line]
    for number, (start, _) in enumerate(panel.rows):
        owners = panel.owners[number * len(panel.cols) : (number + 1) * len(panel.cols)]
        boxes = "".join(f"{owner:^{cell}}|" for owner in owners)
        lines += [f"{start:>{left}} |{boxes}", line]
    return "\n".join(lines)


def draw_png(panels: Sequence[Panel], file: Path) -> None:
    """Draw the panels to scale, one below the other, and write them to ``file``.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    import PIL.Image
    import PIL.ImageDraw

    scales = [_PANEL / max(panel.rows[-1][1], panel.cols[-1][1]) for panel in panels]
    heights = [_TITLE + round(p.rows[-1][1] * scale) + _MARGIN for p, scale in zip(panels, scales, strict=True)]
    image = PIL.Image.new("RGB", (_PANEL + 2 * _MARGIN, _MARGIN + sum(heights)), "white")
    canvas = PIL.ImageDraw.Draw(image)
    colours = _colours(1 + max(owner for panel in panels for owner in panel.owners))
    top = _MARGIN
    for panel, scale, height in zip(panels, scales, heights, strict=True):
        _draw_panel(canvas, panel, scale, top, colours)
        top += height
    save_png(image, file)


def save_png(image: Image, file: Path) -> None:
    """Write ``image``.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    try:
        image.save(file, format="PNG")
    except OSError as error:
        raise ConfigurationError(f"cannot write {file}: {error.strerror or error}") from None


def _draw_panel(canvas: ImageDraw, panel: Panel, scale: float, top: int, colours: Sequence[str]) -> None:
    canvas.text((_MARGIN, top), panel.title, fill="black")
    top += _TITLE
    for owner, row, col in panel.parts():
        x0, x1 = (_MARGIN + round(pixel * scale) for pixel in col)
        y0, y1 = (top + round(pixel * scale) for pixel in row)
        canvas.rectangle((x0, y0, x1, y1), fill=colours[owner], outline="black")
        canvas.text(((x0 + x1) // 2, (y0 + y1) // 2), str(owner), fill="black", anchor="mm")


def _colours(count: int) -> list[str]:
    """Light colours, as far apart in hue as they can be."""
    shades = [colorsys.hsv_to_rgb(rank / count, 0.45, 0.95) for rank in range(count)]
    return ["#" + "".join(f"{round(255 * part):02x}" for part in shade) for shade in shades]
