# SPDX-License-Identifier: Apache-2.0
"""Nothing here differentiates anything; property tests are not timed."""

from collections.abc import Iterator

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
