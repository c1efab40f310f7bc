# SPDX-License-Identifier: Apache-2.0
"""Lines for a user who waits at a terminal."""

from __future__ import annotations

import sys

from ejkernel.ops.utils.error_text import printable


def say_on_terminal(text: str) -> None:
    """Print a line on standard error if that is a terminal."""
    if sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(f"{printable(text)}\n")
