# SPDX-License-Identifier: Apache-2.0
"""The page of an image model, behind a path prefix and without a key."""

import pytest

from tests.e2e.conftest import Checkpoint, Start
from tests.e2e.media import PHOTO
from tests.helpers.browser import Browser
from tests.helpers.server import Server

pytestmark = pytest.mark.e2e

PREFIX = "/vae"
PROMPT = "the admiral before a window"


@pytest.fixture(scope="module")
def server(start: Start, checkpoint: Checkpoint) -> Server:
    """Z-Image on two VAE ranks."""
    tiles = ("--vae-tile-size", "64x64", "--vae-tile-stride", "48x48")
    flags = ("--vae-patch-parallel-size", "2", "--root-path", PREFIX)
    server = start("vllm-omni-vae", "serve", checkpoint("z-image"), *flags, *tiles)
    server.wait_until_healthy()
    return server


@pytest.fixture
def page(browser: Browser, server: Server) -> Browser:
    """The page."""
    browser.open(server.url + PREFIX)
    browser.until(lambda: browser.js("return 'ready' in document.body.dataset"))
    return browser


def ask(page: Browser, size: str) -> None:
    page.find("#prompt").send_keys(PROMPT)
    page.find("#size").send_keys(size)
    page.js("document.getElementById('more').open = true")
    page.js("document.getElementById('steps').value = 2")
    page.find("#seed").send_keys("5")


def widths(page: Browser) -> list[int]:
    return list(page.js("return Array.from(document.querySelectorAll('#made .images img'), (one) => one.naturalWidth)"))


def test_images_of_a_prompt(page: Browser) -> None:
    assert page.find("#ask-title").text == "Make an image"
    assert not page.find("#length").is_displayed()
    ask(page, "112x80")
    page.js("document.getElementById('count').value = 2")
    page.find("#submit").click()
    page.until(lambda: widths(page) == [112, 112])
    names = [image.accessible_name for image in page.all("#made .images img")]
    assert names == [f"Image 1: {PROMPT}", f"Image 2: {PROMPT}"]
    assert [link.get_attribute("download") for link in page.all("#made a")] == ["image-1.png", "image-2.png"]
    (decode,) = page.all("#made .parts svg")
    cells = [cell.get_attribute("data-rank") for cell in decode.find_elements("css selector", ".cell")]
    assert len(cells) == 6 and cells.count("0") == cells.count("1") == 3
    facts = page.find("#made .facts").text.split("\n")
    assert facts[facts.index("Seed") + 1] == "5"
    assert [row.split()[:2] for row in page.texts("#made tbody tr")] == [["0", "3"], ["1", "3"]]
    assert page.find("#gallery-title").text == "Made on this page"
    assert page.find("#gallery .open").accessible_name.startswith(f"Show: {PROMPT}")
    for scheme in ("light", "dark"):
        page.prefer(color_scheme=scheme)
        assert page.violations() == [], scheme


def test_an_image_of_another_and_the_first_one_again(page: Browser) -> None:
    ask(page, "80x112")
    page.find("#submit").click()
    page.until(lambda: widths(page) == [80])
    page.find("#image").send_keys(str(PHOTO))
    page.js("document.getElementById('size').value = '112x80'")
    page.find("#submit").click()
    page.until(lambda: widths(page) == [112])
    assert [text.split(":")[0] for text in page.texts("#made .parts")] == ["Encode", "Decode"]
    page.all("#gallery .open")[1].click()
    page.until(lambda: widths(page) == [80])


def test_what_cannot_be_made_is_said_at_the_field(page: Browser) -> None:
    ask(page, "100x80")
    page.find("#submit").click()
    assert page.shown("#form-problem").text.endswith("unsupported_size")
    assert page.focused == page.find("#size")
    assert page.find("#empty").is_displayed() and not page.find("#work").is_displayed()


def test_waiting_is_shown_without_a_number_and_ends_by_cancelling(page: Browser) -> None:
    ask(page, "112x80")
    page.js("document.getElementById('steps').value = 200")
    page.js("document.getElementById('count').value = 10")
    page.find("#submit").click()
    bar = page.shown("#progress")
    assert bar.aria_role == "progressbar" and bar.get_attribute("aria-valuenow") is None
    assert bar.get_attribute("aria-valuetext") == "working"
    page.find("#cancel").click()
    assert page.find("#empty").is_displayed() and not page.find("#work").is_displayed()
    page.js("document.getElementById('steps').value = 1")
    page.js("document.getElementById('count').value = 1")
    page.find("#submit").click()
    page.until(lambda: widths(page) == [112])
