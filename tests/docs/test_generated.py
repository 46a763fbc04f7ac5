# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/generated are what the code says now, and `make check` fails when they are not."""

from pathlib import Path

import pytest

from tests.docs.markdown import ROOT
from tools import generate_docs
from vllm_omni_vae import tiny
from vllm_omni_vae.config.flags import flags
from vllm_omni_vae.pipelines.registry import find_profile

TINY = {
    "wan2.1-i2v": "Wan 2.1 image to video",
    "wan2.2-t2v": "Wan 2.2 A14B text to video",
    "wan2.2-ti2v-5b": "Wan 2.2 TI2V-5B",
}


def test_the_pages_are_current() -> None:
    assert generate_docs.main(["--check"]) == 0


def test_a_stale_page_is_named_and_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate_docs, "ROOT", tmp_path)
    monkeypatch.setattr(generate_docs, "PAGES", tmp_path / "generated")
    assert generate_docs.main([]) == 0
    written = {page.name: page.read_text() for page in (tmp_path / "generated").iterdir()}
    assert written == {page.name: page.read_text() for page in (ROOT / "docs" / "generated").iterdir()}
    (tmp_path / "generated" / "flags.md").write_text("old")
    capsys.readouterr()
    assert generate_docs.main(["--check"]) == 1
    assert capsys.readouterr().err == "generated/flags.md is stale; run `make docs`\n"
    assert (tmp_path / "generated" / "flags.md").read_text() == "old"


def test_make_check_runs_the_check() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\ncheck:")[2].partition("\n\n")[0]
    assert "tools/generate_docs.py --check" in recipe


def test_every_flag_has_a_row() -> None:
    page = (ROOT / "docs" / "generated" / "flags.md").read_text()
    assert page.count("\n| `--") == len(flags())


@pytest.mark.parametrize("family", TINY)
def test_the_releases_are_described_as_checkpoints_of_their_kind_are(family: str, tmp_path: Path) -> None:
    folder = tiny.build(family, tmp_path)
    card = generate_docs.cards()[TINY[family]]
    profile = find_profile(card.pipeline_class)
    assert profile
    assert profile.card(folder) == card
