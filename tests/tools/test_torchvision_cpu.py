# SPDX-License-Identifier: Apache-2.0
"""Torchvision without its library: imported where the stand-in is there, and left alone where its library loads."""

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tools import setup_env
from tools.setup_env import TORCHVISION_CPU, Environment

NEEDS_STAND_IN = "import sys\nif '_torchvision_cpu' not in sys.modules: raise RuntimeError('no operator')\n"
LIKE_TORCHVISION = """
import torch
from torchvision import extension
@torch.library.register_fake("torchvision::nms")
def nms(dets, scores, iou_threshold): ...
@torch.library.register_fake("torchvision::qnms")
def qnms(dets, scores, iou_threshold): ...
"""


def packages_of(env: Environment) -> Path:
    return Path(env.output(env.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))


@pytest.fixture
def env(tmp_path: Path) -> Environment:
    """An environment of its own, with a torchvision in it that needs the stand-in."""
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "pyvenv.cfg").touch()
    (folder / "bin" / "python").symlink_to(sys.executable)
    env = Environment(folder)
    packages = packages_of(env)
    assert packages.is_relative_to(folder)
    (packages / "torchvision").mkdir(parents=True)
    (packages / "torchvision" / "__init__.py").write_text(NEEDS_STAND_IN)
    return env


def test_the_stand_in_comes_and_goes(env: Environment) -> None:
    packages = packages_of(env)
    assert not env.runs("import torchvision")
    for _ in range(2):
        setup_env.make_torchvision_importable(env)
        assert env.runs("import torchvision")
        assert (packages / "_torchvision_cpu.py").read_bytes() == TORCHVISION_CPU.read_bytes()
    (packages / "torchvision" / "__init__.py").write_text("")
    setup_env.make_torchvision_importable(env)
    assert env.runs("import torchvision")
    assert [path.name for path in packages.iterdir() if path.is_file()] == []


def test_another_fault_ends_the_set_up(env: Environment) -> None:
    (packages_of(env) / "torchvision" / "__init__.py").write_text("import a_module_that_is_missing")
    with pytest.raises(setup_env.SetupError, match="import torchvision"):
        setup_env.make_torchvision_importable(env)


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder with the stand-in and a package that does what torchvision does with a library that does not load."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(LIKE_TORCHVISION)
    (tmp_path / "torchvision" / "extension.py").touch()
    (tmp_path / "torchvision" / "_C.so").write_bytes(b"not a library")
    shutil.copy(TORCHVISION_CPU, tmp_path / "_torchvision_cpu.py")
    return tmp_path


def run(packages: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` without what the environment's own .pth files import."""
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(Path(torch.__file__).parent.parent)}
    path = os.pathsep.join([str(packages), *sorted(paths)])
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=60)


def test_operators_are_declared_where_the_library_does_not_load(packages: Path) -> None:
    without = run(packages, "import torchvision")
    assert without.returncode != 0
    assert "operator torchvision::nms does not exist" in without.stderr
    done = run(
        packages,
        "import sys, _torchvision_cpu; assert 'torch' not in sys.modules\n"
        "import torch, torchvision\n"
        "torch.ops.torchvision.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)",
    )
    assert "could not run 'torchvision::nms'" in done.stderr.lower(), "the import works, the operator itself does not"


def test_nothing_is_declared_where_the_library_loads(packages: Path) -> None:
    loadable = find_spec("_ctypes")
    assert loadable is not None and loadable.origin is not None
    shutil.copy(loadable.origin, packages / "torchvision" / "_C.so")
    (packages / "torchvision" / "__init__.py").write_text("import torch\nfrom torchvision import extension\n")
    done = run(packages, "import _torchvision_cpu, torch, torchvision; print(hasattr(torch.ops.torchvision, 'nms'))")
    assert done.stdout.strip() == "False", done.stderr
