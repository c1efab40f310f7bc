# SPDX-License-Identifier: Apache-2.0
"""JAX operations that configure themselves: ejkernel chooses, tunes, saves and explains their configurations."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import metadata  # takes longer to import than the rest of this package

    return metadata.version("ejkernel-ops")
