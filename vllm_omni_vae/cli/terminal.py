# SPDX-License-Identifier: Apache-2.0
"""A line for a person who waits."""

import sys


def tell(what: str) -> None:
    """Show ``what`` on the terminal in place of what was shown before; where there is none, do nothing."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{what}", end="", file=sys.stderr, flush=True)
