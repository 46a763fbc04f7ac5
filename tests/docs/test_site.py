# SPDX-License-Identifier: Apache-2.0
"""The site of all pages: its links are those of the repository, and one that leads nowhere ends the build."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_omni_vae
from tests.docs.markdown import ROOT
from tools import site_hook


@pytest.mark.parametrize(
    ("source", "depth", "before", "after"),
    [
        ("docs/index.md", 0, "[a](../CONTRIBUTING.md#tests)", "[a](CONTRIBUTING.md#tests)"),
        ("docs/user_guide/serving.md", 1, "[a](images.md)", "[a](../user_guide/images.md)"),
        ("docs/user_guide/images.md", 1, "[a](../../CHANGELOG.md)", "[a](../CHANGELOG.md)"),
        ("CONTRIBUTING.md", 0, "[a](docs/design/structures.md)", "[a](design/structures.md)"),
        ("examples/online_serving/README.md", 2, "[the client](images.py), [a](#b)", "the client, [a](#b)"),
        ("docs/index.md", 0, "[a](https://example.org/x.md)", "[a](https://example.org/x.md)"),
    ],
)
def test_links_lead_to_where_the_target_lies_in_the_site(source: str, depth: int, before: str, after: str) -> None:
    assert site_hook.relinked(before, ROOT / source, depth) == after


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    named = {name.rpartition(".")[2] for name in re.findall(r"^::: (vllm_omni_vae[\w.]*)$", page, re.M)}
    assert set(vllm_omni_vae.__all__) - {"__version__"} <= named


def test_a_link_that_leads_nowhere_ends_the_build(tmp_path: Path) -> None:
    """A copy of the sources is built twice: as it is, and with a link to a page that there is not."""
    (tmp_path / "tools").mkdir()
    for name in ("mkdocs.yml", "tools/site_hook.py", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("docs", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name)
    whole = build(tmp_path)
    assert whole.returncode == 0, whole.stderr
    assert (tmp_path / "site" / "user_guide" / "serving.html").is_file()
    assert 'id="vllm_omni_vae.Omni.generate"' in (tmp_path / "site" / "reference" / "python.html").read_text()

    with (tmp_path / "docs" / "index.md").open("a") as page:
        page.write("\n[nowhere](user_guide/nowhere.md) and [no heading](user_guide/serving.md#no-such-heading)\n")
    broken = build(tmp_path)
    assert broken.returncode != 0
    assert "'user_guide/nowhere.md'" in broken.stderr and "'user_guide/serving.md#no-such-heading'" in broken.stderr


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of the sources in ``folder``."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build"], cwd=folder, capture_output=True, text=True, timeout=60
    )
