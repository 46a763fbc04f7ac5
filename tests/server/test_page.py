# SPDX-License-Identifier: Apache-2.0
"""The page's files: who gets them, what browsers are told of them, and that they are in the wheel."""

import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import vllm_omni_vae
from vllm_omni_vae.config import DiffusionParallelConfig, EngineConfig, ServerConfig
from vllm_omni_vae.server.app import create_app
from vllm_omni_vae.server.page import FOLDER, MEDIA_TYPES, PAGE_PATHS

from .scripted_engine import CARD, LAYERS, ScriptedEngine

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(path.name for path in FOLDER.iterdir())
PATHS = sorted(PAGE_PATHS)

Connect = Callable[..., TestClient]


@pytest.fixture
def connect(tmp_path: Path) -> Connect:
    def connect(engine: ScriptedEngine | None = None, **settings: Any) -> TestClient:
        config = ServerConfig(media_storage_path=str(tmp_path), **settings)
        return TestClient(create_app(engine or ScriptedEngine(), config, model_name="m"), follow_redirects=False)

    return connect


def test_every_file_is_served_and_no_other() -> None:
    assert frozenset({"/", *(f"/static/{name}" for name in NAMES)}) == PAGE_PATHS
    assert {"index.html", "style.css", "app.js", "icon.svg"} <= set(NAMES)


@pytest.mark.parametrize("path", PATHS)
def test_a_file_comes_without_a_key_and_says_what_it_is(connect: Connect, path: str) -> None:
    answer = connect(api_key="one").get(path)
    name = path.removeprefix("/static/") if path != "/" else "index.html"
    assert answer.status_code == 200
    assert answer.content == (FOLDER / name).read_bytes()
    assert answer.headers["content-type"] == MEDIA_TYPES[Path(name).suffix]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-cache"
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["object-src"] == "'none'"
    assert "unsafe" not in str(policy) and "http" not in str(policy) and "script-src" not in policy


@pytest.mark.parametrize("path", PATHS)
def test_what_a_browser_has_already_is_not_sent_again(connect: Connect, path: str) -> None:
    server = connect()
    whole = server.get(path)
    tag = whole.headers["etag"]
    assert re.fullmatch(r'"[0-9a-f]{32}"', tag)
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = server.get(path, headers={"If-None-Match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert server.get(path, headers={"If-None-Match": '"other"'}).status_code == 200
    head = server.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == whole.headers["content-length"] == str(len(whole.content))


@pytest.mark.parametrize(
    "path",
    [
        "/static/",
        "/static/nothing.js",
        "/static/../page.py",
        "/static/%2e%2e/page.py",
        "/static/..%2fpage.py",
        "/static/%2e%2e%2fpage.py",
        "/static//etc/passwd",
        "/static/%2fetc%2fpasswd",
        "/static/page.py",
        "/static/APP.js",
    ],
)
def test_nothing_else_of_the_disk_is_served(connect: Connect, path: str) -> None:
    assert connect().get(path).status_code in (307, 404)
    assert connect(api_key="one").get(path).status_code == 401


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_the_page_is_only_read(connect: Connect, method: str) -> None:
    answer = connect().request(method, "/")
    assert answer.status_code == 405
    assert answer.json()["error"]["code"] == "method_not_allowed"


def test_behind_a_prefix_the_page_is_the_same_and_its_folder_is_found(connect: Connect) -> None:
    server = connect(api_key="one", root_path="/vae")
    for path in PATHS:
        assert server.get("/vae" + path).content == server.get(path).content != b""
    moved = server.get("/vae")
    assert (moved.status_code, moved.headers["location"]) == (307, "http://testserver/vae/")


def test_the_files_name_no_other_host_and_no_absolute_address() -> None:
    for name in NAMES:
        text = (FOLDER / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//[a-z]+\.[a-z]", text), name
        assert not re.search(r"""(src|href|fetch|url)\s*[=(]\s*["'(]?/""", text), name


def test_lines_are_not_long() -> None:
    lines = {name: (FOLDER / name).read_text().splitlines() for name in NAMES}
    assert not [(name, line) for name, found in lines.items() for line in found if len(line) > 120]


def test_the_html_holds_no_script_and_no_style_of_its_own() -> None:
    html = (FOLDER / "index.html").read_text()
    assert re.findall(r"<script[^>]*>(.*?)</script>", html, re.DOTALL) == [""]
    assert not re.search(r"<style|\son[a-z]+=|\sstyle=|javascript:", html)
    named = re.findall(r'(?:src|href)="(static/[^"]+)"', html)
    assert {f"/{name}" for name in named} <= PAGE_PATHS
    for script in FOLDER.glob("*.js"):
        imported = re.findall(r'from "\./([^"]+)"', script.read_text())
        assert set(imported) <= set(NAMES), script.name


def test_every_element_that_a_script_asks_for_is_in_the_html() -> None:
    ids = re.findall(r'\sid="([^"]+)"', (FOLDER / "index.html").read_text())
    assert len(ids) == len(set(ids))
    for script in FOLDER.glob("*.js"):
        assert set(re.findall(r'\$\("([^"]+)"\)', script.read_text())) <= set(ids), script.name


def test_clients_are_told_what_can_be_asked_of_the_model(connect: Connect) -> None:
    (entry,) = connect().get("/v1/models").json()["data"]
    assert {name: entry[name] for name in ("id", "object", "owned_by")} == {
        "id": "m",
        "object": "model",
        "owned_by": "vllm-omni-vae",
    }
    told = entry["capabilities"]
    assert (told["medium"], told["tasks"]) == ("video", ["image-to-video", "text-to-video"])
    assert (told["spatial_multiple"], told["temporal_ratio"], told["vae_ranks"]) == (16, 4, 2)
    assert told["takes"] == sorted(CARD.takes)
    assert (told["defaults"]["width"], told["defaults"]["num_frames"], told["defaults"]["fps"]) == (64, 5, 16)
    config = EngineConfig(
        model="m",
        parallel=DiffusionParallelConfig(vae_patch_parallel_size=3),
        default_sampling_params={"num_inference_steps": 9},
    )
    (entry,) = connect(ScriptedEngine(config, card=LAYERS)).get("/v1/models").json()["data"]
    told = entry["capabilities"]
    assert (told["medium"], told["transparency"], told["max_references"], told["vae_ranks"]) == ("image", True, 1, 3)
    assert (told["defaults"]["num_inference_steps"], told["defaults"]["layers"]) == (9, 2)


@pytest.mark.slow
def test_the_wheel_has_every_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in NAMES:
            inside = archive.read(f"{vllm_omni_vae.__name__}/server/static/{name}")
            assert inside == (FOLDER / name).read_bytes(), name
