# SPDX-License-Identifier: Apache-2.0
"""Services of higher layers for lower layers. The higher layers register them here when they are imported.

`Shown` imports a higher layer on first use. Two services cannot be passed as arguments:

- the default executor, which `kernel(a, b)` uses;
- the autotune tier, which every selector chain has, and which depends on the whole tuner.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


class Made:
    """The services.

    Attributes:
        executor: The default executor; `None` before it is created.
        default_executor: Returns the default executor, creating it if necessary.
        autotune_tier: Returns a new autotune tier for a selector chain.
    """

    executor: Any = None
    default_executor: Callable[[], Any]  # `import ejkernel.ops` provides this and the next
    autotune_tier: Callable[[], Any]


made = Made()


def provide(*, default_executor: Callable[[], Any], autotune_tier: Callable[[], Any]) -> None:
    """Register functions that create or return the services."""
    made.default_executor, made.autotune_tier = default_executor, autotune_tier


class Shown:
    """A base class for objects that notebooks show as HTML if Jinja2 is installed, and as text otherwise.

    `ejkernel.ops.notebook` has a function for each subclass that returns the parts of its HTML.
    """

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        # By name: the module knows the classes of all layers, and only notebooks need it.
        html: str | None = importlib.import_module("ejkernel.ops.notebook").html_of(self)
        return html
