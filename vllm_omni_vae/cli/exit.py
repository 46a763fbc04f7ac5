# SPDX-License-Identifier: Apache-2.0
"""How an error of this package ends a command."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import ConfigurationError, VaeParallelError


@contextmanager
def exit_on_error() -> Iterator[None]:
    """End the process on an error of this package with one line on stderr instead of a traceback.

    Raises:
        SystemExit: with code 2 for a `ConfigurationError`, as for a flag that cannot be parsed, else with code 1.
    """
    try:
        yield
    except VaeParallelError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, ConfigurationError) else 1) from error
