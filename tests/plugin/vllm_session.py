# SPDX-License-Identifier: Apache-2.0
"""Run several `vllm` command lines in one process and report what each came to; started by conftest.py.

    python vllm_session.py COMMANDS.json OUTCOMES.json

vLLM is the installed one; only what starts a server is replaced, in vLLM by a function that keeps the namespace it
was given, and in this package by one that keeps the two configurations.
"""

import contextlib
import dataclasses
import io
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import vllm.entrypoints.cli.main
import vllm.entrypoints.cli.serve
from vllm.utils.argparse_utils import FlexibleArgumentParser

NEW_IN_EACH_PROCESS = re.compile(r" at 0x[0-9a-f]+|(?<=bench-)[0-9a-f]{8}")


def text(value: Any) -> str:
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else NEW_IN_EACH_PROCESS.sub("", repr(value))


def run(words: list[str]) -> dict[str, Any]:
    outcome: dict[str, Any] = {"ran": None, "exit": None}

    def run_vllm(args: Any) -> None:
        namespace = {name: text(value) for name, value in sorted(vars(args).items())}
        outcome.update(ran="vllm", namespace=namespace)

    def run_ours(engine: Any, server: Any) -> None:
        outcome.update(ran="ours", engine=dataclasses.asdict(engine), server=dataclasses.asdict(server))

    vllm.entrypoints.cli.serve.run_server = lambda args: args
    vllm.entrypoints.cli.serve.uvloop = types.SimpleNamespace(run=run_vllm)
    sys.modules["vllm_omni_vae.server.app"] = types.SimpleNamespace(run=run_ours)  # type: ignore[assignment]
    FlexibleArgumentParser._search_keyword = None

    sys.argv = ["vllm", *words]
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            vllm.entrypoints.cli.main.main()
        except SystemExit as end:
            outcome["exit"] = end.code
    printed = {"stdout": stdout.getvalue(), "stderr": stderr.getvalue()}
    return outcome | {name: NEW_IN_EACH_PROCESS.sub("", written) for name, written in printed.items()}


def main() -> None:
    commands = json.loads(Path(sys.argv[1]).read_text())
    outcomes_file = Path(sys.argv[2])
    outcomes = {name: run(words) for name, words in commands.items()}
    probe = sys.modules.get("hook_probe")
    outcomes_file.write_text(json.dumps({"commands": outcomes, "calls": getattr(probe, "CALLS", [])}))


if __name__ == "__main__":
    main()
