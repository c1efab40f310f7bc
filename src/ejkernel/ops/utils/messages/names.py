# SPDX-License-Identifier: Apache-2.0
"""Messages about unknown names and wrong arguments, with the closest known name."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import inspect
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, ParamSpec, Self, TypeVar

from ejkernel.ops.errors import ArgumentError, CallError, ConfigError, EjkernelError, KernelError, TuningError
from ejkernel.ops.utils.error_text import value_text

P = ParamSpec("P")
R = TypeVar("R")

_BUDGET = "limit the time of tuning with `with policy_override(budget_s=...)` from ejkernel.ops."
#: Names of a limit for tuning, which `autotune` does not take.
BUDGETS: Final = dict.fromkeys(("budget", "budget_s", "seconds", "time", "time_limit", "timeout"), _BUDGET)

_REJECTED: Final = re.compile(r"([\w.<>]+)\.__init__\(\) got an unexpected keyword argument '(\w+)'")
#: Attributes of arrays that a kernel reads, and that other values lack.
_OF_ARRAYS: Final = frozenset(("shape", "dtype", "ndim", "size", "T", "reshape", "astype", "sum", "mean", "at"))
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_PREFIXED = (ArgumentError, ConfigError, KernelError, TuningError)  # without subclasses: their constructors may differ


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


def nearest(name: object, names: Iterable[str], least: float = 0.6) -> str | None:
    """Return the known name that is most similar to a misspelt name, or else the shortest that starts or ends with it.

    E.g. `xla` for `xal`, `mosaic_gpu` for `mos`, `nvidia_h200` for `H200`, the last word of that name. `None` if no
    similarity reaches `least` (0 to 1) and no known name starts or ends with `name`, or `name` has fewer than three
    letters. Case does not matter.
    """
    if not isinstance(name, str):
        return None
    by_lower = {known.lower(): known for known in names}
    given = name.lower()
    close = difflib.get_close_matches(given, list(by_lower), n=1, cutoff=least)
    if not close and len(given) > 2:
        parts = [known for known in by_lower if known.startswith(given) or known.endswith(f"_{given}")]
        close = sorted(parts, key=len)
    return by_lower[close[0]] if close else None


def did_you_mean(name: object, names: Iterable[str], least: float = 0.6) -> str:
    """Return the end of a message about an unknown name: `"; did you mean 'cudnn'?"`, or `"."` if no name is close."""
    found = nearest(name, names, least)
    return "." if found is None else f"; did you mean {found!r}?"


def misfit(
    called: str,
    signature: inspect.Signature,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    aliases: Mapping[str, str] | None = None,
) -> CallError | None:
    """Return an error if arguments do not fit a signature; `None` if they fit.

    Args:
        called: The name of the function, for the message.
        signature: The signature of the function.
        args, kwargs: The arguments.
        aliases: Names of its arguments in other libraries, such as `{"is_causal": "causal"}`. A value may also be a
            sentence of advice.
    """
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        problem = _unknown_names(called, signature, kwargs, aliases or {}) or _too_many(called, signature, args)
        return CallError(problem or f"{called}: {error}")
    return None


def raise_if_misfit(
    called: str,
    function: Callable[..., Any],
    args: Sequence[object],
    kwargs: Mapping[str, Any],
    aliases: Mapping[str, str] | None = None,
) -> None:
    """Raise if a call failed because of its arguments, rather than inside the function; see `misfit`.

    Raises:
        CallError: The arguments do not fit the function's signature.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # Python knows no signature
        return
    wrong = misfit(called, signature, args, kwargs, aliases)
    if wrong is not None:
        raise wrong from None


def names_checked(aliases: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function name the right argument when a call uses an unknown name; see `misfit`.

    The tracebacks of ejkernel's errors leave out frames inside the function, unless `JAX_TRACEBACK_FILTERING=off`.
    Type checkers see the function itself. A call pays for one more Python call.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        called, signature = getattr(function, "__name__", repr(function)), inspect.signature(function)

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                try:
                    return function(*args, **kwargs)
                except EjkernelError:
                    raise
                except TypeError:
                    found = misfit(called, signature, args, kwargs, aliases)
                    if found is None:  # the function itself raised the error
                        raise
                    raise found from None
                except Exception as error:
                    _raise_if_of_shardings(called, error)
                    raise
            except EjkernelError as error:
                hide_frames(error)
                raise  # without a name: `raise error` would add this frame again

        return checked

    return decorate


def _raise_if_of_shardings(called: str, error: Exception) -> None:
    """Raise if JAX rejected the shardings of a call's arrays over explicit mesh axes.

    Raises:
        ArgumentError: JAX did.
    """
    from ejkernel import compat  # imports JAX, which commands start without

    if compat.partitioning.rejects_shardings(error):
        why = str(error).partition(". ")[0].rstrip(".")
        raise ArgumentError(
            f"{called}: JAX rejects the shardings of these arrays over explicit mesh axes ({why}); use "
            "jax.sharding.reshard to shard the arrays alike first, or to replicate an axis."
        ) from error


def hide_frames(error: Exception) -> None:
    """Make the traceback of an error end at the user's line, unless `JAX_TRACEBACK_FILTERING=off`.

    Raise the error again with a bare `raise`, which adds no frame.
    """
    from ejkernel import compat  # imports JAX, which commands start without

    compat.programs.without_our_frames(error)


class NamedFields:
    """Base of classes that users create, mostly dataclasses: an error about a wrong field suggests the right one."""

    __slots__ = ()
    _names_elsewhere: ClassVar[Mapping[str, str]] = {}  # aliases of fields; see `misfit`
    _example: ClassVar[str] = ""  # a call, shown if an argument is unknown

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Create an instance after a check of the names of its fields."""
        if args or not kwargs.keys() <= getattr(cls, "__dataclass_fields__", {}).keys():
            try:
                raise_if_misfit(cls.__name__, cls, args, kwargs, cls._names_elsewhere)
            except CallError as error:
                raise (CallError(f"{error} For example: {cls._example}") if cls._example else error) from None
        return super().__new__(cls)


def frames_hidden(function: Callable[P, R]) -> Callable[P, R]:
    """Hide the frames of a public function in the tracebacks of our errors; a call pays for one more Python call."""

    @functools.wraps(function)
    def hidden(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except EjkernelError as error:
            hide_frames(error)
            raise

    return hidden


def field_advice(error: BaseException) -> str:
    """Return the end of the message about an error in a hook of a kernel; `""` without advice.

    It has the fields of a user's dataclass if the error is about an unknown one, says where a call's arguments are, or
    that an argument must be an array.
    """
    if isinstance(error, AttributeError) and type(error.obj).__name__ == "Invocation":
        return "; the arguments of the call are inv.args and inv.kwargs, e.g. inv.args[0].shape."
    if advice := array_advice(error):
        return f"; {advice}"
    found = _REJECTED.match(str(error)) if type(error) is TypeError else None
    if found is None or error.__traceback__ is None:
        return ""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    name = found[1].rpartition(".")[2]
    kind = frame.f_locals.get(name, frame.f_globals.get(name))
    if not dataclasses.is_dataclass(kind):
        return ""
    fields = [field.name for field in dataclasses.fields(kind) if field.init]
    close = nearest(found[2], fields)
    return f"; its fields are {', '.join(fields) or 'none'}." if close is None else f"; did you mean {close!r}?"


def array_advice(error: BaseException) -> str:
    """Return a sentence about an attribute of arrays that a list, a number or `None` lacks; `""` for other errors."""
    if not isinstance(error, AttributeError) or error.name not in _OF_ARRAYS:
        return ""
    if not isinstance(error.obj, list | tuple | int | float | complex | str | bytes | None):
        return ""
    what = "None" if error.obj is None else f"this {type(error.obj).__name__}"
    how = "" if isinstance(error.obj, str | bytes | None) else ", e.g. jnp.asarray(...)"
    return f"if {what} is an argument of the call, pass an array instead{how}."


def _unknown_names(
    called: str, signature: inspect.Signature, kwargs: Mapping[str, object], aliases: Mapping[str, str]
) -> str:
    parameters = signature.parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return ""
    known = [p.name for p in parameters if p.kind in _NAMED]
    unknown = [name for name in kwargs if name not in known]
    return " ".join(
        f"{'It' if index else called} has no argument `{name}`{_advice(name, known, aliases)}"
        for index, name in enumerate(unknown)
    )


def _advice(name: str, known: Sequence[str], aliases: Mapping[str, str]) -> str:
    alias = aliases.get(name, "")
    if alias in known:
        return f"; use `{alias}=`."
    if alias and not alias.isidentifier():  # an identifier is an argument of another function in the module
        return f": {alias}"
    close = nearest(name, known)
    if close is not None:
        return f"; did you mean `{close}=`?"
    return f"; its arguments are {', '.join(known)}." if known else "; it takes none by name."


def _too_many(called: str, signature: inspect.Signature, args: Sequence[object]) -> str:
    parameters = signature.parameters.values()
    positional = [p.name for p in parameters if p.kind in _POSITIONAL]
    if len(args) <= len(positional) or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return ""
    count = f"{len(positional)} argument{'s' * (len(positional) != 1)}"
    which = f" ({', '.join(positional)})" if positional else ""
    by_name = [f"{p.name}=" for p in parameters if p.kind is p.KEYWORD_ONLY]
    rest = f"; pass the others by name: {', '.join(by_name)}." if by_name else "."
    return f"{called} takes {count} by position{which}, got {len(args)}{rest}"


@contextlib.contextmanager
def named(op_id: str) -> Iterator[None]:
    """Prefix errors in a `with` block with the operation's name, unless they already start with it."""
    try:
        yield
    except _PREFIXED as error:
        if type(error) not in _PREFIXED or str(error).startswith(op_id):
            raise
        raise type(error)(f"{op_id}: {error}") from error
