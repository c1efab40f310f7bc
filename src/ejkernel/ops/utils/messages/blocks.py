# SPDX-License-Identifier: Apache-2.0
"""Errors about objects in a `with` statement that must be called there, or do not belong there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

from ejkernel.ops.errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")


class NoBlock:
    """Base of classes that users put into a `with` statement by mistake; `_instead` is what to write."""

    __slots__ = ()
    _instead = ""

    def __enter__(self) -> NoReturn:
        raise ArgumentError(f"{type(self).__name__} is no context manager: write `{self._instead}`.")

    def __exit__(self, *error: object) -> None:
        """Do nothing: `__enter__` always raises."""


class _Called:
    """A function that returns a context manager, with an error if a `with` statement has the function itself."""

    def __init__(self, function: Callable[..., Any], example: str) -> None:
        functools.update_wrapper(self, function)
        self._function, self._example = function, example

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> str:
        return self._function.__qualname__

    def __enter__(self) -> NoReturn:
        raise ArgumentError(f"{self._function.__name__} must be called: write `with {self._example}:`.")

    def __exit__(self, *error: object) -> None:
        """Do nothing: `__enter__` always raises."""


def called_in_with(example: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make `with function:` an error that shows the call, such as `policy_override(autotune=True)`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        return cast(Callable[P, R], _Called(function, example))

    return decorate
