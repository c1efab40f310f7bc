# SPDX-License-Identifier: Apache-2.0
"""Services of higher layers for lower layers. The higher layers register them here when they are imported.

Two services cannot be passed as arguments:

- the default executor, which `kernel(a, b)` uses;
- the autotune tier, which every selector chain has, and which depends on the whole tuner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(slots=True)
class _Services:
    default_executor: Callable[[], Any] | None = None
    autotune_tier: Callable[[], Any] | None = None


_services = _Services()


class Made:
    """Services that already exist.

    Attributes:
        executor: The default executor; `None` before it is created.
    """

    executor: Any = None


made = Made()


def provide_executor(executor: object) -> None:
    """Set the current default executor."""
    made.executor = executor


def provide(
    *,
    default_executor: Callable[[], Any] | None = None,
    autotune_tier: Callable[[], Any] | None = None,
) -> None:
    """Register functions that create or return the services."""
    _services.default_executor = default_executor or _services.default_executor
    _services.autotune_tier = autotune_tier or _services.autotune_tier


def default_executor() -> Any:
    """Return the executor behind `kernel(a, b)`."""
    assert _services.default_executor is not None  # `import ejkernel.ops` provides it
    return _services.default_executor()


def autotune_tier() -> Any:
    """Return a new autotune tier for a selector chain."""
    assert _services.autotune_tier is not None  # `import ejkernel.ops` provides it
    return _services.autotune_tier()
