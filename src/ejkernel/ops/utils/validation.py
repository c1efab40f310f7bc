# SPDX-License-Identifier: Apache-2.0
"""Checks of what users hand in, with messages that say what is wrong, what was got, and what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

from ejkernel.ops.errors import ArgumentError, ConfigError, EjkernelError, KernelError, TuningError
from ejkernel.ops.utils.error_text import error_text, value_text

T = TypeVar("T")

_NAMED = (ArgumentError, ConfigError, KernelError, TuningError)  # and none below these, whose arguments may be others


def check_argument(is_right: bool, name: str, wanted: str, value: object) -> None:
    """Raise unless an argument is what is wanted.

    Raises:
        ArgumentError: it is not.
    """
    if not is_right:
        raise ArgumentError(f"{name} must be {wanted}, got {value_text(value)}.")


def is_count(value: object, least: int) -> bool:
    """Return whether it is an `int`, and at least so much."""
    return type(value) is int and value >= least


def asked(what: str, function: Callable[..., T], *args: object, **kwargs: object) -> T:
    """Return what a user's function returns; `what` is its name in the error if it raises.

    Raises:
        KernelError: it raises anything but an error of ours.
    """
    try:
        return function(*args, **kwargs)
    except EjkernelError:
        raise
    except Exception as error:
        raise KernelError(f"{what} raised {error_text(error)}") from error


@contextlib.contextmanager
def named(op_id: str) -> Iterator[None]:
    """Put the operation's name before the errors of its configurations, where they do not have it yet."""
    try:
        yield
    except (ArgumentError, ConfigError, KernelError, TuningError) as error:
        if type(error) not in _NAMED or str(error).startswith(op_id):
            raise
        raise type(error)(f"{op_id}: {error}") from error


def check_candidates(found: object, what: str) -> Collection[Any]:
    """Return candidates, if they are a collection.

    Raises:
        ConfigError: they are not; `what` is their name in the message.
    """
    if isinstance(found, Collection) and not isinstance(found, str | bytes | Mapping):
        return found
    hint = "; a generator can be gone through only once" if hasattr(found, "__next__") else ""
    raise ConfigError(f"{what} must be a list of configurations or a ConfigSpace, got {value_text(found)}{hint}.")
