# SPDX-License-Identifier: Apache-2.0
"""The `vllm-omni-vae` command: what it starts, and how it ends when it cannot."""

import importlib.metadata
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from vllm_omni_vae.cli.main import main
from vllm_omni_vae.config import EngineConfig, ServerConfig, VaeConfig
from vllm_omni_vae.errors import ConfigurationError, EngineError


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, ServerConfig]]:
    """The configurations with which a server was started."""
    calls: list[tuple[EngineConfig, ServerConfig]] = []
    _replace_server(monkeypatch, lambda engine, server: calls.append((engine, server)))
    return calls


@pytest.fixture
def wan(tmp_path: Path) -> str:
    folder = tmp_path / "wan"
    folder.mkdir()
    (folder / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    return str(folder)


def _replace_server(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    monkeypatch.setitem(sys.modules, "vllm_omni_vae.server.app", types.SimpleNamespace(run=run))


def _exit_code(*words: str) -> Any:
    with pytest.raises(SystemExit) as end:
        main(words)
    return end.value.code


def test_serve_starts_the_server_with_what_was_given(started: list[Any], wan: str) -> None:
    main(["serve", wan, "--vae_use_tiling", "--vae_tile_size=32x32", "--port", "0", "--seed", "0"])
    engine = EngineConfig(model=wan, vae=VaeConfig(vae_use_tiling=True, vae_tile_size="32x32"), seed=0)
    assert started == [(engine, ServerConfig(port=0))]


def test_a_configuration_file_gives_model_and_flags_and_the_command_line_wins(
    started: list[Any], wan: str, tmp_path: Path
) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(
        f"model: {wan}\nport: 8001\nhost: ::1\nvae_use_slicing: true\nallow-credentials: false\nuds:\n"
        "api-key: [k1, k2]\nhsdp-shard-size: -1\ndefault-sampling-params: {num_inference_steps: 3}\n"
    )
    main(["serve", "--config", str(file), "--port", "8002"])
    engine = EngineConfig(
        model=wan, vae=VaeConfig(vae_use_slicing=True), default_sampling_params={"num_inference_steps": 3}
    )
    assert started == [(engine, ServerConfig(host="::1", port=8002, api_key=("k1", "k2")))]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("port: eight", "invalid int value: 'eight'"),
        ("no-such-flag: 1", "unrecognized arguments: --no-such-flag=1"),
        ("- port", "holds no mapping"),
        ("{", "cannot read"),
        (None, "cannot read"),
    ],
)
def test_a_configuration_file_that_cannot_be_used_is_refused(
    started: list[Any], wan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
) -> None:
    file = tmp_path / "server.yaml"
    if content is not None:
        file.write_text(content)
    assert _exit_code("serve", wan, "--config", str(file)) == 2
    assert message in capsys.readouterr().err
    assert not started


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no model was given"),
        (("{wan}", "--vae-tile-size", "wide"), "'wide' is no tile extent"),
        (("{wan}", "--port", "http"), "invalid int value: 'http'"),
        (("{wan}", "--no-such-flag"), "unrecognized arguments: --no-such-flag"),
        (("{wan}", "--job-timeout", "0"), "error: job_timeout is 0.0; give a number above 0"),
        (("{wan}", "--dtype", "int4"), "error: dtype 'int4' is not known"),
        (("{wan}", "--distributed-executor-backend", "uni"), "choose one of mp, ray, external_launcher"),
        (
            ("{wan}", "--distributed-executor-backend", "external_launcher"),
            "for Omni in a program that torchrun starts",
        ),
        (("{wan}/..",), "is no diffusers checkpoint"),
    ],
)
def test_what_cannot_work_ends_with_code_2_and_its_reason_on_the_last_line(
    started: list[Any], wan: str, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert _exit_code("serve", *(word.format(wan=wan) for word in words)) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not started


@pytest.mark.parametrize(("error", "code"), [(ConfigurationError("too wide"), 2), (EngineError("rank 1 died"), 1)])
def test_an_error_of_the_server_is_one_line(
    monkeypatch: pytest.MonkeyPatch, wan: str, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    def run(engine: EngineConfig, server: ServerConfig) -> None:
        raise error

    _replace_server(monkeypatch, run)
    assert _exit_code("serve", wan) == code
    assert capsys.readouterr().err == f"error: {error}\n"


def test_a_fault_is_not_hidden(monkeypatch: pytest.MonkeyPatch, wan: str) -> None:
    def run(engine: EngineConfig, server: ServerConfig) -> None:
        raise ZeroDivisionError

    _replace_server(monkeypatch, run)
    with pytest.raises(ZeroDivisionError):
        main(["serve", wan])


def test_tiny_writes_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []

    def build(family: str, out: Path, *, seed: int) -> Path:
        calls.append((family, out, seed))
        return out

    monkeypatch.setattr("vllm_omni_vae.cli.tiny.build", build)
    main(["tiny", "--family", "wan2.2-i2v", "--out", str(tmp_path), "--seed", "5"])
    assert calls == [("wan2.2-i2v", tmp_path, 5)]
    assert capsys.readouterr().out == f"{tmp_path}\n"


def test_tiny_lists_its_families(capsys: pytest.CaptureFixture[str]) -> None:
    main(["tiny", "--list"])
    assert "wan2.2-i2v " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--out", "x"), "tiny needs --family NAME and --out DIR"),
        (("--family", "wan2.2-i2v"), "tiny needs --family NAME and --out DIR"),
        (("--family", "none", "--out", "x"), "'none' was asked for"),
    ],
)
def test_tiny_says_what_it_lacks(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
    assert _exit_code("tiny", *words) == 2
    assert message in capsys.readouterr().err


def test_version_is_the_distribution_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code("--version") == 0
    assert capsys.readouterr().out.strip() == importlib.metadata.version("vllm-omni-vae")


def test_help_runs_as_a_module_and_imports_nothing_heavy() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "vllm_omni_vae.cli.main", "serve", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "--vae-patch-parallel-size" in done.stdout
    imported = {line.rsplit("|", 1)[-1].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "vllm_omni_vae" in imported
    assert not imported & {"torch", "numpy", "diffusers", "transformers", "vllm", "fastapi", "huggingface_hub"}
