# SPDX-License-Identifier: Apache-2.0
"""`ConfigSpace`: configurations declared by axes and constraints, counted, sampled and encoded for a search."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from ejkernel.ops.config.spaces.axes import ALIGNED_FROM, Axis, Floats, is_number, value_key
from ejkernel.ops.config.spaces.constraints import Constraint, Effort, rejections
from ejkernel.ops.config.spaces.constraints import given_constraints as given_constraints
from ejkernel.ops.config.spaces.parts import Part, parts_of
from ejkernel.ops.config.spaces.parts import Point as Point
from ejkernel.ops.errors import ConfigError, EjkernelError, KernelError
from ejkernel.ops.utils.error_text import error_text, where
from ejkernel.ops.utils.formatting import counted
from ejkernel.ops.utils.messages.names import NamedFields, check_argument

Cfg = TypeVar("Cfg")

ENUMERATED = 20_000  # a space with at most this many configurations is enumerated, and a search ranks all of them
_LISTING = 16_000_000  # `Effort` for enumerating the parts of a space, at most half for one part; about two seconds
_WALKED = 2_000_000  # consecutive invalid assignments after which iteration gives up
_ROUNDS = 8  # rounds of drawing in a space where draws often repeat
_SHOWN = 16  # axes named in the text of a space


class ConfigSpace(NamedFields, Generic[Cfg]):
    """A search space declared by axes and constraints instead of a list.

    A space is enumerated when needed, and sampled if it is too large. Random methods take a NumPy generator and depend
    on nothing else. The effort to satisfy the constraints is bounded; `exact` tells whether `size` is an estimate.

    >>> space = ConfigSpace(
    ...     {"block_q": [64, 128, 256], "block_kv": [64, 128], "order": ["row", "column"]},
    ...     constraints=lambda block_q, block_kv: block_q * block_kv <= 16384,
    ... )
    >>> len(space)
    10
    >>> next(iter(space))
    {'block_q': 64, 'block_kv': 64, 'order': 'row'}

    Args:
        axes: The values of each axis, by name and in order. An axis of numbers is numeric; any other value (text,
            `None`) makes it categorical. A `range` is never expanded.
        constraints: One predicate, or several, that valid configurations satisfy. A predicate whose parameters are
            names of axes gets their values and is checked as soon as they are chosen. A predicate with a single
            parameter of another name gets the whole assignment, a dictionary from axis to value. Prefer the first
            form: a space whose constraints read few axes each is counted and sampled exactly.
        build: Creates a configuration: a class, called with the values by name, or a function of the assignment. By
            default the assignment itself is the configuration.
        read: The inverse of `build`. By default the items of a mapping, or the attributes named like the axes.
        seeds: Configurations that a search tries early; those outside the space are ignored.

    Raises:
        ConfigError: There is no axis; an axis has no values or a repeated one; a constraint reads an unknown axis.
            Methods also raise it when a constraint raises.
    """

    _example = 'ConfigSpace({"rows": [8, 16]}, constraints=lambda rows: rows <= 16)'

    def __init__(
        self,
        axes: Mapping[str, Sequence[object]],
        *,
        constraints: Callable[..., Any] | Iterable[Callable[..., Any]] = (),
        build: type[Cfg] | Callable[[dict[str, Any]], Cfg] | None = None,
        read: Callable[[Cfg], Mapping[str, Any]] | None = None,
        seeds: Iterable[Cfg] = (),
    ) -> None:
        check_argument(isinstance(axes, Mapping), "axes", "a mapping from names to values", axes)
        if not axes:
            raise ConfigError("axes must name at least one axis, got none; a lone configuration needs no space.")
        self.axes: tuple[Axis, ...] = tuple(Axis.of(name, values) for name, values in axes.items())
        self.names: tuple[str, ...] = tuple(axes)
        check_argument(build is None or callable(build), "build", "a class, or a function of the assignment", build)
        check_argument(read is None or callable(read), "read", "a function that returns the values by name", read)
        positions = {name: position for position, name in enumerate(self.names)}
        self._constraints = tuple(Constraint.of(holds, positions) for holds in given_constraints(constraints))
        self._build = build
        self._read = read
        check_argument(isinstance(seeds, Iterable), "seeds", "a list of configurations", seeds)
        self.seeds = tuple(seeds)
        self._listed: tuple[Point, ...] | None = None
        self._kept = False  # whether these were given, rather than found

    @classmethod
    def listed(cls, configurations: Iterable[Cfg]) -> ConfigSpace[Cfg]:
        """Return the space of exactly these configurations, mappings or dataclasses with the same fields.

        Raises:
            ConfigError: The list is empty, the fields differ, or an item is neither a mapping nor a dataclass.
        """
        check_argument(isinstance(configurations, Iterable), "configurations", "a list", configurations)
        configs = list(configurations)
        rows = [_fields(config) for config in configs]
        if not rows or not rows[0] or any(row.keys() != rows[0].keys() for row in rows):
            raise ConfigError(f"configurations must be some, all with the same fields, got {configs[:3]!r} ...")
        by_point: dict[Point, Cfg] = {}
        axes = {name: _in_order([row[name] for row in rows]) for name in rows[0]}
        space: ConfigSpace[Cfg] = cls(axes, build=lambda assignment: by_point[space.locate(assignment)], read=_fields)
        for row, config in zip(rows, configs, strict=True):
            by_point.setdefault(space.locate(row), config)
        space._keep(by_point)
        return space

    def __repr__(self) -> str:
        axes = ", ".join(f"{axis.name}: {len(axis)}" for axis in self.axes[:_SHOWN])
        more = f", ... {len(self.axes)} axes" if len(self.axes) > _SHOWN else ""
        return f"ConfigSpace({axes}{more}; {counted(len(self._constraints), 'constraint')})"

    def __bool__(self) -> bool:
        return True  # without this, `if space:` would count its configurations

    def __len__(self) -> int:
        """Return `size`, capped at `sys.maxsize`."""
        return min(self.size, sys.maxsize)

    def __iter__(self) -> Iterator[Cfg]:
        """Yield every configuration, the last axis fastest; lazy, so the start of a large space is cheap."""
        return map(self.config, self.walk())

    def __contains__(self, config: Any) -> bool:
        try:
            point = self.point(config)
        except ConfigError:
            return False
        return self.has(point)

    @property
    def size(self) -> int:
        """The number of configurations; an estimate from random samples if `exact` is false.

        Raises:
            ConfigError: No configuration satisfies the constraints, or random samples found none.
        """
        counts = [part.count for _, part in self._known]
        if not all(counts):
            raise self.none_valid()
        return math.prod(counts)

    @property
    def exact(self) -> bool:
        """Whether `size` is exact; otherwise it is an estimate from random samples."""
        return self.empty() or all(part.exact for _, part in self._known)

    # Points: configurations by the positions of their values; hashable and cheap.

    def points(self) -> tuple[Point, ...] | None:
        """Return all points in the order of `__iter__`; `None` if the space is too large to enumerate.

        Raises:
            ConfigError: No configuration satisfies the constraints.
        """
        if self.empty():
            raise self.none_valid()
        if self._listed is None and self.exact and self.size <= ENUMERATED:
            self._listed = tuple(self.walk())
        return self._listed

    def has_at_most(self, count: int) -> bool:
        """Return whether the space can be enumerated and has at most `count` configurations.

        Raises:
            ConfigError: No configuration satisfies the constraints.
        """
        points = self.points()
        return points is not None and len(points) <= count

    def empty(self) -> bool:
        """Return whether the space is known to be empty."""
        return any(part.points == () for _, part in self._known)

    def walk(self) -> Iterator[Point]:
        """Yield every point, the last axis fastest.

        Raises:
            ConfigError: Two million consecutive assignments violate a constraint.
        """
        if self._listed is not None:
            yield from self._listed
            return
        part_of = {position: (positions, part) for positions, part in self._known for position in positions}
        effort = Effort(_WALKED)

        def extended(point: Point) -> Iterator[Point]:
            """Return the points of the leading axes with one axis more."""
            positions, part = part_of[len(point)]
            before = tuple(point[position] for position in positions if position < len(point))
            levels = range(len(part.axes[0])) if part.free else part.children(before, effort)
            return ((*point, level) for level in levels)

        stack = [extended(())]
        while stack:
            point = next(stack[-1], None)
            if effort.left < 0:
                raise ConfigError(
                    f"{_WALKED} consecutive assignments of {self!r} violate a constraint; use sample() instead, or "
                    "let constraints name the axes that they read."
                )
            if point is None:
                stack.pop()
            elif len(point) == len(self.axes):
                effort.left = _WALKED
                yield point
            else:
                stack.append(extended(point))

    def has(self, point: Point) -> bool:
        """Return whether the point is valid."""
        if len(point) != len(self.axes):
            return False
        if not all(0 <= level < len(axis) for axis, level in zip(self.axes, point, strict=True)):
            return False
        return all(part.has(tuple(point[i] for i in positions)) for positions, part in self._parts)

    def assignment(self, point: Point) -> dict[str, Any]:
        """Return the values of a point by axis name; a shorter point gives the leading axes."""
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
        """Return the point of a configuration, which need not satisfy the constraints.

        Raises:
            ConfigError: The configuration lacks an axis, or its value is not on the axis.
        """
        return self.locate(self.read(config))

    def locate(self, assignment: Mapping[str, object]) -> Point:
        """Return the point of an assignment.

        Raises:
            ConfigError: The assignment lacks an axis, or a value is not on its axis.
        """
        levels = []
        for axis in self.axes:
            if axis.name not in assignment:
                raise ConfigError(f"the assignment {assignment!r} has no {axis.name!r}.")
            level = axis.level(assignment[axis.name])
            if level is None:
                raise ConfigError(f"axis {axis.name!r} has no value {assignment[axis.name]!r}; it has {axis.shown()}.")
            levels.append(level)
        return tuple(levels)

    def read(self, config: Cfg) -> dict[str, Any]:
        """Return the values of a configuration by axis name; they need not be on the axes.

        Raises:
            ConfigError: The configuration lacks an axis.
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

    def narrowed(self, fixed: Mapping[str, object]) -> ConfigSpace[Cfg] | None:
        """Return the subspace with these axes fixed; `None` if a value is not on its axis. It may be `empty`."""
        found = {axis.name: axis.level(fixed[axis.name]) for axis in self.axes if axis.name in fixed}
        levels = {name: level for name, level in found.items() if level is not None}
        if len(levels) < len(found):
            return None
        narrowed: ConfigSpace[Cfg] = ConfigSpace(
            {a.name: (a.values[levels[a.name]],) if a.name in levels else a.values for a in self.axes},
            constraints=self._constraints,
            build=lambda assignment: self.config(self.locate(assignment)),
            read=self.read,
            seeds=self.seeds,
        )
        if self._listed is not None:
            wanted = {i: levels[axis.name] for i, axis in enumerate(self.axes) if axis.name in levels}
            kept = [point for point in self._listed if all(point[i] == level for i, level in wanted.items())]
            narrowed._keep(tuple(0 if i in wanted else level for i, level in enumerate(point)) for point in kept)
        return narrowed

    def conditions(self) -> list[tuple[tuple[str, ...], Callable[[Mapping[str, Any]], bool]]]:
        """Return the constraints, each as the axes that it reads and a predicate."""
        if self._kept:
            return [(self.names, lambda assignment: self.has(self.locate(assignment)))]
        return [(constraint.reads or self.names, constraint) for constraint in self._constraints]

    def neighbour_points(self, point: Point, most: int | None = None) -> list[Point]:
        """Return the valid points that differ from `point` on one axis, nearest first.

        An axis with more than 64 values contributes the nearby values and a few at growing distances.

        Args:
            point: A point of the space.
            most: The maximum number of points; by default unlimited.
        """
        found: list[Point] = []
        for _, position, level in self._steps(point):
            positions, part = self._owners[position]
            near = (*point[:position], level, *point[position + 1 :])
            if part.has(tuple(near[i] for i in positions)):
                found.append(near)
            if len(found) == most:
                break
        return found

    def neighbours(self, config: Cfg) -> list[Cfg]:
        """Return the configurations that differ from `config` on one axis; see `neighbour_points`."""
        return [self.config(point) for point in self.neighbour_points(self.point(config))]

    def sample_points(self, rng: np.random.Generator, count: int, near: Iterable[Point] = ()) -> list[Point]:
        """Return up to `count` different points.

        The points are drawn evenly, with one exception: where constraints connect more axes than can be enumerated and
        fewer than one assignment in fifty is valid, the sample consists of points near known valid ones, and some
        points may never be drawn.

        Args:
            rng: The random numbers.
            count: The number of points.
            near: Known points of the space, which help where valid points are rare.

        Raises:
            ConfigError: No configuration satisfies the constraints, or none was found.
        """
        points = self.points()
        if points is not None:
            return [points[i] for i in rng.permutation(len(points))[:count]]
        near, found = list(near), dict[Point, None]()
        for _ in range(_ROUNDS):
            before = len(found)
            found.update(dict.fromkeys(self._drawn(rng, count, near)))
            if len(found) >= count or len(found) <= before + count // 100:
                break
        if not found and count:
            raise self.none_valid()
        return list(itertools.islice(found, count))

    def sample(self, rng: np.random.Generator, count: int) -> list[Cfg]:
        """Return up to `count` different configurations; see `sample_points`."""
        return [self.config(point) for point in self.sample_points(rng, count)]

    # Numeric features for the search model.

    def encode(self, points: Sequence[Point], *, aligned_from: int = ALIGNED_FROM) -> list[Floats]:
        """Return the features of each varying axis, with one row per point; see `Axis.encode`."""
        levels = np.asarray(points, dtype=np.intp).reshape(len(points), len(self.axes))
        columns = (axis.encode(levels[:, i], aligned_from=aligned_from) for i, axis in enumerate(self.axes))
        return [column for column in columns if column.shape[1]]

    @functools.cached_property
    def _parts(self) -> list[tuple[list[int], Part]]:
        """The independent parts of the space, each with the positions of its axes."""
        read = {name: i for i, name in enumerate(self.names)}
        tied = parts_of(self.axes, self._constraints)
        owner = {i: number for number, positions in enumerate(tied) for i in positions}
        own: list[list[Constraint]] = [[] for _ in tied]
        for constraint in self._constraints:
            own[owner[0 if constraint.reads is None else read[constraint.reads[0]]]].append(constraint)
        return [
            (positions, Part([self.axes[i] for i in positions], some))
            for positions, some in zip(tied, own, strict=True)
        ]

    @functools.cached_property
    def _known(self) -> list[tuple[list[int], Part]]:
        """The same, after enumerating the parts that are small enough."""
        left = Effort(_LISTING)
        for _, part in sorted(self._parts, key=lambda item: item[1].product):
            effort = Effort(min(left.left, _LISTING if len(part.axes) == 1 else _LISTING // 2))
            left.spend(effort.left)
            part.find_all(effort)
            left.left += max(effort.left, 0)
        return self._parts

    @functools.cached_property
    def _owners(self) -> dict[int, tuple[list[int], Part]]:
        """The part of each axis, by the position of the axis."""
        return {i: item for item in self._parts for i in item[0]}

    def _keep(self, points: Iterable[Point]) -> None:
        """Restrict the space to these points."""
        self._listed, self._kept = tuple(points), True
        self._parts = self._known = [(list(range(len(self.axes))), Part(self.axes, (), self._listed))]

    def _steps(self, point: Point) -> list[tuple[int, int, int]]:
        """Return `(distance, axis, level)` of the values near a point's, nearest first."""
        return sorted(
            (distance, position, level)
            for position, axis in enumerate(self.axes)
            for distance, level in axis.nearest_first(point[position])
        )

    def _drawn(self, rng: np.random.Generator, count: int, near: Sequence[Point]) -> Iterator[Point]:
        """Yield random points, possibly repeated; none if a part has no known point."""
        columns: dict[int, Sequence[int]] = {}
        for positions, part in self._known:
            drawn = part.draw(rng, count, [tuple(point[i] for i in positions) for point in near])
            if not drawn:
                return iter(())
            if len(drawn) < count and len(self._parts) > 1:  # combine each with several points of the other parts
                drawn = [drawn[i] for i in rng.integers(len(drawn), size=count).tolist()]
            columns.update(zip(positions, zip(*drawn, strict=True), strict=True))
        return zip(*(columns[i] for i in range(len(self.axes))), strict=True)

    def none_valid(self) -> ConfigError:
        """Return the error about a space without a valid configuration, or with none found."""
        if self.empty():
            why = rejections(self._constraints, {axis.name: axis.values for axis in self.axes})
            return ConfigError(f"no configuration of {self!r} satisfies the constraints.{why}")
        hard = [part for _, part in self._known if not part.exact and not part.count]
        total = sum(math.log10(part.product) for part in hard)
        return ConfigError(
            f"found no valid configuration of {self!r} among its 10^{total:.0f} assignments, although some may exist. "
            "Let each constraint name the few axes that it reads (`lambda rows, warps: ...`), so that it is checked "
            "early."
        )


def _fields(config: object) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    raise ConfigError(f"configurations must be mappings or dataclass instances, got {config!r}.")


def _in_order(values: Sequence[object]) -> list[Any]:
    """Return the distinct values: numbers sorted, anything else in order of appearance."""
    distinct = list({value_key(value): value for value in values}.values())
    return sorted(distinct) if all(map(is_number, distinct)) else distinct
