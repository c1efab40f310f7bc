# SPDX-License-Identifier: Apache-2.0
"""JAX operations whose configuration is chosen, measured, remembered and explained by the library."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import metadata  # takes longer to import than all else here

    return metadata.version("ejkernel-ops")
