# SPDX-License-Identifier: Apache-2.0
"""The `ejkernel` command."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    try:
        from ejkernel.cli import app  # which takes a while, and Ctrl-C may come meanwhile
    except KeyboardInterrupt:
        return 130
    return app.main(argv)
