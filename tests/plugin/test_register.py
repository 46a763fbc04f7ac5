# SPDX-License-Identifier: Apache-2.0
"""The plugin against stand-ins for vLLM's modules, also such as no released vLLM has."""

import argparse
import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_omni_vae import plugin


class Stock:
    """A stand-in for vLLM: the names that the plugin replaces, and what was run."""

    def __init__(self) -> None:
        ran: list[Any] = []

        class EngineArgs:
            @staticmethod
            def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
                for flag, default in {"--model": "default/llm", "--revision": None, "--download-dir": None}.items():
                    parser.add_argument(flag, default=default)
                parser.add_argument("--seed", type=int, default=0)
                return parser

        class ServeSubcommand:
            @staticmethod
            def cmd(args: argparse.Namespace) -> str:
                ran.append(args)
                return "served"

            def validate(self, args: argparse.Namespace) -> None:
                ran.append("validated")

        self.ran = ran
        self.engine_args: Any = EngineArgs
        self.subcommand: Any = ServeSubcommand

    @property
    def hooks(self) -> tuple[Any, ...]:
        return (
            vars(self.engine_args)["add_cli_args"],
            vars(self.subcommand).get("cmd"),
            vars(self.subcommand)["validate"],
        )

    def parser(self, prog: str = "vllm serve") -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(prog=prog)
        parser.add_argument("model_tag", nargs="?")
        return self.engine_args.add_cli_args(parser)

    def serve(self, *words: str) -> Any:
        """What vLLM's main function does with these words."""
        args = self.parser().parse_args(words)
        command = self.subcommand()
        command.validate(args)
        return command.cmd(args)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stock]:
    stock = Stock()
    monkeypatch.setattr(sys, "argv", ["vllm", "serve"])
    for name, attribute in {
        "vllm.engine.arg_utils": {"EngineArgs": stock.engine_args},
        "vllm.entrypoints.cli.serve": {"ServeSubcommand": stock.subcommand},
    }.items():
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**attribute))
    plugin._install.cache_clear()
    yield stock
    plugin._install.cache_clear()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    monkeypatch.setattr("vllm_omni_vae.cli.serve.launch", lambda model, values: calls.append((model, values)))
    return calls


@pytest.fixture
def wan(tmp_path: Path) -> str:
    (tmp_path / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    return str(tmp_path)


def test_functions_are_replaced_once_and_keep_their_names_and_kinds(vllm: Stock) -> None:
    names = [hook.__qualname__ for hook in vllm.hooks]
    before = vllm.hooks
    plugin.register()
    after = vllm.hooks
    plugin.register()
    assert vllm.hooks == after
    assert not set(before) & set(after)
    assert [hook.__qualname__ for hook in after] == names
    assert [type(hook) for hook in after] == [type(hook) for hook in before]


def test_nothing_happens_under_omni(vllm: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    before = vllm.hooks
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", "--omni", "some/model"])
    plugin.register()
    assert vllm.hooks == before


def test_nothing_happens_where_there_is_no_command_line(vllm: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    before = vllm.hooks
    monkeypatch.delitem(sys.modules, "vllm.entrypoints.cli.serve")
    plugin.register()
    assert vllm.hooks == before


@pytest.mark.parametrize("change", ["missing", "another kind"])
def test_a_vllm_that_moved_a_function_is_left_alone_with_one_warning(
    vllm: Stock, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    if change == "missing":
        del vllm.subcommand.cmd
    else:
        vllm.subcommand.cmd = lambda self, args: "served"
    before = vllm.hooks
    plugin.register()
    assert vllm.hooks == before
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "cmd" in record.getMessage()
    assert "vllm-omni-vae serve MODEL" in record.getMessage()
    assert f"vLLM {plugin.SUPPORTED_VLLM} are supported" in record.getMessage()


def test_flags_are_added_to_serve_only(vllm: Stock) -> None:
    plugin.register()
    assert "--vae-use-tiling" in vllm.parser("vllm serve").format_help()
    for prog in ("vllm bench serve", "vllm run-batch", "vllm launch render"):
        assert "--vae-use-tiling" not in vllm.parser(prog).format_help()


def test_a_language_model_is_served_by_vllm(vllm: Stock, launched: list[Any]) -> None:
    plugin.register()
    assert vllm.serve("some/llm", "--seed", "3") == "served"
    validated, args = vllm.ran
    assert validated == "validated"
    assert vars(args) == {
        "model_tag": "some/llm",
        "model": "default/llm",
        "revision": None,
        "download_dir": None,
        "seed": 3,
    }
    assert not launched


def test_a_diffusers_checkpoint_is_launched_with_what_was_given(vllm: Stock, launched: list[Any], wan: str) -> None:
    plugin.register()
    vllm.serve(wan, "--vae-patch-parallel-size", "2", "--seed", "0")
    assert launched == [(wan, {"vae_patch_parallel_size": 2, "seed": 0})]
    assert not vllm.ran


def test_a_checkpoint_in_the_hub_s_cache_is_recognised(vllm: Stock, launched: list[Any], tmp_path: Path) -> None:
    repository = tmp_path / "models--some--wan"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    plugin.register()
    vllm.serve("some/wan", "--download-dir", str(tmp_path))
    assert launched == [("some/wan", {"download_dir": str(tmp_path)})]


def test_one_process_may_parse_several_command_lines(vllm: Stock, launched: list[Any], wan: str) -> None:
    plugin.register()
    vllm.serve(wan)
    vllm.serve("some/llm")
    vllm.serve(wan, "--seed", "1")
    assert launched == [(wan, {}), (wan, {"seed": 1})]
    assert len(vllm.ran) == 2


def test_a_fault_of_ours_while_flags_are_added_leaves_vllm_working(
    vllm: Stock, launched: list[Any], wan: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("fault")

    monkeypatch.setattr("vllm_omni_vae.config.flags.add_arguments", fail)
    plugin.register()
    assert vllm.serve(wan) == "served"
    assert [record.getMessage().count("RuntimeError: fault") for record in caplog.records] == [1]
    assert not launched


def test_a_fault_of_ours_while_the_model_is_looked_up_leaves_vllm_working(
    vllm: Stock, launched: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("fault")

    monkeypatch.setattr("vllm_omni_vae.checkpoint.find", fail)
    plugin.register()
    assert vllm.serve("some/llm") == "served"
    assert [record.getMessage().count("RuntimeError: fault") for record in caplog.records] == [1]


def test_a_flag_that_a_later_vllm_has_too_stays_vllms(vllm: Stock, launched: list[Any]) -> None:
    stock = vllm.engine_args.add_cli_args

    def with_num_gpus(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--num-gpus", type=int)
        return stock(parser)

    vllm.engine_args.add_cli_args = staticmethod(with_num_gpus)
    plugin.register()
    assert vllm.serve("some/llm", "--num-gpus", "2") == "served"


def test_our_flags_with_a_language_model_are_refused(
    vllm: Stock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    plugin.register()
    with pytest.raises(SystemExit) as end:
        vllm.serve(str(tmp_path), "--usp", "2", "--no-vae-use-tiling")
    assert end.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "--ulysses-degree, --vae-use-tiling can only be used with a diffusers checkpoint" in message
    assert not vllm.ran


def test_the_hub_is_asked_only_when_a_flag_of_ours_was_given(vllm: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(model: str, *args: Any, **kwargs: Any) -> str:
        asked.append(model)
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    plugin.register()
    vllm.serve("some/llm")
    assert not asked
    with pytest.raises(SystemExit):
        vllm.serve("some/llm", "--vae-use-tiling")
    assert asked == ["some/llm"]
