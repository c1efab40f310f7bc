# SPDX-License-Identifier: Apache-2.0
"""The `ejkernel` command."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    try:
        from ejkernel.cli import app  # inside `try`: the import takes a while, and Ctrl-C may arrive
    except KeyboardInterrupt:
        return 130
    return app.main(argv)
