# SPDX-License-Identifier: Apache-2.0
"""What the page shows of jobs that no tiny model makes on demand: held, failed, in many parts, in layers, by dozens."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
from selenium.webdriver.common.keys import Keys

from tests.helpers.browser import Browser, chromium, watched
from vllm_omni_vae.autoencoders import Operation, select_strategy
from vllm_omni_vae.config import VaeParallelMode
from vllm_omni_vae.errors import RankError
from vllm_omni_vae.geometry import AxisScale, AxisTiling, TileGrid

from .conftest import Running, Serve
from .scripted_engine import LAYERS, ScriptedEngine

__all__ = ["chromium"]

pytestmark = pytest.mark.e2e

Open = Callable[..., Running]

TIMES = "\N{MULTIPLICATION SIGN}"


@pytest.fixture
def visit(chromium: Browser, serve: Serve) -> Iterator[Open]:
    """Start a server and open its page."""
    with contextlib.ExitStack() as watches:

        def begin(engine: ScriptedEngine | None = None) -> Running:
            server = serve(**({} if engine is None else {"engine": engine}))
            watches.enter_context(watched(chromium, server.url))
            come(chromium, server)
            return server

        yield begin


def come(browser: Browser, server: Running) -> None:
    browser.open(server.url)
    browser.until(lambda: browser.js("return 'ready' in document.body.dataset"))


def send(browser: Browser, prompt: str) -> None:
    browser.js("document.getElementById('prompt').value = ''")
    browser.find("#prompt").send_keys(prompt, Keys.CONTROL, Keys.ENTER)


def progress(browser: Browser) -> str | None:
    return browser.find("#progress").get_attribute("aria-valuetext")


def cells(browser: Browser) -> list[list[int]]:
    """The ranks in each picture."""
    code = """return Array.from(document.querySelectorAll('#made svg'),
                (one) => Array.from(one.querySelectorAll('.cell'), (cell) => Number(cell.dataset.rank)))"""
    return list(browser.js(code))


def test_a_job_that_stands_still_is_shown_where_it_stands_and_goes_on(visit: Open, chromium: Browser) -> None:
    server = visit()
    server.engine.may_finish.clear()
    send(chromium, "first")
    chromium.until(lambda: progress(chromium) == "57 percent, denoise")
    assert chromium.find("#progress").get_attribute("aria-valuenow") == "57"
    assert chromium.texts("#stages li") == ["Waiting", "Denoise", "Decode", "Export"]
    assert chromium.texts("#stages .done") == ["Waiting"] and chromium.texts("#stages .current") == ["Denoise"]
    assert chromium.find("#said").get_attribute("textContent") == "Denoise"
    assert chromium.violations() == []
    send(chromium, "second")
    chromium.until(lambda: progress(chromium) == "0 percent, waiting")
    chromium.until(lambda: chromium.texts("#gallery .state") == ["waiting", "57 %"])
    assert chromium.find("#gallery .open").accessible_name == "Show: second, waiting"
    server.engine.may_finish.set()
    chromium.until(lambda: chromium.texts("#made .prompt") == ["second"])
    chromium.until(lambda: chromium.texts("#gallery .state") == [f"64 {TIMES} 48, 0.3 s"] * 2)


def test_a_job_that_fails_says_why(visit: Open, chromium: Browser) -> None:
    server = visit()
    server.engine.fault = RankError(1, "no memory")
    send(chromium, "<b>bold</b>")
    problem = chromium.shown("#problem")
    assert (problem.aria_role, problem.text) == ("alert", "rank 1 failed: no memory rank_failed")
    assert chromium.texts("#made .prompt") == ["<b>bold</b>"]
    assert not chromium.find("#work").is_displayed()
    chromium.until(lambda: chromium.texts("#gallery .state") == ["failed: rank_failed"])
    assert chromium.violations() == []


def test_a_job_that_another_client_deletes_is_gone(visit: Open, chromium: Browser) -> None:
    server = visit()
    server.engine.may_finish.clear()
    send(chromium, "a boat")
    chromium.until(lambda: progress(chromium) == "57 percent, denoise")
    (job,) = server.http.get("/v1/videos").json()["data"]
    server.http.delete(f"/v1/videos/{job['id']}")
    assert chromium.shown("#problem").text == "The video was deleted."
    assert not chromium.find("#work").is_displayed()


def test_a_server_that_is_gone_is_said(visit: Open, chromium: Browser) -> None:
    server = visit()
    server.stop()
    send(chromium, "a boat")
    assert chromium.shown("#form-problem").text == "The server cannot be reached. unreachable"
    chromium.complaints()


def test_a_picture_for_each_stretch_of_time_and_one_for_a_shard(visit: Open, chromium: Browser) -> None:
    axis = AxisTiling(4, 3, AxisScale(up=8))
    tiles = TileGrid((AxisTiling(2, 1, AxisScale(up=4, causal=True), lead=1), axis, axis), (3, 7, 10))
    tiled = select_strategy(Operation.DECODE, VaeParallelMode.TILE, tiles, 9)
    shard = select_strategy(
        Operation.ENCODE, VaeParallelMode.SPATIAL_SHARD_GRID, tiles, 12, latents=(7, 10), can_shard=True
    )
    direct = select_strategy(Operation.DECODE, VaeParallelMode.TILE, None, 9)
    fallen = select_strategy(Operation.DECODE, VaeParallelMode.SPATIAL_SHARD_HEIGHT, tiles, 9, latents=(7, 10))
    assert fallen.fallback
    server = visit()
    server.engine.decisions = tuple(one.to_json() for one in (shard, tiled, direct, fallen))
    send(chromium, "a boat")
    chromium.until(lambda: chromium.texts("#made .prompt") == ["a boat"])
    area = tiled.grid[1] * tiled.grid[2]
    stretches = [list(tiled.owners[n * area : (n + 1) * area]) for n in range(tiled.grid[0])]
    assert cells(chromium) == [list(range(12)), *stretches, *stretches]
    heads = [text.split("\n")[0] for text in chromium.texts("#made .parts")]
    assert heads == [
        f"Encode: spatial shard grid 3 {TIMES} 4 parts on 12 ranks",
        f"Decode: tile {tiled.grid[0]} stretches of time with {tiled.grid[1]} {TIMES} {tiled.grid[2]} parts on 9 ranks",
        "Decode: direct not divided",
        f"Decode: tile {tiled.grid[0]} stretches of time with {tiled.grid[1]} {TIMES} {tiled.grid[2]} parts on 9 ranks",
    ]
    assert chromium.texts("#made .parts")[3].endswith(f"Fell back: {fallen.reason}.")
    name = chromium.all("#made svg")[1].accessible_name
    first = ", ".join(map(str, stretches[0][: tiled.grid[2]]))
    assert name.startswith(f"Decode, stretch 1 of {tiled.grid[0]}: row 1, ranks {first};")
    sizes = chromium.js(
        "return Array.from(document.querySelectorAll('#made svg text'), (one) => one.getBoundingClientRect().height)"
    )
    assert min(sizes) > 8, "a number that nobody can read"
    assert chromium.violations() == []


def test_layers_are_shown_bottom_first(visit: Open, chromium: Browser) -> None:
    visit(ScriptedEngine(card=LAYERS))
    send(chromium, "a harbour")
    chromium.until(lambda: len(chromium.texts("#made .images figcaption")) == 2)
    assert chromium.texts("#made .images figcaption") == ["Layer 1 (bottom) Download", "Layer 2 Download"]
    assert [link.get_attribute("download") for link in chromium.all("#made a")] == [
        "layer-1.png",
        "layer-2.png",
    ]
    assert chromium.find("#layers").get_attribute("value") == "2"
    assert chromium.violations() == []


def test_older_videos_come_by_the_dozen(visit: Open, chromium: Browser, serve: Serve) -> None:
    server = visit()
    for number in range(15):
        server.wait_for(server.http.post("/v1/videos", json={"prompt": f"video {number}"}).json()["id"], "completed")
    come(chromium, server)
    newest = [f"video {number}" for number in range(14, -1, -1)]
    chromium.until(lambda: chromium.texts("#gallery .words") == newest[:12])
    chromium.find("#older").click()
    chromium.until(lambda: chromium.texts("#gallery .words") == newest)
    chromium.until(lambda: chromium.focused.accessible_name.startswith("Show: video 2,"))
    assert not chromium.find("#older").is_displayed()
    chromium.all("#gallery .open")[-1].click()
    chromium.until(lambda: chromium.texts("#made .prompt") == ["video 0"])


def test_a_model_that_is_being_loaded_says_so(serve: Serve, chromium: Browser) -> None:
    engine = ScriptedEngine()
    engine.may_start.clear()
    server = serve(ready=False, engine=engine)
    with watched(chromium, server.url):
        come(chromium, server)
        chromium.until(lambda: chromium.texts("#health") == ["loading"])
        send(chromium, "a boat")
        assert "loading" in chromium.shown("#form-problem").text
        engine.may_start.set()
        chromium.until(lambda: chromium.texts("#health") == ["ready"])
