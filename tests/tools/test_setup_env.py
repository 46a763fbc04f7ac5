# SPDX-License-Identifier: Apache-2.0
"""When the set-up does nothing, goes on, begins anew, or refuses. Nothing is installed here; CI runs the real thing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools import setup_env
from tools.setup_env import Environment, SetupError


@pytest.fixture
def env(tmp_path: Path) -> Environment:
    """An environment with a Python that runs and a file in it, as an earlier set-up would leave it."""
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "pyvenv.cfg").touch()
    (folder / "earlier").touch()
    (folder / "bin" / "python").symlink_to(sys.executable)
    return Environment(folder)


def status(env: Environment) -> str:
    return env.state["status"]


def was_kept(env: Environment) -> bool:
    return (env.folder / "earlier").exists()


def test_ready_until_an_input_changes(env: Environment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not env.is_ready
    env.mark("ready")
    assert env.is_ready
    assert Environment(env.folder).is_ready
    changed = tmp_path / "constraints.txt"
    changed.write_text("torch==3.0\n")
    monkeypatch.setattr(setup_env, "INPUTS", (*setup_env.INPUTS, changed))
    assert not Environment(env.folder).is_ready


def test_not_ready_when_its_python_is_gone(env: Environment) -> None:
    env.mark("ready")
    env.python.unlink()
    assert not env.is_ready


@pytest.mark.parametrize("before", [None, "ready", "failed"])
def test_a_sound_environment_is_kept(env: Environment, before: str | None) -> None:
    if before:
        env.mark(before)
    env.create()
    assert was_kept(env)
    assert status(env) == "busy"


@pytest.mark.parametrize("fault", ["busy", "moved", "unreadable", "no python"])
def test_a_broken_environment_is_made_anew(env: Environment, fault: str) -> None:
    env.mark("busy" if fault == "busy" else "ready")
    state_file = env.folder / "setup.json"
    if fault == "moved":
        state_file.write_text(json.dumps(env.state | {"folder": "/somewhere/else"}))
    elif fault == "unreadable":
        state_file.write_text("{")
    elif fault == "no python":
        env.python.unlink()
    env.create()
    assert not was_kept(env)
    assert status(env) == "busy"
    assert subprocess.run([env.python, "-m", "pip", "--version"], stdout=subprocess.DEVNULL).returncode == 0


def test_someone_s_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(SetupError, match="is no virtual environment"):
        Environment(tmp_path).create()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_someone_s_broken_environment_is_left_alone(env: Environment) -> None:
    env.python.unlink()
    with pytest.raises(SetupError, match="no working pip"):
        env.create()
    assert was_kept(env)
    assert not env.state


def test_an_interrupted_set_up_says_so(env: Environment, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def interrupt(_: Environment) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(setup_env, "install", interrupt)
    monkeypatch.setattr(sys, "argv", ["setup_env.py", "--venv", str(env.folder)])
    assert setup_env.main() == 130
    assert "anew" in capsys.readouterr().err
    assert status(env) == "busy"


def test_a_failed_set_up_goes_on_next_time(env: Environment, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def fail(_: Environment) -> None:
        raise SetupError("the index was not reached")

    monkeypatch.setattr(setup_env, "install", fail)
    monkeypatch.setattr(sys, "argv", ["setup_env.py", "--venv", str(env.folder)])
    assert setup_env.main() == 1
    assert "the index was not reached" in capsys.readouterr().err
    assert status(env) == "failed"
    monkeypatch.setattr(setup_env, "install", lambda _: None)
    assert setup_env.main() == 0
    assert was_kept(env)
    assert env.is_ready


def test_every_direct_pin_is_exact() -> None:
    pins = [line for line in setup_env.CONSTRAINTS.read_text().splitlines() if line and not line.startswith("#")]
    assert [pin.count("==") for pin in pins] == [1] * len(pins)
    assert setup_env.pinned("torch") == "2.13.0"
    with pytest.raises(SetupError, match="does not pin tensorflow"):
        setup_env.pinned("tensorflow")
