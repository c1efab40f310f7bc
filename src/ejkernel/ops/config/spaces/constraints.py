# SPDX-License-Identifier: Apache-2.0
"""Constraints on configurations: which axes they read, and the error when one of them raises."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ejkernel.ops.errors import ConfigError
from ejkernel.ops.utils.error_text import error_text, where
from ejkernel.ops.utils.messages.names import check_argument

_NAMED = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_SHOWN = 16  # axes named in a message
_CALL = 8  # `Effort` for calling a constraint
_COUNTED = 100_000  # maximum assignments of the axes of a constraint to count its rejections
_NAMED_CONSTRAINTS = 6  # constraints named in a message about an empty space


@dataclasses.dataclass(slots=True)
class Effort:
    """A budget of values to examine: unlike a time limit, it gives the same result on every machine."""

    left: int

    def spend(self, amount: int = 1) -> bool:
        """Subtract `amount` and return whether that much was left."""
        self.left -= amount
        return self.left >= 0


@dataclasses.dataclass(frozen=True, slots=True)
class Constraint:
    """A predicate and the axes that it reads.

    Attributes:
        holds: The predicate.
        reads: The axes whose values it receives; `None` for the whole assignment.
        by_name: Whether the values are keyword arguments, rather than positional ones or one dictionary.
    """

    holds: Callable[..., Any]
    reads: tuple[str, ...] | None
    by_name: bool

    @classmethod
    def of(cls, holds: Callable[..., Any], names: Mapping[str, int]) -> Constraint:
        """Return `holds` as a constraint; a `Constraint` is returned unchanged.

        Raises:
            ConfigError: One of its parameters is not an axis.
        """
        if isinstance(holds, Constraint):
            return holds
        try:
            parameters = inspect.signature(holds).parameters
        except (TypeError, ValueError):  # some built-in functions have no signature
            return cls(holds, None, by_name=False)
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            return cls(holds, None, by_name=True)
        # A parameter with a default need not be an axis, as in `lambda rows, limit=limit: ...`.
        read = {n: p for n, p in parameters.items() if n in names or p.default is inspect.Parameter.empty}
        unknown = [name for name in read if name not in names]
        if read and not unknown:
            by_name = all(parameter.kind in _NAMED for parameter in read.values())
            return cls(holds, tuple(read), by_name)
        if len(read) == 1 and next(iter(read.values())).kind is not inspect.Parameter.KEYWORD_ONLY:
            return cls(holds, None, by_name=False)
        raise ConfigError(
            f"the parameters of {described(holds)} must be axes, or one for the whole assignment, got "
            f"{unknown!r}; the axes are {', '.join(list(names)[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}."
        )

    def __call__(self, assignment: Mapping[str, object]) -> bool:
        """Return whether the assignment satisfies the constraint.

        Raises:
            ConfigError: The predicate raised; the message names it and the assignment.
        """
        # a copy, because the predicate may change its argument
        given = dict(assignment) if self.reads is None else {name: assignment[name] for name in self.reads}
        try:
            if self.by_name:
                return bool(self.holds(**given))
            if self.reads is None:
                return bool(self.holds(given))
            return bool(self.holds(*given.values()))
        except Exception as error:
            hint = "" if self.reads is not None or self.by_name else " It gets the whole assignment, a dictionary."
            raise ConfigError(
                f"{described(self.holds)} raised {error_text(error)}, for {_short(given)}.{hint} It must "
                "return whether a configuration is possible."
            ) from error


def given_constraints(constraints: Any) -> list[Callable[..., Any]]:
    """Return the `constraints=` argument of a space as a list; a single predicate becomes a list of one.

    Raises:
        ArgumentError: It is neither a predicate nor an iterable of predicates; `None` is neither.
    """
    given = [constraints] if callable(constraints) else constraints
    check_argument(
        isinstance(given, Iterable) and not isinstance(given, str | Mapping),
        "constraints",
        "a condition, which is a function, or several",
        constraints,
    )
    listed = list(given)
    for holds in listed:
        check_argument(callable(holds), "each of constraints", "a function of values of axes", holds)
    return listed


def described(holds: Callable[..., Any]) -> str:
    """Return the name and source location of a constraint, for messages."""
    return f"the constraint {where(inspect.unwrap(holds))}"


def rejections(constraints: Iterable[Constraint], axes: Mapping[str, Sequence[object]]) -> str:
    """Return how many configurations each constraint rejects, in words, the strictest first; empty without constraints.

    Args:
        constraints: The constraints of a space without valid configurations.
        axes: The values of all its axes by name.
    """
    total = math.prod(map(len, axes.values()))
    counts = sorted(((_rejected(each, axes), each) for each in constraints), key=lambda item: -item[0])
    parts = [
        f"{described(each.holds)}, which reads {', '.join((each.reads or tuple(axes))[:_SHOWN])}, rejects "
        f"{f'{count:,}' if count >= 0 else 'a number of them that is too costly to count'}"
        for count, each in counts[:_NAMED_CONSTRAINTS]
    ]
    if not parts:
        return ""
    more = [f"{len(counts) - len(parts)} others reject fewer"] if len(counts) > len(parts) else []
    return f" Of {total:,} configurations, {'; '.join([*parts, *more])}. Relax a constraint, or add values."


def _rejected(constraint: Constraint, axes: Mapping[str, Sequence[object]]) -> int:
    """Return the number of configurations that a constraint rejects by itself; -1 if they are too many to count."""
    own = {name: axes[name] for name in constraint.reads or axes}
    count = math.prod(map(len, own.values()))
    if count > _COUNTED:
        return -1
    rejected = sum(
        _rejects(constraint, dict(zip(own, values, strict=True))) for values in itertools.product(*own.values())
    )
    return rejected * (math.prod(map(len, axes.values())) // count)


def _rejects(constraint: Constraint, assignment: Mapping[str, object]) -> bool:
    try:
        return not constraint(assignment)
    except ConfigError:  # an earlier constraint guards it, e.g. against a division by zero, and rejects the assignment
        return False


def cost_of(constraint: Constraint, names: Sequence[str]) -> int:
    """Return the approximate `Effort` of one call; `names` are the axes that it may read."""
    return _CALL + len(constraint.reads or names)


def by_last(constraints: Iterable[Constraint], order: Iterable[str]) -> tuple[tuple[Constraint, ...], ...]:
    """Return, for each axis of `order`, the constraints that can be checked as soon as that axis is chosen.

    Constraints keep their given order, so that an earlier one can guard a later one, e.g. against a division by zero.
    """
    depths = {name: depth for depth, name in enumerate(order)}
    checks: list[list[Constraint]] = [[] for _ in depths]
    for constraint in constraints:
        checks[max(map(depths.__getitem__, constraint.reads or depths))].append(constraint)
    return tuple(map(tuple, checks))


def _short(assignment: Mapping[str, object]) -> str:
    items = [f"{name!r}: {value!r}" for name, value in list(assignment.items())[:_SHOWN]]
    return "{" + ", ".join([*items, *(["..."] if len(assignment) > _SHOWN else [])]) + "}"
