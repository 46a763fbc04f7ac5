# SPDX-License-Identifier: Apache-2.0
"""What `bench` and `verify` show on a terminal while ranks work."""

import io

import pytest

from vllm_omni_vae.cli import measuring, terminal
from vllm_omni_vae.measure.messages import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    measuring._show(Progress(5, 20, "decode: warm-up: tile"))
    terminal.tell("")
    assert screen.getvalue() == "\r\x1b[K[#####...............] decode: warm-up: tile\r\x1b[K"


def test_nothing_is_shown_where_no_person_looks(capsys: pytest.CaptureFixture[str]) -> None:
    measuring._show(Progress(5, 20, "decode: warm-up: tile"))
    terminal.tell("")
    assert capsys.readouterr() == ("", "")
