# SPDX-License-Identifier: Apache-2.0
"""What lower floors need of higher ones, put here by the higher ones when they are imported.

There are two such things, which nobody could hand down as arguments:

- the default executor, which `kernel(a, b)` asks without being given one;
- the tier that searches, which a chain has by itself, and which needs all of the tuner.
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
    """What was made already.

    Attributes:
        executor: The default executor; `None` while there is none.
    """

    executor: Any = None


made = Made()


def provide_executor(executor: object) -> None:
    """Say which executor is the default one now."""
    made.executor = executor


def provide(
    *,
    default_executor: Callable[[], Any] | None = None,
    autotune_tier: Callable[[], Any] | None = None,
) -> None:
    """Register the functions that make or return the given services."""
    _services.default_executor = default_executor or _services.default_executor
    _services.autotune_tier = autotune_tier or _services.autotune_tier


def default_executor() -> Any:
    """Return the executor behind `kernel(a, b)`."""
    assert _services.default_executor is not None  # `import ejkernel.ops` provides it
    return _services.default_executor()


def autotune_tier() -> Any:
    """Return what searches for a chain."""
    assert _services.autotune_tier is not None  # `import ejkernel.ops` provides it
    return _services.autotune_tier()
