# SPDX-License-Identifier: Apache-2.0
"""The conditions on a configuration: what they read, and what is said when one of them raises."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ejkernel.ops.errors import ConfigError
from ejkernel.ops.utils.error_text import error_text, where
from ejkernel.ops.utils.validation import check_argument

_NAMED = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_SHOWN = 16  # axes that a message names
_CALL = 8  # `Effort` for calling a constraint


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
    """A condition and the axes that it reads.

    Attributes:
        holds: The condition.
        reads: The axes whose values it gets; `None` for the whole assignment.
        by_name: Whether it gets them by name, rather than in order, or as a dictionary if it gets them all.
    """

    holds: Callable[..., Any]
    reads: tuple[str, ...] | None
    by_name: bool

    @classmethod
    def of(cls, holds: Callable[..., Any], names: Mapping[str, int]) -> Constraint:
        """Return the constraint; one that is made already stays what it is.

        Raises:
            ConfigError: it cannot be called, or reads what is no axis.
        """
        if isinstance(holds, Constraint):
            return holds
        if not callable(holds):
            raise ConfigError(f"constraints must be functions that return whether they hold, got {holds!r}.")
        try:
            parameters = inspect.signature(holds).parameters
        except (TypeError, ValueError):  # some built-in functions have no signature
            return cls(holds, None, by_name=False)
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            return cls(holds, None, by_name=True)
        # One with a default that is no axis is the function's own affair, as in `lambda rows, limit=limit: ...`.
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
        """Return whether it holds.

        Raises:
            ConfigError: it raised; the message names it and the assignment.
        """
        # In any case a dictionary of its own: it may change what it gets.
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
    """Return the conditions that `constraints` stands for.

    Raises:
        ArgumentError: they are none.
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
    """Return what a user recognises a constraint by."""
    return f"the constraint {where(inspect.unwrap(holds))}"


def cost_of(constraint: Constraint, names: Sequence[str]) -> int:
    """Return the approximate `Effort` of one call; `names` are the axes that it may read."""
    return _CALL + len(constraint.reads or names)


def by_last(constraints: Iterable[Constraint], order: Iterable[str]) -> tuple[tuple[Constraint, ...], ...]:
    """Return, for each axis of `order`, the constraints that can be checked once it is chosen after those before it.

    They are in the order in which they were given, so that one may keep another from what it could not bear.
    """
    depths = {name: depth for depth, name in enumerate(order)}
    checks: list[list[Constraint]] = [[] for _ in depths]
    for constraint in constraints:
        checks[max(map(depths.__getitem__, constraint.reads or depths))].append(constraint)
    return tuple(map(tuple, checks))


def _short(assignment: Mapping[str, object]) -> str:
    items = [f"{name!r}: {value!r}" for name, value in list(assignment.items())[:_SHOWN]]
    return "{" + ", ".join([*items, *(["..."] if len(assignment) > _SHOWN else [])]) + "}"
