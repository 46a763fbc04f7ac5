# SPDX-License-Identifier: Apache-2.0
"""Every page: links lead somewhere, code is real code, commands would be taken as they stand."""

import argparse
import ast
import contextlib
import importlib
import io
import json
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from tests.docs.markdown import ROOT, Block, all_blocks, anchors, blocks, codes, commands, links, name, pages
from vllm_omni_vae.cli import bench, plan, serve, tiny, verify
from vllm_omni_vae.config import ServerConfig
from vllm_omni_vae.config.flags import flags
from vllm_omni_vae.server.app import create_app
from vllm_omni_vae.server.fields import validate
from vllm_omni_vae.server.image_form import EditForm, ImageForm
from vllm_omni_vae.server.video_form import RemixForm, VideoForm

LANGUAGES = {"bash", "python", "text", "yaml", ""}
MARK = re.compile(r"|run|output|torchrun [a-z_]+\.py")
PYTHON = all_blocks("python")
SHELL = [(block, words) for block in all_blocks("bash") for words in commands(block)]
SCRIPTS = {block.mark.split()[1]: block for block in PYTHON if block.mark.startswith("torchrun")}
EXAMPLES = {path.name: path for path in (ROOT / "examples").rglob("*.py")}
EXAMPLES["benchmarks/gpu/run.py"] = ROOT / "benchmarks" / "gpu" / "run.py"
EXAMPLES["benchmarks/faults.py"] = ROOT / "benchmarks" / "faults.py"
EXAMPLES["benchmarks/soak.py"] = ROOT / "benchmarks" / "soak.py"
EXAMPLES["tools/accuracy.py"] = ROOT / "tools" / "accuracy.py"
# Flags of other programs that the pages name.
FOREIGN_FLAGS = {"--nproc-per-node", "--omni", "--help", "--use_parallel_vae", "--enable_tiling"}

RAY_FLAGS = {"start": {"--head", "--port", "--address", "--block", "--disable-usage-stats", "--include-dashboard"}}

page = pytest.mark.parametrize("page", pages(), ids=name)


@page
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, fragment = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: there is no {target}"
        assert not fragment or fragment in anchors(target), f"{link}: {name(target)} has no such heading"


@page
def test_every_page_is_reached_from_the_readme(page: Path) -> None:
    reached, new = {ROOT / "README.md"}, [ROOT / "README.md"]
    while new:
        source = new.pop()
        linked = {(source.parent / link.partition("#")[0]).resolve() for link in links(source)}
        found = {target for target in linked if target.suffix == ".md"} - reached
        reached |= found
        new += found
    assert page in reached


@page
def test_the_blocks_are_of_known_kinds(page: Path) -> None:
    found = blocks(page)
    assert page.read_text().count("\n```") == 2 * len(found)
    for block in found:
        assert block.language in LANGUAGES, block
        assert MARK.fullmatch(block.mark), f"{block}: {block.mark!r}"


@page
def test_lines_are_not_long(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert not [n for n, line in enumerate(lines, 1) if len(line) > 120 and not line.startswith("|")]


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_blocks_compile_and_import_what_there_is(block: Block) -> None:
    tree = ast.parse(block.text, str(block))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom):
            assert node.module
            module = importlib.import_module(node.module)
            missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
            assert not missing, f"{node.module} has no {missing}"


@pytest.mark.parametrize("block", all_blocks("yaml"), ids=str)
def test_yaml_blocks_are_mappings(block: Block) -> None:
    assert isinstance(yaml.safe_load(block.text), dict)


@page
def test_python_blocks_use_no_unknown_names(page: Path) -> None:
    found = blocks(page, "python")
    scripts = [block.text for block in found if block.mark.startswith("torchrun")]
    others = "\n".join(block.text for block in found if not block.mark.startswith("torchrun"))
    for text in [*scripts, others]:
        command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", "--quiet", "-"]
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stdout


@page
def test_flags_in_the_text_exist(page: Path) -> None:
    known = {s for flag in flags() for s in flag.spellings} | {f"--no-{flag.spellings[0][2:]}" for flag in flags()}
    known |= FOREIGN_FLAGS | {option for parser in _parsers().values() for option in parser._option_string_actions}
    known |= {flag for path in EXAMPLES.values() for flag in re.findall(r'"(--[a-z-]+)"', path.read_text())}
    used = {word.partition("=")[0] for code in codes(page) for word in code.split() if word.startswith("--")}
    assert not {word.rstrip(":,") for word in used} - known


@page
def test_files_in_the_text_exist(page: Path) -> None:
    roots = (ROOT, ROOT / "vllm_omni_vae", page.parent)
    used = {code for code in codes(page) if re.fullmatch(r"[\w.]+(/[\w.]+)+/?|[\w/]+\.(py|toml|txt|md)", code)}
    used = {path for path in used if not path.startswith(("application/", "multipart/", "model_index"))}
    assert not {path for path in used if not any((root / path).exists() for root in roots)}


@pytest.mark.parametrize(("block", "words"), SHELL, ids=lambda value: value if isinstance(value, str) else None)
def test_commands_would_be_taken(block: Block, words: list[str], tmp_path: Path) -> None:
    program, *rest = words
    if program == "vllm":
        assert rest[0] == "serve"
        _parse("serve", rest[1:])
    elif program == "vllm-omni-vae":
        _parse(rest[0], rest[1:])
    elif program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.M)
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        wanted = re.fullmatch(r"(?:openai|\.(?:\[(\w+)\])?)", rest[1])
        assert rest[0] == "install" and wanted and (wanted[1] is None or wanted[1] in extras)
    elif program == "python":
        _run_arguments(rest)
    elif program == "torchrun":
        assert rest[0] == "--nproc-per-node" and rest[1].isdecimal()
        if rest[2] not in SCRIPTS:
            _run_arguments(rest[2:])
    elif program == "ray":
        assert not {word for word in rest if word.startswith("--")} - RAY_FLAGS[rest[0]]
    elif program == "curl":
        _check_curl(rest, tmp_path)
    else:
        pytest.fail(f"{block}: the tests do not know {program}")


def test_the_api_s_table_of_routes_is_complete(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "user_guide" / "serving.md").read_text()
    named = {tuple(route) for route in re.findall(r"`(GET|POST|DELETE) (/[^`?]*)`", text)}
    served = {(method, path) for path, methods in _routes(tmp_path).items() for method in methods}
    beside = {("POST", "/v1/videos/edits"), ("POST", "/v1/videos/extensions"), ("POST", "/v1/videos/characters")}
    variations = ("POST", "/v1/images/variations")
    assert named <= served
    quiet = {("GET", "/v1/videos/characters/{video_id}"), ("GET", "/docs/oauth2-redirect")}
    assert served - named <= beside | quiet | {variations}
    images = (ROOT / "docs" / "user_guide" / "images.md").read_text()
    assert all(f"`{method} {path}`" in images for method, path in served if path.startswith("/v1/images/"))
    assert all(path in text for _, path in beside)


def test_the_api_s_table_of_fields_is_complete() -> None:
    text = (ROOT / "docs" / "user_guide" / "serving.md").read_text()
    table = text.partition("## Fields of a request")[2].partition("### Seconds")[0]
    named = {
        field for cell in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", table, re.M) for field in re.findall(r"\w+", cell)
    }
    assert named | {"true_cfg_scale", "video_reference"} == set(VideoForm.model_fields)


def test_the_tables_of_fields_of_images_are_complete() -> None:
    text = (ROOT / "docs" / "user_guide" / "images.md").read_text()
    tables = text.partition("## Fields of a request")[2].partition("### Reference images")[0]
    both, _, edits = tables.partition("An edit has")
    for table, fields in ((both, set(ImageForm.model_fields)), (tables, set(EditForm.model_fields))):
        named = {name for cell in re.findall(r"^\| (`[^|]*`) \|", table, re.M) for name in re.findall(r"\w+", cell)}
        assert named == fields
    assert edits


def test_the_tables_of_errors_are_complete() -> None:
    text = (ROOT / "docs" / "user_guide" / "serving.md").read_text()
    tables = text.partition("## Errors")[2].partition("## Stopping")[0]
    rows = "\n".join(re.findall(r"^\| (.*) \|$", tables, re.M))
    named = set(re.findall(r"`([a-z]+_[a-z_]+|timeout|cancelled)`", rows))
    sources = {path: path.read_text() for path in (ROOT / "vllm_omni_vae").rglob("*.py")}
    whole = "\n".join(sources.values())
    derived = {"video_deleted", "video_expired", "not_found", "bad_request"}
    assert not {code for code in named - derived if f'"{code}"' not in whole}
    outside = "\n".join(text for path, text in sources.items() if path.parent.name in ("server", "pipelines"))
    raised = set(re.findall(r'code="([a-z_]+)"', outside)) | set(re.findall(r'JobError\("([a-z_]+)"', outside))
    assert sorted(raised - named) == ["loading"]  # of /health, not of an error table


def _parsers() -> dict[str, argparse.ArgumentParser]:
    commands = argparse.ArgumentParser().add_subparsers()
    for command in (serve, tiny, plan, verify, bench):
        command.add_parser(commands)
    return dict(commands.choices)


def _parse(command: str, words: list[str]) -> argparse.Namespace:
    parser = _parsers()[command]
    parser.exit_on_error = False
    args, unknown = parser.parse_known_args(words)
    assert not unknown
    if command == "serve":
        assert args.model
    return args


def _run_arguments(words: list[str]) -> Any:
    """What the example ``words[0]`` makes of its arguments; it exits on one that it does not know."""
    module = runpy.run_path(str(EXAMPLES[words[0]]))
    before, sys.argv = sys.argv, words
    try:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            return module["arguments"]()
    except SystemExit:
        pytest.fail(said.getvalue())
    finally:
        sys.argv = before


class _NoEngine:
    """An engine that is never asked; enough to assemble the application."""


def _routes(folder: Path) -> dict[str, set[str]]:
    app = create_app(_NoEngine(), ServerConfig(media_storage_path=str(folder)), model_name="m")  # type: ignore[arg-type]
    return {path: methods for path, methods in _walk(app.routes)}


def _walk(routes: Any) -> Iterator[tuple[str, set[str]]]:
    found: dict[str, set[str]] = {}
    for route in routes:
        if (methods := getattr(route, "methods", None)) is not None:
            found.setdefault(route.path, set()).update(methods - {"HEAD"})
    yield from found.items()


def _check_curl(words: list[str], folder: Path) -> None:
    method, forms, data, address = None, [], None, None
    values = iter(words)
    for word in values:
        if word == "-F":
            forms.append(next(values))
        elif word == "-d":
            data = json.loads(next(values))
        elif word == "-X":
            method = next(values)
        elif word in ("-H", "-o", "-D"):
            next(values)
        elif word != "-N":
            assert address is None, f"curl does not take {word} here"
            address = word
    assert address
    url = urlsplit(address)
    assert url.scheme == "http" and url.netloc == "localhost:8000"
    path = url.path.replace("video_123", "{video_id}")
    routes = _routes(folder)
    assert path in routes
    assert (method or ("POST" if forms or data else "GET")) in routes[path]
    kinds = {
        "/v1/images/generations": ImageForm,
        "/v1/images/edits": EditForm,
        "/v1/videos/{video_id}/remix": RemixForm,
    }
    kind = kinds.get(path, VideoForm)
    if data is not None:
        validate(kind, data)
    if forms:
        given = [form.split("=", 1) for form in forms]
        files = [value for name, value in given if name in ("input_reference", "image", "image[]", "mask")]
        assert all(value.startswith("@") for value in files)
        validate(kind, dict(form for form in given if form[1] not in files))
