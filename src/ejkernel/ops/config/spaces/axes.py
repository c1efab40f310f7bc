# SPDX-License-Identifier: Apache-2.0
"""One axis of a configuration space, and the numbers that a search sees of its values."""

from __future__ import annotations

import dataclasses
import functools
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
_LONG = 64  # values beyond which an axis' neighbours are a selection, and its categories share columns
_NEAR = 16  # of a long axis: so many to each side are neighbours, and then those at powers of two
_SHARED = 32  # columns of a long axis of categories
_LOOKED_AT = 1 << 16  # values of a range that say how often two divides them
_EXACT = 2.0**53  # below this, a float is the whole number that it was made of
_SHOWN = 8

_BOOLEAN, _TEXT, _NAN = object(), object(), object()


@dataclasses.dataclass(frozen=True)
class Axis:
    """One parameter of a configuration.

    Making one looks at each value once, and at a `range` not at all; nothing that is done with it later takes longer
    the more values there are.

    Attributes:
        name: The parameter.
        values: What it may be, in order; neighbours in this order are neighbours in a search.
        numeric: Whether the values are numbers, or all of them booleans; else they are categories, all equally far
            apart.
    """

    name: str
    values: Sequence[Any]
    numeric: bool
    _levels: dict[Any, int] = dataclasses.field(repr=False, compare=False)

    @classmethod
    def of(cls, name: str, values: Sequence[object]) -> Axis:
        """Return the axis.

        Raises:
            ConfigError: there are no values, or one is there twice, or they are too many to have positions.
        """
        if not _are_values(values) or not isinstance(name, str):
            raise ConfigError(f"axes must map a name to a sequence of values, got {name!r}: {values!r}.")
        try:
            values = values if isinstance(values, range) else tuple(values)
            count = len(values)
        except (TypeError, OverflowError) as error:
            raise ConfigError(f"axis {name!r} must be a sequence of values, got {values!r}: {error}.") from error
        if not count:
            raise ConfigError(f"axis {name!r} must have at least one value, got none.")
        if isinstance(values, range) and is_number(values[0]) and is_number(values[-1]):
            return cls(name, values, numeric=True, _levels={})
        values = tuple(values)
        levels: dict[Any, int] = {}
        for level, value in enumerate(values):
            if levels.setdefault(value_key(value), level) != level:
                raise ConfigError(f"axis {name!r} must name each value once, got {value!r} twice.")
        booleans = sum(type(value) is bool for value in values)
        numeric = booleans in (0, count) and all(map(is_number, values))
        return cls(name, values, numeric, levels)

    def __len__(self) -> int:
        return len(self.values)

    def level(self, value: Any) -> int | None:
        """Return the position of `value`; `None` if the axis does not have it."""
        if not isinstance(self.values, range):
            return self._levels.get(value_key(value))
        if isinstance(value, bool | np.bool_) or not is_number(value) or int(value) != value:
            return None
        return self.values.index(int(value)) if int(value) in self.values else None

    def nearest_first(self, level: int) -> list[tuple[int, int]]:
        """Return `(distance, level)` of other values, adjacent ones first; categories are all adjacent.

        They are all the other values, or of a long axis those nearby and some at growing distances. Of two values
        each is among the other's, or neither is.
        """
        count = len(self.values)
        steps: Iterable[int] = range(1, count)
        if count > _LONG:
            steps = (*range(1, _NEAR + 1), *(1 << k for k in range(_NEAR.bit_length(), count.bit_length())))
        others = [other for step in steps for other in (level - step, level + step) if 0 <= other < count]
        return sorted((abs(other - level) if self.numeric else 1, other) for other in others)

    def shown(self) -> str:
        """Return the values as text that is short, however many there are."""
        if isinstance(self.values, range) or len(self.values) <= 2 * _SHOWN:
            return repr(self.values)
        return f"({', '.join(map(repr, self.values[:_SHOWN]))}, ... {len(self.values)} values)"

    def encode(self, values: Sequence[object], *, aligned_from: int = ALIGNED_FROM) -> Floats:
        """Return the columns that stand for `values`, one row a value; they need not be values of the axis.

        Numbers take one column, 0 at the least and 1 at the greatest, on a log scale if they are positive and span a
        factor of four; whole numbers that are not all powers of two take a second one, by how many times two divides
        them: what fits a warp, a vector load or a memory line differs from its neighbours. Categories take a column
        each; the distance between two of them is 1, and a value that is not on the axis is equally far from all.
        Very many categories share columns, so that their distances are 1 on average.

        Args:
            values: What to encode.
            aligned_from: How many values an axis must have for the second column.

        Raises:
            ConfigError: the axis is numeric and a value is not a number.
        """
        if len(self.values) == 1:
            return np.zeros((len(values), 0))
        if not self.numeric:
            return self._one_hot(values) if len(self.values) <= _LONG else self._mixed(values)
        for value in values:
            if not is_number(value):
                raise ConfigError(f"axis {self.name!r} has numbers, got {value!r}; give one of {self.shown()}.")
        given = np.asarray(values, np.float64)
        low, high = self._span
        columns = [_scaled(given, low, high, geometric=low > 0 and high >= _GEOMETRIC * low)]
        if len(self.values) >= aligned_from and self._alignment is not None:
            columns.append(_scaled(_twos(given), *self._alignment, geometric=False))
        return np.stack(columns, axis=1)

    def encode_levels(self, levels: npt.NDArray[np.intp], *, aligned_from: int = ALIGNED_FROM) -> Floats:
        """Return what `encode` does, for positions of values."""
        distinct, inverse = np.unique(levels, return_inverse=True)
        values = [self.values[level] for level in distinct.tolist()]
        return self.encode(values, aligned_from=aligned_from)[inverse.reshape(-1)]

    @functools.cached_property
    def _span(self) -> tuple[float, float]:
        if isinstance(self.values, range):
            low, high = sorted((self.values[0], self.values[-1]))
            return float(low), float(high)
        own = np.asarray(self.values, np.float64)
        return float(own.min()), float(own.max())

    @functools.cached_property
    def _alignment(self) -> tuple[float, float] | None:
        """The least and the greatest number of times that two divides a value; `None` if that tells nothing."""
        own = np.asarray(self.values[:_LOOKED_AT] if isinstance(self.values, range) else self.values)
        if own.dtype.kind not in "iu" or own.min() <= 0 or (own & (own - 1) == 0).all():
            return None
        twos = _twos(own.astype(np.float64))
        low, high = float(twos.min()), float(twos.max())
        return (low, high) if low < high else None

    def _one_hot(self, values: Sequence[object]) -> Floats:
        encoded = np.zeros((len(values), len(self.values)))
        for row, value in enumerate(values):
            level = self.level(value)
            if level is not None:
                encoded[row, level] = math.sqrt(0.5)
        return encoded

    def _mixed(self, values: Sequence[object]) -> Floats:
        """Return a row of signs for each value, which are as good as drawn at random; for none of the axis, zeros."""
        levels = [self.level(value) for value in values]
        mixed = np.array([0 if level is None else level + 1 for level in levels], np.uint64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        signs = (mixed[:, None] >> np.arange(_SHARED, dtype=np.uint64)) & np.uint64(1)
        known = np.array([level is not None for level in levels])[:, None]
        encoded: Floats = np.where(known, (2.0 * signs - 1.0) * math.sqrt(0.5 / _SHARED), 0.0)
        return encoded


def _are_values(values: object) -> bool:
    return isinstance(values, Iterable) and not isinstance(values, str | bytes)


def is_number(value: object) -> bool:
    """Return whether this is a number that has a place on a scale."""
    if type(value) is int:
        return -1e300 < value < 1e300
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # a whole number or a fraction that no float comes near
        return False


def value_key(value: object) -> Any:
    """Tell `1` and `True` apart, also in tuples; compare what cannot be hashed by its text, and not-a-numbers as one.

    What is equal otherwise is the same: `1` and `1.0`.
    """
    if type(value) in (int, str):
        return value
    if isinstance(value, bool | np.bool_):
        return _BOOLEAN, bool(value)
    if isinstance(value, float | np.floating):
        return value if value == value else _NAN
    if type(value) is tuple:
        return tuple(map(value_key, value))
    try:
        hash(value)
    except TypeError:
        return _TEXT, repr(value)
    return value


def _scaled(given: Floats, low: float, high: float, *, geometric: bool) -> Floats:
    if not math.isfinite(high - low):
        given, low, high = given / 4, low / 4, high / 4
    if geometric:
        given, low, high = np.log2(np.maximum(given, low / 2)), float(np.log2(low)), float(np.log2(high))
    if low == high:  # whole numbers that differ, but not as floats
        return np.zeros(len(given))
    span: Floats = (given - low) / (high - low)
    return span


def _twos(given: Floats) -> Floats:
    """Return how many times two divides each number; other than positive whole numbers count as odd."""
    whole = np.where((given > 0) & (given == np.floor(given)) & (given < _EXACT), given, 1).astype(np.int64)
    twos: Floats = np.log2(whole & -whole)
    return twos
