# SPDX-License-Identifier: Apache-2.0
"""One axis of a configuration space, and the numeric features of its values for the search model."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from ejkernel.ops.errors import ConfigError

Floats = npt.NDArray[np.float64]
Levels = npt.NDArray[np.intp]

_GEOMETRIC = 4.0  # positive values that span at least this factor are compared by ratio, not by difference
ALIGNED_FROM = 3  # an axis with fewer values gets no column for alignment
_LONG = 64  # an axis with more values has a selection of neighbours, and its categories share columns
_NEAR = 16  # neighbours on each side of a value on a long axis; further ones are at powers of two
_SHARED = 32  # columns of a long axis of categories
_LOOKED_AT = 1 << 16  # values of a range that are examined for their alignment
_EXACT = 2.0**53  # smaller integers are exact in float64
_SHOWN = 8

_BOOLEAN, _TEXT, _NAN = object(), object(), object()


@dataclasses.dataclass(frozen=True)
class Axis:
    """One parameter of a configuration.

    Creating an axis examines each value once, and the values of a `range` never. The cost of later operations does not
    grow with the number of values.

    Attributes:
        name: The parameter.
        values: Its values, in order; neighbours in this order are neighbours in a search.
        numeric: Whether all values are numbers, or all are booleans; otherwise they are equally distant categories.
    """

    name: str
    values: Sequence[Any]
    numeric: bool
    _levels: dict[Any, int] = dataclasses.field(repr=False, compare=False)

    @classmethod
    def of(cls, name: str, values: Sequence[object]) -> Axis:
        """Return the axis.

        Raises:
            ConfigError: There are no values, a value is repeated, or there are too many values to index.
        """
        if not are_values(values) or not isinstance(name, str):
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
        """Return `(distance, level)` of other values, nearest first; all categories have distance 1.

        A long axis returns the nearby values and a few at growing distances. The relation is symmetric.
        """
        count = len(self.values)
        steps: Iterable[int] = range(1, count)
        if count > _LONG:
            steps = (*range(1, _NEAR + 1), *(1 << k for k in range(_NEAR.bit_length(), count.bit_length())))
        others = [other for step in steps for other in (level - step, level + step) if 0 <= other < count]
        return sorted((abs(other - level) if self.numeric else 1, other) for other in others)

    def shown(self) -> str:
        """Return the values as short text, with `...` in place of most of a long list."""
        if isinstance(self.values, range) or len(self.values) <= 2 * _SHOWN:
            return repr(self.values)
        return f"({', '.join(map(repr, self.values[:_SHOWN]))}, ... {len(self.values)} values)"

    def encode(self, levels: Levels, *, aligned_from: int = ALIGNED_FROM) -> Floats:
        """Return the features of the values at these positions, one row for each.

        Numbers have one column from 0 (smallest) to 1 (largest), on a log scale if they are positive and span a factor
        of four. Integers that are not all powers of two have a second column, the number of times that two divides
        them, because a size that fits a warp, a vector load or a memory line behaves unlike its neighbours. Categories
        have one column each, at distance 1 from each other. Very many categories share columns, so their distances are
        1 on average.

        Args:
            levels: The positions of the values.
            aligned_from: The number of values from which an axis has the second column.
        """
        if len(self.values) == 1:
            return np.zeros((len(levels), 0))
        if not self.numeric:
            few = len(self.values) <= _LONG
            return math.sqrt(0.5) * (levels[:, None] == np.arange(len(self.values))) if few else _mixed(levels)
        given = np.asarray([self.values[level] for level in levels.tolist()], np.float64)
        low, high = self._span
        columns = [_scaled(given, low, high, geometric=low > 0 and high >= _GEOMETRIC * low)]
        if len(self.values) >= aligned_from and self._alignment is not None:
            columns.append(_scaled(_twos(given), *self._alignment, geometric=False))
        return np.stack(columns, axis=1)

    @functools.cached_property
    def _span(self) -> tuple[float, float]:
        if isinstance(self.values, range):
            low, high = sorted((self.values[0], self.values[-1]))
            return float(low), float(high)
        own = np.asarray(self.values, np.float64)
        return float(own.min()), float(own.max())

    @functools.cached_property
    def _alignment(self) -> tuple[float, float] | None:
        """The smallest and largest number of times that two divides a value; `None` if they are equal."""
        own = np.asarray(self.values[:_LOOKED_AT] if isinstance(self.values, range) else self.values)
        if own.dtype.kind not in "iu" or own.min() <= 0 or (own & (own - 1) == 0).all():
            return None
        twos = _twos(own.astype(np.float64))
        low, high = float(twos.min()), float(twos.max())
        return (low, high) if low < high else None


def are_values(values: object) -> TypeGuard[Iterable[Any]]:
    """Return whether `values` may be the values of an axis, in a fixed order."""
    # The order of a set differs between processes, and the identity of a space must not.
    return isinstance(values, Iterable) and not isinstance(values, str | bytes | set | frozenset | Mapping)


def is_number(value: object) -> bool:
    """Return whether `value` is a finite real number within the range of float64."""
    if type(value) is int:
        return -1e300 < value < 1e300
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # an integer or a fraction beyond the range of floats
        return False


def value_key(value: object) -> Any:
    """Return a hashable key that distinguishes `1` from `True`, also inside tuples.

    Unhashable values are compared by their text, and all NaNs are one value. Otherwise equal values share a key, such
    as `1` and `1.0`.
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


def _mixed(levels: Levels) -> Floats:
    """Return a row of pseudo-random signs for each level."""
    mixed = levels.astype(np.uint64) + np.uint64(1)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    signs = (mixed[:, None] >> np.arange(_SHARED, dtype=np.uint64)) & np.uint64(1)
    return np.where(signs, math.sqrt(0.5 / _SHARED), -math.sqrt(0.5 / _SHARED))


def _scaled(given: Floats, low: float, high: float, *, geometric: bool) -> Floats:
    if not math.isfinite(high - low):
        given, low, high = given / 4, low / 4, high / 4
    if geometric:
        given, low, high = np.log2(np.maximum(given, low / 2)), float(np.log2(low)), float(np.log2(high))
    if low == high:  # different integers that round to the same float
        return np.zeros(len(given))
    span: Floats = (given - low) / (high - low)
    return span


def _twos(given: Floats) -> Floats:
    """Return how many times two divides each number; 0 for anything but a positive integer."""
    whole = np.where((given > 0) & (given == np.floor(given)) & (given < _EXACT), given, 1).astype(np.int64)
    twos: Floats = np.log2(whole & -whole)
    return twos
