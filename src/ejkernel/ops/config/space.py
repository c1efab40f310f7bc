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

from ejkernel.ops.config._axes import ALIGNED_FROM, Axis, Floats, is_number, value_key
from ejkernel.ops.errors import ConfigError, EjkernelError, KernelError
from ejkernel.ops.utils.checks import check_argument
from ejkernel.ops.utils.telling import error_text, where

Cfg = TypeVar("Cfg")
Point = tuple[int, ...]  # of each axis, the position of its value

ENUMERATED = 20_000  # up to this many configurations a space is small: all are listed, and a search ranks them all
_VISITS = 50_000  # partial assignments that are looked at before a space counts as large
_DESCENTS = 500  # random ways through a large space that its size is estimated from
_REJECTIONS = 50  # draws for each point that is wanted, before constraints are followed step by step


@dataclasses.dataclass(frozen=True, slots=True)
class _Constraint:
    """A condition and the axes that it reads; `None`: the whole assignment."""

    holds: Callable[..., Any]
    reads: tuple[str, ...] | None

    def __call__(self, assignment: Mapping[str, Any]) -> bool:
        try:
            if self.reads is None:
                return bool(self.holds(assignment))
            return bool(self.holds(**{name: assignment[name] for name in self.reads}))
        except EjkernelError:
            raise
        except Exception as error:
            raise KernelError(
                f"the constraint {where(self.holds)} raised {error_text(error)}, for {dict(assignment)!r}"
            ) from error


class ConfigSpace(Generic[Cfg]):
    """Configurations that are declared by axes and constraints rather than listed.

    Nothing is enumerated before it is needed, and a large space never is: it is sampled. What is random takes a
    NumPy generator and depends on nothing else.

    >>> space = ConfigSpace(
    ...     {"block_q": [64, 128, 256], "block_kv": [64, 128], "order": ["row", "column"]},
    ...     constraints=lambda block_q, block_kv: block_q * block_kv <= 16384,
    ... )
    >>> len(space)
    10
    >>> next(iter(space))
    {'block_q': 64, 'block_kv': 64, 'order': 'row'}

    Args:
        axes: The values of each axis, by name, in their order. An axis of numbers is numeric; one with anything else
            (text, `None`) is categorical.
        constraints: One condition, or several, that a configuration has to meet. A condition whose parameters are
            names of axes gets their values, and is checked as soon as these are chosen; one with a single parameter
            of another name gets the whole assignment, a dictionary from axis to value.
        build: Makes a configuration: a class, called with the assignment's values by name, or a function of the
            assignment. By default a configuration is the assignment itself.
        read: The way back, from a configuration to its assignment. By default the items of a mapping, or the
            attributes that have the axes' names.

    Raises:
        ConfigError: there is no axis; an axis has no values, or one twice; a constraint reads what is no axis.
    """

    def __init__(
        self,
        axes: Mapping[str, Sequence[Any]],
        *,
        constraints: Callable[..., Any] | Iterable[Callable[..., Any]] = (),
        build: type[Cfg] | Callable[[dict[str, Any]], Cfg] | None = None,
        read: Callable[[Cfg], Mapping[str, Any]] | None = None,
    ) -> None:
        check_argument(isinstance(axes, Mapping), "axes", "a mapping from names to values", axes)
        if not axes:
            raise ConfigError("axes must name at least one axis, got none; a lone configuration needs no space.")
        self.axes: tuple[Axis, ...] = tuple(Axis.of(name, values) for name, values in axes.items())
        self.names: tuple[str, ...] = tuple(axes)
        check_argument(build is None or callable(build), "build", "a class, or a function of the assignment", build)
        given = given_constraints(constraints)
        self._checks = _by_last_axis([_constraint(holds, self.names) for holds in given], self.names)
        self._build = build
        self._read = read
        self._listed: tuple[Point, ...] | None = None
        self._members: frozenset[Point] | None = None
        self._estimate: int | None = None

    @classmethod
    def listed(cls, configurations: Iterable[Cfg]) -> ConfigSpace[Cfg]:
        """Return the space of exactly these configurations, which are mappings or dataclasses with the same fields.

        Raises:
            ConfigError: there is none; they differ in their fields; or one is neither a mapping nor a dataclass.
        """
        configs = list(configurations)
        rows = [_fields(config) for config in configs]
        if not rows or not rows[0] or any(row.keys() != rows[0].keys() for row in rows):
            raise ConfigError(f"configurations must be some, all with the same fields, got {configs[:3]!r} ...")
        by_point: dict[Point, Cfg] = {}
        axes = {name: _in_order([row[name] for row in rows]) for name in rows[0]}
        space: ConfigSpace[Cfg] = cls(axes, build=lambda assignment: by_point[space.locate(assignment)], read=_fields)
        for row, config in zip(rows, configs, strict=True):
            by_point.setdefault(space.locate(row), config)
        space._listed = tuple(by_point)
        space._members = frozenset(by_point)
        return space

    def __repr__(self) -> str:
        axes = ", ".join(f"{axis.name}: {len(axis.values)}" for axis in self.axes)
        return f"ConfigSpace({axes}; {sum(map(len, self._checks))} constraints)"

    def __bool__(self) -> bool:
        return True  # without this, `if space:` would count its configurations

    def __len__(self) -> int:
        """Return how many configurations there are: exactly if there are few, else an estimate."""
        return self.size

    def __iter__(self) -> Iterator[Cfg]:
        """Yield every configuration, the last axis fastest; of a large space take no more than is needed."""
        return map(self.config, self.walk())

    def __contains__(self, config: Any) -> bool:
        try:
            return self.has(self.point(config))
        except ConfigError:
            return False

    @property
    def size(self) -> int:
        """How many configurations there are: exactly if there are few, else an estimate.

        Raises:
            ConfigError: there is none.
        """
        points = self.points()
        if points is not None:
            return len(points)
        if self._estimate is None:
            self._estimate = self._estimated()
        return self._estimate

    # Points: configurations by the positions of their values. They can be hashed, and cost nothing to make.

    def points(self) -> tuple[Point, ...] | None:
        """Return all points in the order of `__iter__`; `None` if there are more than can be listed.

        Raises:
            ConfigError: no configuration meets the constraints.
        """
        if self._listed is None and self._estimate is None:
            visits = itertools.count()
            points = tuple(itertools.islice(self.walk(visits), ENUMERATED + 1))
            if len(points) > ENUMERATED or next(visits) > _VISITS:
                self._estimate = self._estimated()
            elif not points:
                raise self._nothing()
            else:
                self._listed, self._members = points, frozenset(points)
        return self._listed

    def walk(self, visits: Iterator[int] | None = None) -> Iterator[Point]:
        """Yield every point, the last axis fastest.

        Args:
            visits: Counts the partial assignments that are looked at; the walk ends early if they become too many.
        """
        if self._listed is not None:
            yield from self._listed
            return
        stack: list[Point] = [()]
        while stack:
            point = stack.pop()
            if len(point) == len(self.axes):
                yield point
                continue
            stack.extend(reversed(self._children(point)))
            if visits is not None and next(visits) > _VISITS:
                return

    def has(self, point: Point) -> bool:
        """Return whether the point meets the constraints."""
        if self._members is not None:
            return point in self._members
        assignment = self.assignment(point)
        return all(check(assignment) for checks in self._checks for check in checks)

    def assignment(self, point: Point) -> dict[str, Any]:
        """Return the values of a point, or of the leading axes if it is a part of one, by the axes' names."""
        return {axis.name: axis.values[level] for axis, level in zip(self.axes, point, strict=False)}

    def config(self, point: Point) -> Cfg:
        """Return the configuration at a point."""
        assignment = self.assignment(point)
        if self._build is None:
            return assignment  # type: ignore[return-value] # without `build` the configuration is the dictionary
        try:
            config: Cfg = self._build(**assignment) if isinstance(self._build, type) else self._build(assignment)
        except EjkernelError:
            raise
        except Exception as error:
            raise KernelError(f"build={where(self._build)} raised {error_text(error)}, for {assignment!r}") from error
        return config

    def point(self, config: Cfg) -> Point:
        """Return the point of a configuration. It need not meet the constraints.

        Raises:
            ConfigError: it lacks an axis, or has a value that the axis does not.
        """
        return self.locate(self.read(config))

    def locate(self, assignment: Mapping[str, Any]) -> Point:
        """Return the point of an assignment.

        Raises:
            ConfigError: an axis has no such value.
        """
        levels = []
        for axis in self.axes:
            level = axis.level(assignment[axis.name])
            if level is None:
                raise ConfigError(f"axis {axis.name!r} has no value {assignment[axis.name]!r}; it has {axis.values!r}.")
            levels.append(level)
        return tuple(levels)

    def read(self, config: Cfg) -> dict[str, Any]:
        """Return the values of a configuration by the axes' names. They need not be values of the axes.

        Raises:
            ConfigError: the configuration lacks an axis.
        """
        if self._read is not None:
            found = self._read(config)
        elif isinstance(config, Mapping):
            found = config
        else:
            found = {name: getattr(config, name) for name in self.names if hasattr(config, name)}
        missing = [name for name in self.names if name not in found]
        if missing:
            raise ConfigError(f"the configuration {config!r} has no {missing}; give the space `read=`.")
        return {name: found[name] for name in self.names}

    def neighbour_points(self, point: Point) -> list[Point]:
        """Return the points that differ on one axis: adjacent values first, and then the next nearest."""
        steps = [
            (distance, position, level)
            for position, axis in enumerate(self.axes)
            for distance, level in axis.nearest_first(point[position])
        ]
        moved = ((*point[:position], level, *point[position + 1 :]) for _, position, level in sorted(steps))
        return [other for other in moved if self.has(other)]

    def neighbours(self, config: Cfg) -> list[Cfg]:
        """Return the configurations that differ on one axis: adjacent values first, and then the next nearest."""
        return [self.config(point) for point in self.neighbour_points(self.point(config))]

    def sample_points(self, rng: np.random.Generator, count: int) -> list[Point]:
        """Return up to `count` different points.

        A small space is drawn from evenly. A large one too, by rejection, unless its constraints are so tight that
        this would take long; then the axes are chosen one after the other, which favours what has few alternatives.

        Raises:
            ConfigError: no configuration meets the constraints, or none was found.
        """
        points = self.points()
        if points is not None:
            return [points[i] for i in rng.permutation(len(points))[:count]]
        found: dict[Point, None] = {}
        draws = (point for _ in range(_REJECTIONS) for point in self._drawn(rng, count) if self.has(point))
        descents = (point for point, _ in (self._descent(rng) for _ in range(_REJECTIONS * count)) if point)
        for point in itertools.chain(draws, descents):
            if len(found) >= count:
                break
            found.setdefault(point)
        if not found and count:
            raise self._nothing()
        return list(found)

    def sample(self, rng: np.random.Generator, count: int) -> list[Cfg]:
        """Return up to `count` different configurations; see `sample_points`."""
        return [self.config(point) for point in self.sample_points(rng, count)]

    # Numbers: what a model of the space sees.

    def encode(self, assignments: Sequence[Mapping[str, Any]], *, aligned_from: int = ALIGNED_FROM) -> list[Floats]:
        """Return one array for each axis that varies: a row for each assignment, the columns as `Axis.encode` says."""
        columns = (
            axis.encode([assignment[axis.name] for assignment in assignments], aligned_from=aligned_from)
            for axis in self.axes
        )
        return [column for column in columns if column.shape[1]]

    def encode_points(self, points: Sequence[Point], *, aligned_from: int = ALIGNED_FROM) -> list[Floats]:
        """Return what `encode` does, for points."""
        levels = np.asarray(points, dtype=np.intp).reshape(len(points), len(self.axes))
        tables = (axis.encode(axis.values, aligned_from=aligned_from) for axis in self.axes)
        return [table[levels[:, i]] for i, table in enumerate(tables) if table.shape[1]]

    def _children(self, point: Point) -> list[Point]:
        """Return the ways to choose the next axis so that the constraints which can be checked hold."""
        axis, checks = self.axes[len(point)], self._checks[len(point)]
        extended = [(*point, level) for level in range(len(axis.values))]
        if not checks:
            return extended
        assignment = self.assignment(point)
        kept = []
        for child, value in zip(extended, axis.values, strict=True):
            assignment[axis.name] = value
            if all(check(assignment) for check in checks):
                kept.append(child)
        return kept

    def _drawn(self, rng: np.random.Generator, count: int) -> list[Point]:
        """Return points at random, whether they meet the constraints or not."""
        levels = [rng.integers(len(axis.values), size=count).tolist() for axis in self.axes]
        return list(zip(*levels, strict=True))

    def _descent(self, rng: np.random.Generator) -> tuple[Point | None, float]:
        """Choose one axis after the other at random; return the point and the product of how many ways there were."""
        point: Point = ()
        ways = 1.0
        for _ in self.axes:
            children = self._children(point)
            if not children:
                return None, 0.0
            ways *= len(children)
            point = children[int(rng.integers(len(children)))]
        return point, ways

    def _estimated(self) -> int:
        """Estimate the size: the mean over random descents of the product of their choices has it as its mean."""
        rng = np.random.default_rng(0)
        mean = math.fsum(self._descent(rng)[1] for _ in range(_DESCENTS)) / _DESCENTS
        return int(min(max(mean, 1.0), 2.0**62))

    def _nothing(self) -> ConfigError:
        return ConfigError(f"no configuration of {self!r} meets the constraints; check them, or add values.")


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


def _constraint(holds: Callable[..., Any], names: tuple[str, ...]) -> _Constraint:
    try:
        parameters = tuple(inspect.signature(holds).parameters)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return _Constraint(holds, None)
    unknown = [name for name in parameters if name not in names]
    if not unknown and parameters:
        return _Constraint(holds, parameters)
    if len(parameters) == 1:
        return _Constraint(holds, None)
    raise ConfigError(
        f"a constraint's parameters must be axes, or one for the whole assignment, got {unknown!r}; axes: {names!r}."
    )


def _by_last_axis(constraints: Iterable[_Constraint], names: tuple[str, ...]) -> tuple[tuple[_Constraint, ...], ...]:
    """Return, for each axis, the constraints that can be checked once it is chosen after those before it."""
    checks: list[list[_Constraint]] = [[] for _ in names]
    for constraint in constraints:
        reads = names if constraint.reads is None else constraint.reads
        checks[max(names.index(name) for name in reads)].append(constraint)
    return tuple(map(tuple, checks))


def _fields(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    raise ConfigError(f"configurations must be mappings or dataclasses, got {config!r}.")


def _in_order(values: Sequence[Any]) -> list[Any]:
    """Return each value once: numbers by size, anything else as it comes."""
    distinct = list({value_key(value): value for value in values}.values())
    return sorted(distinct) if all(map(is_number, distinct)) else distinct
