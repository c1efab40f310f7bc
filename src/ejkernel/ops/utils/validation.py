# SPDX-License-Identifier: Apache-2.0
"""Checks of user arguments. The messages state the problem, the value, and the fix."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

import jax

from ejkernel.ops.errors import ArgumentError, ConfigError, EjkernelError, KernelError, TuningError
from ejkernel.ops.utils.error_text import error_text, value_text
from ejkernel.ops.utils.formatting import compact
from ejkernel.ops.utils.messages.names import array_advice, field_advice
from ejkernel.ops.utils.values.signature import is_array

T = TypeVar("T")

_HOOKS = ("describe", "unsupported", "heuristic", "space", "params_fault", "doubt", "preference")
_RAN_WITH = " ran with "
_NAMED = (ArgumentError, ConfigError, KernelError, TuningError)  # without subclasses: their constructors may differ


def check_argument(is_right: bool, name: str, wanted: str, value: object) -> None:
    """Check an argument; `wanted` describes valid values in the message.

    Raises:
        ArgumentError: `is_right` is false.
    """
    if not is_right:
        raise ArgumentError(f"{name} must be {wanted}, got {value_text(value)}.")


def is_count(value: object, least: int) -> bool:
    """Return whether `value` is an `int` of at least `least`."""
    return type(value) is int and value >= least


def is_call(value: object) -> bool:
    """Return whether `value` is `(args, kwargs)`, and not e.g. `(array, {})`."""
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    return isinstance(value[0], tuple | list) and isinstance(value[1], Mapping)


def asked(what: str, function: Callable[..., T], *args: object, **kwargs: object) -> T:
    """Call a user's function and return its result; `what` names the function in the error.

    Raises:
        KernelError: The function raised an exception that is not an ejkernel error.
    """
    try:
        return function(*args, **kwargs)
    except EjkernelError:
        raise
    except Exception as error:
        inner = _inner_hook(error)
        raise KernelError(f"{what}{inner and f': {inner}'} raised {error_text(error)}{field_advice(error)}") from error


def _inner_hook(error: BaseException) -> str:
    """Return the name of the user's method, of an operation or an implementation, that raised; empty if none did."""
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner, _, name = frame.f_code.co_qualname.rpartition(".")
        if owner and name in _HOOKS and not str(frame.f_globals.get("__name__")).startswith("ejkernel."):
            found = f"{owner.rpartition('.')[2]}.{name}"
    return found


def call_that_raised(error: BaseException) -> str:
    """Return the note of `noting` with the call that raised an exception; empty without one."""
    return next((note for note in getattr(error, "__notes__", ()) if _RAN_WITH in note), "")


@contextlib.contextmanager
def noting(op_id: str, config: object, arguments: object) -> Iterator[None]:
    """Add notes to an exception in a `with` block, unless it is ejkernel's.

    They have the configuration and the types of the arrays, and say if an argument must be an array.
    """
    try:
        yield
    except EjkernelError:
        raise
    except Exception as error:
        arrays = ", ".join(str(jax.typeof(leaf)) for leaf in jax.tree.leaves(arguments) if is_array(leaf))
        error.add_note(f"{op_id}{_RAN_WITH}{compact(config)}{f' for {arrays}' if arrays else ''}.")
        if advice := array_advice(error):
            error.add_note(f"{advice[:1].upper()}{advice[1:]}")
        lists = jax.tree.leaves(arguments, is_leaf=_is_list) if isinstance(error, TypeError) else ()
        if any(map(_is_list_of_numbers, lists)):
            error.add_note("An argument is a list of numbers, which JAX does not convert: pass jnp.asarray(...).")
        raise


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _is_list_of_numbers(value: object) -> bool:
    """Return whether a value is a list, perhaps nested, of nothing but numbers or tracers of numbers."""
    return _is_list(value) and all(getattr(leaf, "ndim", 0) == 0 for leaf in jax.tree.leaves(value))


@contextlib.contextmanager
def named(op_id: str) -> Iterator[None]:
    """Prefix errors in a `with` block with the operation's name, unless they already start with it."""
    try:
        yield
    except (ArgumentError, ConfigError, KernelError, TuningError) as error:
        if type(error) not in _NAMED or str(error).startswith(op_id):
            raise
        raise type(error)(f"{op_id}: {error}") from error


def check_candidates(found: object, what: str) -> Collection[Any]:
    """Return the candidates after checking that they are a collection; `what` names them in the message.

    Raises:
        ConfigError: The candidates are not a collection.
    """
    if isinstance(found, Collection) and not isinstance(found, str | bytes | Mapping):
        return found
    hint = "; a generator can be iterated only once" if hasattr(found, "__next__") else ""
    raise ConfigError(f"{what} must be a list of configurations or a ConfigSpace, got {value_text(found)}{hint}.")
