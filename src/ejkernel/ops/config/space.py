# SPDX-License-Identifier: Apache-2.0
"""`ConfigSpace`: the configurations of a kernel as axes and constraints, counted, sampled and encoded for a search."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from ejkernel.ops.config._axes import Axis, Floats, Ints
from ejkernel.ops.errors import ConfigError

Cfg = TypeVar("Cfg")
Point = tuple[int, ...]  # for each axis, the position of its value

ENUMERATED = 20_000  # configurations up to which a space counts as small: all are listed, and a search ranks all
_VISITS = 2_000_000  # partial assignments looked at before a space counts as large, or as empty
_PROBES = 2_000  # random assignments that the size of a large space is estimated from


@dataclasses.dataclass(frozen=True, slots=True)
class _Constraint:
    """A condition and the axes that it reads; `None`: the whole assignment."""

    holds: Callable[..., Any]
    reads: tuple[str, ...] | None

    def __call__(self, assignment: Mapping[str, Any]) -> bool:
        if self.reads is None:
            return bool(self.holds(assignment))
        return bool(self.holds(**{name: assignment[name] for name in self.reads}))


class ConfigSpace(Generic[Cfg]):
    """Configurations declared by axes and constraints, rather than listed.

    Nothing is enumerated before it is needed, and a large space never is: it is sampled. Everything random takes a
    NumPy generator and is the same for the same generator.

    >>> space = ConfigSpace(
    ...     {"block_q": [64, 128, 256], "block_kv": [64, 128], "order": ["row", "column"]},
    ...     constraints=lambda block_q, block_kv: block_q * block_kv <= 16384,
    ... )
    >>> len(space)
    10
    >>> next(iter(space))
    {'block_q': 64, 'block_kv': 64, 'order': 'row'}

    Args:
        axes: The values of each axis, by name, in their order. Numbers are taken as such; an axis with anything else
            (text, `None`) is categorical.
        constraints: One condition, or several, that a configuration has to meet. One whose parameters are names of
            axes gets their values, and is checked as soon as these are chosen; one with a single other parameter
            gets the whole assignment, a mapping from axis to value.
        build: Makes a configuration of an assignment: a dataclass, which is called with the assignment's values by
            name, or a function of the assignment. By default a configuration is the assignment, a dictionary.
        read: The way back, from a configuration to its assignment. By default a mapping's items or an object's
            attributes of the axes' names.

    Raises:
        ConfigError: there is no axis; an axis has no values, or one twice; a constraint reads an unknown axis.
    """

    def __init__(
        self,
        axes: Mapping[str, Sequence[Any]],
        *,
        constraints: Callable[..., Any] | Iterable[Callable[..., Any]] = (),
        build: Callable[[dict[str, Any]], Cfg] | type[Cfg] | None = None,
        read: Callable[[Cfg], Mapping[str, Any]] | None = None,
    ) -> None:
        if not axes:
            raise ConfigError("axes must name at least one axis, got none; a single configuration needs no space.")
        self.axes: tuple[Axis, ...] = tuple(Axis.of(name, values) for name, values in axes.items())
        given = [constraints] if callable(constraints) else list(constraints)
        self._constraints = tuple(_constraint(holds, tuple(axes)) for holds in given)
        self._ready = _checked_after(self._constraints, self.names)
        self._build = build
        self._read = read
        self._all: list[Point] | None = None
        self._members: frozenset[Point] | None = None
        self._size: tuple[int, bool] | None = None

    @classmethod
    def listed(cls, configurations: Iterable[Cfg], *, read: Callable[[Cfg], Mapping[str, Any]] | None = None) -> ConfigSpace[Cfg]:
        """Return the space of exactly these configurations: mappings, or dataclasses, all with the same fields.

        Raises:
            ConfigError: there is none; they differ in their fields; or one is neither mapping nor dataclass.
        """
        configs = list(configurations)
        if not configs:
            raise ConfigError("configurations must not be empty; list at least one.")
        rows = [dict(read(config)) if read else _fields(config) for config in configs]
        names = tuple(rows[0])
        if not names or any(tuple(row) != names for row in rows):
            raise ConfigError(f"configurations must have the same fields, and at least one; the first has {names!r}.")
        axes = {name: _in_order(row[name] for row in rows) for name in names}
        by_point: dict[Point, Cfg] = {}
        space: ConfigSpace[Cfg] = cls(axes, build=lambda assignment: by_point[space.point_of(assignment)], read=read)
        for row, config in zip(rows, configs, strict=True):
            by_point.setdefault(space.point_of(row), config)
        space._all = list(by_point)
        space._members = frozenset(by_point)
        space._size = (len(by_point), True)
        return space

    @property
    def names(self) -> tuple[str, ...]:
        """The axes' names."""
        return tuple(axis.name for axis in self.axes)

    @property
    def size(self) -> int:
        """How many configurations there are: exact up to 20 000, an estimate from random assignments beyond."""
        return self._measured_size()[0]

    @property
    def is_small(self) -> bool:
        """Whether all configurations can be listed, so that `size` is exact."""
        return self._measured_size()[1]

    def __len__(self) -> int:
        return self.size

    def __bool__(self) -> bool:
        return True  # an empty space is an error, and counting it is not free

    def __repr__(self) -> str:
        axes = ", ".join(f"{axis.name}: {len(axis.values)}" for axis in self.axes)
        return f"ConfigSpace({{{axes}}}, {len(self._constraints)} constraints)"

    def __iter__(self) -> Iterator[Cfg]:
        """Yield every configuration, the last axis fastest; of a large space take only what is needed."""
        for point in self.walk():
            yield self.config(point)

    def __contains__(self, config: object) -> bool:
        try:
            return self.has(self.point(config))  # type: ignore[arg-type] # anything may be asked for
        except ConfigError:
            return False
