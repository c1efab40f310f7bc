# SPDX-License-Identifier: Apache-2.0
"""What lower floors need of higher ones, put here by the higher ones when they are imported."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any


@dataclasses.dataclass(slots=True)
class _Services:
    default_executor: Callable[[], Any] | None = None
    default_tuner: Callable[[], Any] | None = None
    store_of: Callable[[Any], Any] | None = None
    is_measuring: Callable[[], bool] | None = None
    config_types: Callable[[], Iterable[type]] | None = None


_services = _Services()


class Made:
    """What was made already.

    Attributes:
        executor: The default executor; `None` while there is none.
    """

    executor: Any = None


made = Made()


def provide_executor(executor: Any) -> None:
    """Say which executor is the default one now."""
    made.executor = executor


def provide(
    *,
    default_executor: Callable[[], Any] | None = None,
    default_tuner: Callable[[], Any] | None = None,
    store_of: Callable[[Any], Any] | None = None,
    is_measuring: Callable[[], bool] | None = None,
    config_types: Callable[[], Iterable[type]] | None = None,
) -> None:
    """Register the functions that make or return the given services."""
    _services.default_executor = default_executor or _services.default_executor
    _services.default_tuner = default_tuner or _services.default_tuner
    _services.store_of = store_of or _services.store_of
    _services.is_measuring = is_measuring or _services.is_measuring
    _services.config_types = config_types or _services.config_types


def default_executor() -> Any:
    """Return the executor behind `kernel(a, b)`."""
    assert _services.default_executor is not None  # `import ejkernel.ops` provides it
    return _services.default_executor()


def default_tuner() -> Any:
    """Return the tuner of chains that were not given one."""
    assert _services.default_tuner is not None  # `import ejkernel.ops` provides it
    return _services.default_tuner()


def store_of(persistent: Any) -> Any:
    """Return the store of measurements beside a persistent cache."""
    assert _services.store_of is not None  # `import ejkernel.ops` provides it
    return _services.store_of(persistent)


def is_measuring() -> bool:
    """Return whether this thread is one that candidates are measured on."""
    return _services.is_measuring is not None and _services.is_measuring()  # nothing is before such threads are loaded


def config_types() -> Iterable[type]:
    """Return the types that the kernel classes of this process name for their configurations."""
    assert _services.config_types is not None  # `import ejkernel.ops` provides it
    return _services.config_types()
