# SPDX-License-Identifier: Apache-2.0
"""A real Chromium without a window, and what a person does with it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from axe_core_python.selenium import Axe
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

PROGRAMS = ("chromium", "chromedriver")
PATIENCE = 60.0
# Nothing that the browser would ask for by itself.
_ARGUMENTS = (
    "--headless=new",
    "--hide-scrollbars",
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-proxy-server",
)


def missing() -> list[str]:
    """The programs that a browser test needs and this machine does not have."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


class Browser:
    """Chromium with one tab; ``driver`` is selenium's.

    Args:
        folder: For its profile and its log.
    """

    def __init__(self, folder: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which(PROGRAMS[0]) or ""
        for argument in (*_ARGUMENTS, f"--user-data-dir={folder / 'profile'}"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        os.environ["SE_AVOID_STATS"] = "true"
        service = Service(shutil.which(PROGRAMS[1]), log_output=str(folder / "chromedriver.log"))
        self.driver = webdriver.Chrome(options, service)
        self.resize(1280, 900)
        self._addresses: list[str] = []

    def close(self) -> None:
        """End it."""
        self.driver.quit()

    def resize(self, width: int, height: int) -> None:
        """Give the page that many pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, **features: str) -> None:
        """What the person has chosen in their system, such as ``color_scheme="dark"``."""
        wanted = [{"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wanted})

    def open(self, url: str) -> None:
        """Go to a page."""
        self.driver.get(url)

    def find(self, selector: str) -> WebElement:
        """The first element that a CSS selector fits."""
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        """Every element that a CSS selector fits."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        """What can be read in every element that a CSS selector fits."""
        code = "return Array.from(document.querySelectorAll(arguments[0]), (one) => one.innerText)"
        return list(self.js(code, selector))

    def js(self, code: str, *arguments: Any) -> Any:
        """Run JavaScript in the page and return what it returns."""
        return self.driver.execute_script(code, *arguments)

    def until(self, condition: Callable[[], Any], seconds: float = PATIENCE) -> Any:
        """Return what ``condition`` returns once that is true."""
        return WebDriverWait(self.driver, seconds, 0.05).until(lambda _: condition())

    def shown(self, selector: str) -> WebElement:
        """Return an element once it can be seen."""
        self.until(lambda: any(element.is_displayed() for element in self.all(selector)))
        return next(element for element in self.all(selector) if element.is_displayed())

    @property
    def focused(self) -> WebElement:
        """The element that the keyboard acts on."""
        return self.driver.switch_to.active_element

    def press(self, *keys: str) -> None:
        """Press keys one after the other, wherever the focus is."""
        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def tab_to(self, name: str, most: int = 40) -> WebElement:
        """Press Tab until the focus is on what has the accessible name ``name``.

        Raises:
            AssertionError: it is not reached; has the names that are.
        """
        seen = []
        for _ in range(most):
            self.press(Keys.TAB)
            if self.focused.accessible_name == name:
                return self.focused
            seen.append(self.focused.accessible_name)
        raise AssertionError(f"Tab never reaches {name!r}, but {seen}")

    def retype(self, name: str, text: str) -> WebElement:
        """Tab to a field and replace what is in it."""
        field = self.tab_to(name)
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(text)
        return field

    def violations(self) -> list[str]:
        """What axe-core finds wrong with the page as it is, contrast included."""
        found = Axe().run(self.driver)["violations"]
        return [f"{one['id']}: {node['html']}" for one in found for node in one["nodes"]]

    def addresses(self) -> list[str]:
        """Every address that the browser has asked for in pages so far."""
        self._addresses += list(_requests(self.driver.get_log("performance")))
        return self._addresses

    def complaints(self) -> list[str]:
        """What the console has said, except of answers that are errors; a broken content policy is among it."""
        log = [entry["message"] for entry in self.driver.get_log("browser")]
        return [message for message in log if "Failed to load resource: the server responded" not in message]


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all tests. Where there is none they are skipped, but not in CI."""
    lacking = missing()
    if lacking:
        reason = f"there is no {' and no '.join(lacking)}; Debian's packages are chromium and chromium-driver"
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(reason)
        pytest.skip(reason)
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@contextlib.contextmanager
def watched(browser: Browser, url: str) -> Iterator[None]:
    """Light, and much room; the browser then has talked to the server at ``url`` alone, and nothing was blocked.

    Raises:
        AssertionError: another host was asked for, or the console has complaints; has them.
    """
    browser.resize(1280, 900)
    browser.prefer(color_scheme="light")
    browser.addresses().clear()
    yield
    hosts = {urlsplit(one).netloc for one in browser.addresses() if not one.startswith(("blob:", "data:"))}
    assert hosts == {urlsplit(url).netloc}
    assert browser.complaints() == []
    browser.open("about:blank")  # the page would go on asking how the server is


def _requests(log: list[dict[str, Any]]) -> Iterator[str]:
    for entry in log:
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            yield message["params"]["request"]["url"]
