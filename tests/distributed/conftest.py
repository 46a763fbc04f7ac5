# SPDX-License-Identifier: Apache-2.0
"""Worlds of processes, shared by all tests here."""

from collections.abc import Iterator

import pytest

from tests.distributed.ranks import Worlds


@pytest.fixture(scope="package")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    running = Worlds(tmp_path_factory.mktemp("worlds"))
    yield running
    running.close()
