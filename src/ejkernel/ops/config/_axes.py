# SPDX-License-Identifier: Apache-2.0
"""One axis of a configuration space, and the numbers that a search sees of its values."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ejkernel.ops.errors import ConfigError

Floats = npt.NDArray[np.float64]

_GEOMETRIC = 4.0  # positive values that span at least this factor are compared by ratio, not by difference
ALIGNED_FROM = 3  # fewer values than this say too little about alignment to spend a column on it


@dataclasses.dataclass(frozen=True, slots=True)
class Axis:
    """One parameter of a configuration.

    Attributes:
        name: The parameter.
        values: What it may be, in order; neighbours in this order are neighbours in a search.
        numeric: Whether the values are numbers (booleans count); else they are categories, all equally far apart.
    """

    name: str
    values: tuple[Any, ...]
    numeric: bool
    _levels: dict[Any, int] = dataclasses.field(repr=False, compare=False)

    @classmethod
    def of(cls, name: str, values: Sequence[Any]) -> Axis:
        """Return the axis.

        Raises:
            ConfigError: there are no values, or one is there twice.
        """
        if not _are_values(values) or not isinstance(name, str):
            raise ConfigError(f"axes must map a name to a sequence of values, got {name!r}: {values!r}.")
        values = tuple(values)
        if not values:
            raise ConfigError(f"axis {name!r} must have at least one value, got none.")
        levels: dict[Any, int] = {}
        for level, value in enumerate(values):
            if levels.setdefault(value_key(value), level) != level:
                raise ConfigError(f"axis {name!r} must name each value once, got {value!r} twice.")
        return cls(name, values, all(is_number(value) for value in values), levels)

    def level(self, value: Any) -> int | None:
        """Return the position of `value`; `None` if the axis does not have it."""
        return self._levels.get(value_key(value))

    def nearest_first(self, level: int) -> list[tuple[int, int]]:
        """Return `(distance, level)` of the other values, adjacent ones first; categories are all adjacent."""
        others = (other for other in range(len(self.values)) if other != level)
        return sorted((abs(other - level) if self.numeric else 1, other) for other in others)

    def encode(self, values: Sequence[Any], *, aligned_from: int = ALIGNED_FROM) -> Floats:
        """Return the columns that stand for `values`, one row a value; they need not be values of the axis.

        Numbers take one column, 0 at the least and 1 at the greatest, on a log scale if they are positive and span a
        factor of four; whole numbers that are not all powers of two take a second one, by how many times two divides
        them: what fits a warp, a vector load or a memory line differs from its neighbours. Categories take a column
        each; the distance between two of them is 1, and a value that is not on the axis is equally far from all.

        Args:
            values: What to encode.
            aligned_from: How many values an axis must have for the second column.

        Raises:
            ConfigError: the axis is numeric and a value is not a number.
        """
        if len(self.values) == 1:
            return np.zeros((len(values), 0))
        if not self.numeric:
            return self._one_hot(values)
        for value in values:
            if not is_number(value):
                raise ConfigError(f"axis {self.name!r} has numbers, got {value!r}; give one of {self.values!r}.")
        numbers, own = np.asarray(values, np.float64), np.asarray(self.values, np.float64)
        columns = [_scaled(numbers, own, geometric=own.min() > 0 and own.max() >= _GEOMETRIC * own.min())]
        if self._has_alignment(aligned_from):
            columns.append(_scaled(_twos(numbers), _twos(own), geometric=False))
        return np.stack(columns, axis=1)

    def _one_hot(self, values: Sequence[Any]) -> Floats:
        encoded = np.zeros((len(values), len(self.values)))
        for row, value in enumerate(values):
            level = self.level(value)
            if level is not None:
                encoded[row, level] = math.sqrt(0.5)
        return encoded

    def _has_alignment(self, aligned_from: int) -> bool:
        if len(self.values) < aligned_from or not all(
            isinstance(value, (int, np.integer)) and value > 0 for value in self.values
        ):
            return False
        powers_of_two = all(value & (value - 1) == 0 for value in self.values)
        return not powers_of_two and len({value & -value for value in self.values}) > 1


def _are_values(values: Any) -> bool:
    return isinstance(values, Iterable) and not isinstance(values, str)


def is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


def value_key(value: Any) -> Any:
    """Tell `1` and `True` apart, and compare what cannot be hashed by its text."""
    try:
        hash(value)
    except TypeError:
        value = repr(value)
    return isinstance(value, bool), value


def _scaled(numbers: Floats, own: Floats, *, geometric: bool) -> Floats:
    if geometric:
        numbers, own = np.log2(np.maximum(numbers, own.min() / 2)), np.log2(own)
    span: Floats = (numbers - own.min()) / (own.max() - own.min())
    return span


def _twos(numbers: Floats) -> Floats:
    """Return how many times two divides each number; other than positive whole numbers count as odd."""
    whole = np.where((numbers > 0) & (numbers == np.floor(numbers)), numbers, 1).astype(np.int64)
    twos: Floats = np.log2(whole & -whole)
    return twos
