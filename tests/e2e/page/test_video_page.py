# SPDX-License-Identifier: Apache-2.0
"""The page of a video model that needs an image and a key, used as people use it."""

from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from tests.e2e.conftest import Checkpoint, Start
from tests.e2e.media import PHOTO, file_of, photo
from tests.helpers.browser import Browser
from tests.helpers.server import Server

pytestmark = pytest.mark.e2e

KEY = "none"  # what the tests' clients send
PROMPT = "a boat leaves the harbour"
STAGES = ["queued", "encode", "denoise", "decode", "export"]
SMALL: dict[str, Any] = {"size": "160x112", "num_frames": 5, "num_inference_steps": 2, "seed": 3}

# Keeps every state that the progress bar has been in: its stage and its percent.
RECORD = """
    window.states = [];
    const bar = document.getElementById("progress");
    const note = () => {
      const stage = document.querySelector("#stages [aria-current=step]")?.dataset.stage;
      if (bar.hasAttribute("aria-valuenow")) states.push([stage, Number(bar.getAttribute("aria-valuenow"))]);
    };
    new MutationObserver(note).observe(bar, { attributes: true, attributeFilter: ["aria-valuetext"] });
"""


@pytest.fixture(scope="module")
def server(start: Start, checkpoint: Checkpoint) -> Server:
    """Wan from images on two VAE ranks, in tiles of four latents, with a key."""
    tiles = ("--vae-tile-size", "64x64", "--vae-tile-stride", "48x48")
    flags = ("--vae-patch-parallel-size", "2", "--api-key", KEY, "--served-model-name", "harbour/wan")
    server = start("vllm-omni-vae", "serve", checkpoint("wan2.2-i2v"), *flags, *tiles)
    server.wait_until_healthy()
    return server


@pytest.fixture
def page(browser: Browser, server: Server) -> Browser:
    """The page, unlocked."""
    browser.open(server.url)
    browser.shown("#key").send_keys(KEY, Keys.ENTER)
    ready(browser)
    return browser


@pytest.fixture(scope="module")
def clip(server: Server) -> Any:
    """A clip that a program has made."""
    return server.generate(prompt="an old clip", input_reference=file_of(photo(160, 112)), **SMALL)


def ready(browser: Browser) -> None:
    browser.until(lambda: browser.js("return 'ready' in document.body.dataset"))


def fill(page: Browser, **fields: str) -> None:
    """Fill in fields by their ids."""
    for name, text in {"prompt": PROMPT, "size": "160x112", "length": "5", **fields}.items():
        page.js("arguments[0].value = ''", page.find(f"#{name}"))
        page.find(f"#{name}").send_keys(text)
    page.find("#image").send_keys(str(PHOTO))


def test_a_wrong_key_is_asked_for_again_and_a_right_one_kept_as_long_as_one_likes(
    browser: Browser, server: Server
) -> None:
    browser.open(server.url)
    dialog = browser.shown("#key-dialog")
    assert (dialog.aria_role, dialog.accessible_name) == ("dialog", "This server needs a key")
    assert browser.focused.accessible_name == "API key"
    browser.press("wröng", Keys.ENTER)
    assert browser.shown("#key-wrong").aria_role == "alert"
    browser.press(KEY, Keys.ENTER)
    ready(browser)
    assert not dialog.is_displayed()
    assert browser.js("return sessionStorage.length + localStorage.length") == 0
    browser.driver.refresh()
    browser.shown("#key").send_keys(KEY)
    browser.find("#keep").click()
    browser.find("#key").send_keys(Keys.ENTER)
    ready(browser)
    browser.driver.refresh()
    ready(browser)
    assert not browser.find("#key-dialog").is_displayed()
    browser.js("sessionStorage.clear()")


def test_who_gives_no_key_can_still_give_it_later(browser: Browser, server: Server) -> None:
    browser.open(server.url)
    browser.shown("#key-dialog")
    browser.press(Keys.ESCAPE)
    assert "invalid_api_key" in browser.shown("#form-problem").text
    browser.find("#prompt").send_keys(PROMPT)
    browser.find("#submit").click()
    browser.shown("#key").send_keys(KEY, Keys.ENTER)
    ready(browser)
    assert browser.find("#model").text == "wan"


def test_a_clip_by_the_keyboard_alone(page: Browser, server: Server) -> None:
    page.js(RECORD)
    page.tab_to("Skip to the form")
    page.press(Keys.ENTER)
    page.tab_to("Prompt").send_keys(PROMPT)
    page.tab_to("First frame").send_keys(str(PHOTO))
    assert page.find(".previews img").accessible_name == f"Preview of {PHOTO.name}"
    page.retype("Size", "160x112")
    page.retype("Length", "9")
    page.tab_to("More settings").send_keys(Keys.ENTER)
    page.retype("Steps", "4")
    page.retype("Seed", "7").send_keys(Keys.ENTER)
    page.shown("#made video")

    states = page.js("return states")
    percents = [percent for _, percent in states]
    assert percents == sorted(percents) and percents[0] == 0
    assert sum(40 > percent > 0 for percent in percents) and sum(95 > percent >= 40 for percent in percents)
    passed = list(dict.fromkeys(stage for stage, _ in states))
    assert passed == [stage for stage in STAGES if stage in passed] and {"denoise", "decode"} <= set(passed)
    assert page.find("#said").get_attribute("textContent") == "The video is ready"

    (job,) = [job for job in server.openai.videos.list(limit=1).data if job.prompt == PROMPT]
    assert (job.size, job.num_frames, job.seed) == ("160x112", 9, 7)  # type: ignore[attr-defined]
    video = page.find("#made video")
    assert video.accessible_name == f"Video: {PROMPT}"
    page.until(lambda: video.get_property("readyState") == 4)
    assert (video.get_property("videoWidth"), video.get_property("videoHeight")) == (160, 112)
    page.js("arguments[0].loop = false", video)
    page.tab_to(f"Video: {PROMPT}").send_keys(Keys.SPACE)
    page.until(lambda: video.get_property("ended"))
    assert float(video.get_property("currentTime")) == pytest.approx(9 / 16, abs=0.02)

    for operation, drawing in zip(("encode", "decode"), page.all("#made .parts svg"), strict=True):
        (decision,) = [one for one in job.vae if one["operation"] == operation]  # type: ignore[attr-defined]
        cells = [int(str(cell.get_attribute("data-rank"))) for cell in drawing.find_elements("css selector", ".cell")]
        assert cells == decision["owners"] and len(cells) == decision["grid"][1] * decision["grid"][2]
        assert [cells.count(rank) for rank in (0, 1)] == decision["tiles_per_rank"]
        shown = [text.text for text in drawing.find_elements("css selector", "text")]
        assert shown == list(map(str, cells))
        assert drawing.aria_role in ("img", "image")
        width = decision["grid"][2]
        first = ", ".join(map(str, cells[:width]))
        assert drawing.accessible_name.startswith(f"{operation.capitalize()}: row 1, ranks {first};")
    ranks = [row.split()[:2] for row in page.texts("#made tbody tr")]
    total = [sum(one["tiles_per_rank"][rank] for one in job.vae) for rank in (0, 1)]  # type: ignore[attr-defined]
    assert ranks == [["0", str(total[0])], ["1", str(total[1])]]
    download = page.find("#made a[download]")
    assert download.get_attribute("download") == f"{job.id}.mp4"
    page.until(lambda: page.texts("#gallery .words")[:1] == [PROMPT])
    page.until(lambda: page.find("#gallery .card img").get_property("naturalWidth"))


def test_names_roles_and_contrast(page: Browser, clip: Any) -> None:
    page.shown("#gallery .open").click()
    page.shown("#made video")
    expected = {
        "main": ("main", ""),
        "header": ("banner", ""),
        ".ask": ("region", "Make a video"),
        ".result": ("region", "Result"),
        ".gallery": ("region", "Recent videos"),
        "#prompt": ("textbox", "Prompt"),
        "#length": ("textbox", "Length"),
        "#unit": ("combobox", "Unit of the length"),
        "#submit": ("button", "Make it"),
        "#gallery .small": ("button", "Delete: an old clip"),
    }
    assert {at: (page.find(at).aria_role, page.find(at).accessible_name) for at in expected} == expected
    assert page.find("#gallery .open").accessible_name.startswith("Show: an old clip")
    assert page.find("html").get_attribute("lang") == "en"
    page.js("document.getElementById('more').open = true")
    for scheme in ("light", "dark"):
        page.prefer(color_scheme=scheme)
        assert page.violations() == [], scheme


@pytest.mark.parametrize("width", [360, 390, 899, 1280])
def test_nothing_sticks_out_at_any_width(page: Browser, clip: Any, width: int) -> None:
    page.resize(width, 844)
    page.shown("#gallery .open").click()
    page.shown("#made video")
    page.js("document.getElementById('more').open = true")
    assert page.js("return document.documentElement.scrollWidth") == width
    assert page.violations() == []


def test_what_the_model_cannot_make_is_said_at_the_field(page: Browser) -> None:
    fill(page, size="100x100")
    page.find("#submit").click()
    problem = page.shown("#form-problem")
    assert problem.aria_role == "alert"
    assert "nearest: 96 or 112" in problem.text and problem.text.endswith("unsupported_size")
    size = page.find("#size")
    assert page.focused == size and size.get_attribute("aria-invalid") == "true"
    assert page.violations() == []
    size.send_keys("1")
    assert not problem.is_displayed() and size.get_attribute("aria-invalid") is None


def test_without_an_image_nothing_is_sent(page: Browser, server: Server) -> None:
    before = len(server.openai.videos.list(limit=100).data)
    page.find("#prompt").send_keys(PROMPT)
    page.find("#submit").click()
    assert page.focused == page.find("#image")
    assert len(server.openai.videos.list(limit=100).data) == before


def test_a_running_job_is_found_again_and_cancelled(page: Browser, server: Server) -> None:
    fill(page, size="320x240", length="33")
    page.js("document.getElementById('steps').value = 200")
    page.find("#submit").click()
    page.shown("#work")
    page.until(lambda: int(page.find("#progress").get_attribute("aria-valuenow") or 0) > 0)
    page.driver.refresh()
    page.shown("#key").send_keys(KEY, Keys.ENTER)
    page.shown("#cancel")
    page.until(lambda: int(page.find("#progress").get_attribute("aria-valuenow") or 0) > 0)
    (job,) = [job for job in server.openai.videos.list(limit=1).data if job.status == "in_progress"]
    page.find("#cancel").click()
    page.until(lambda: not page.find("#work").is_displayed() and page.find("#empty").is_displayed())
    assert job.id not in [one.id for one in server.openai.videos.list(limit=100).data]


def test_a_clip_is_made_again_with_another_prompt_and_both_are_deleted(page: Browser, server: Server) -> None:
    old = server.generate(prompt="first words", input_reference=file_of(photo(160, 112)), **SMALL)
    page.driver.refresh()
    page.shown("#key").send_keys(KEY, Keys.ENTER)
    page.shown("#gallery .open").click()
    page.shown("#made video")
    page.find("#made .buttons button").click()
    assert page.focused == page.find("#prompt")
    assert not page.find("#size").is_enabled()
    page.focused.send_keys("second words", Keys.CONTROL, Keys.ENTER)
    page.until(lambda: page.texts("#made .prompt") == ["second words"])
    assert page.find("#size").is_enabled()
    new = server.openai.videos.list(limit=1).data[0]
    assert (new.prompt, new.remixed_from_video_id) == ("second words", old.id)
    for prompt in ("second words", "first words"):
        page.until(lambda prompt=prompt: page.texts("#gallery .words")[:1] == [prompt])
        page.find("#gallery .small").click()
        dialog = page.shown("#delete-dialog")
        assert dialog.accessible_name == "Delete this video?" and prompt in dialog.text
        page.find("#delete-dialog .danger").click()
        page.until(lambda prompt=prompt: prompt not in page.texts("#gallery .words"))
    left = {job.id for job in server.openai.videos.list(limit=100).data}
    assert not left & {old.id, new.id}
    assert page.find("#empty").is_displayed() and not page.find("#made").is_displayed()


def test_less_motion_for_those_who_ask_for_it(page: Browser) -> None:
    page.prefer(reduced_motion="reduce")
    assert page.js("return getComputedStyle(document.getElementById('fill')).transitionDuration") == "0s"
    page.js("document.getElementById('progress').classList.add('unmeasured')")
    assert page.js("return getComputedStyle(document.getElementById('fill')).animationName") == "none"
