# SPDX-License-Identifier: Apache-2.0
"""The page in a browser, against a server with a tiny model on the CPU."""

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import CPU
from tests.helpers.browser import Browser, chromium, watched
from tests.helpers.server import Server

__all__ = ["chromium"]


@pytest.fixture(scope="module", params=[CPU])
def hardware(request: pytest.FixtureRequest) -> str:
    """The CPU alone: what the page does is the same on every hardware."""
    return request.param


@pytest.fixture
def browser(chromium: Browser, server: Server) -> Iterator[Browser]:
    """The browser, in light and with much room; it has then talked to ``server`` alone, and nothing was blocked."""
    with watched(chromium, server.url):
        yield chromium
