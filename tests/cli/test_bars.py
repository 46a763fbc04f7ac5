# SPDX-License-Identifier: Apache-2.0
"""Bars in characters and as a PNG."""

from pathlib import Path

import pytest
from PIL import Image

from vllm_omni_vae.cli.bars import Bar, Chart, draw_bars, draw_png
from vllm_omni_vae.cli.table import align
from vllm_omni_vae.errors import ConfigurationError
from vllm_omni_vae.measure.statistics import Spread

BARS = (Bar("one", Spread(2.0, 1.0, 4.0)), Bar("eleven", Spread(1.0, 1.0, 1.0)))


def test_a_bar_is_as_long_as_its_median_and_its_line_ends_at_p90() -> None:
    assert draw_bars(BARS) == [
        "one     " + "#" * 25 + "-" * 25 + "  2.000",
        "eleven  " + "#" * 12 + "  1.000",
    ]
    assert draw_bars([Bar("none", Spread(0.0, 0.0, 0.0))]) == ["none    0.000"]


def test_the_picture_has_a_bar_for_each(tmp_path: Path) -> None:
    file = tmp_path / "bars.drawing"
    draw_png([Chart("upper", BARS), Chart("lower", BARS[:1])], file)
    with Image.open(file) as image:
        assert image.format == "PNG"
        filled = [[image.getpixel((x, y)) == (143, 184, 222) for x in range(image.width)] for y in range(image.height)]
    lengths = [sum(row) for row in filled]
    rises = [y for y in range(1, len(lengths)) if lengths[y] and not lengths[y - 1]]
    assert [lengths[y] for y in rises] == [279, 139, 279]  # of 280, 140 and 280 pixels, inside their outline


def test_a_file_that_cannot_be_written_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot write /no/such/folder/bars\.png: No such file"):
        draw_png([Chart("", BARS)], Path("/no/such/folder/bars.png"))


def test_a_table_has_its_first_column_to_the_left() -> None:
    assert align([("", "n"), ("ab", "1"), ("c", "22")]) == ["     n", "--  --", "ab   1", "c   22"]
