# SPDX-License-Identifier: Apache-2.0
"""Independent parts of a configuration space: groups of axes that share constraints.

The framework knows only which axes a constraint reads, not what it computes. A part is enumerated when that is
affordable, so a space of 8^40 configurations whose constraints read few axes each is counted exactly and sampled
evenly. A part that is too large to enumerate is sampled: by drawing assignments and rejecting invalid ones, and, where
almost all draws are rejected, by aiming at the corners of the part, by choosing one axis after the other, and by
changing one or two axes of a valid point. Its size is then an estimate. Every search is bounded by the number of values
examined, not by time, so a seed gives the same points on every machine.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ejkernel.ops.config.spaces.axes import Axis
from ejkernel.ops.config.spaces.constraints import Constraint, Effort, by_last, cost_of

Point = tuple[int, ...]  # for each axis, the position of its value

_LISTED = 200_000  # a part with more points is not enumerated
_VISIT = 4  # `Effort` for setting one axis
_SHUFFLED = 64  # values of an axis that a random search tries
_KNOWN = 64  # valid points that `known` looks for
_ENOUGH = 16  # valid points after which no further method is tried
_REJECTIONS = 50  # draws per point up to which rejection sampling is used
_ONCE = 400  # `Effort` per axis before a descent starts again
# `Effort` for each method; a million takes 0.1 to 0.2 s.
_DRAWN = 1_000_000
_AIMED = 1_000_000
_DESCENDED = 2_000_000
_CHANGED = 2_000_000


class Part:
    """A part of a search space: axes and the constraints between them, independent of all other axes.

    Args:
        axes: The axes.
        constraints: The constraints, which read only these axes.
        points: All points, if they are already known.
    """

    def __init__(
        self, axes: Sequence[Axis], constraints: Sequence[Constraint], points: Sequence[Point] | None = None
    ) -> None:
        self.axes, self.constraints = tuple(axes), tuple(constraints)
        self.names = tuple(axis.name for axis in axes)
        self.product = math.prod(len(axis) for axis in self.axes)
        self.points: tuple[Point, ...] | None = None if points is None else tuple(points)
        self._members = None if points is None else frozenset(self.points or ())
        self._seen: list[Point] = []  # a few points of a part that is too large to enumerate
        self._checks = by_last(self.constraints, self.names)
        self._cost = len(self.axes) + sum(cost_of(constraint, self.names) for constraint in self.constraints)

    @property
    def free(self) -> bool:
        """Whether every combination of values is valid."""
        return not self.constraints and self._members is None

    @property
    def exact(self) -> bool:
        """Whether the number of points is known exactly; otherwise it is an estimate."""
        return self.free or self.points is not None

    def find_all(self, effort: Effort) -> None:
        """Enumerate the part if `effort` allows it, and subtract the effort spent."""
        if self.exact:
            return
        order = self._order
        checks = by_last(self.constraints, [self.axes[i].name for i in order])
        first = next(depth for depth, some in enumerate(checks) if some)
        least = _VISIT + sum(cost_of(check, self.names) for check in checks[first])
        if math.prod(len(self.axes[i]) for i in order[: first + 1]) * least > effort.left:
            return  # the first check already comes too late
        points = tuple(itertools.islice(self._search(order, effort), _LISTED + 1))
        if effort.left < 0 or len(points) > _LISTED:
            self._seen = list(points[:: max(1, len(points) // _ENOUGH)])
        else:
            self.points = tuple(sorted(points))

    def has(self, levels: Point) -> bool:
        """Return whether these positions are a point of the part."""
        if self._members is not None:
            return levels in self._members
        if not self.constraints:
            return True
        assignment = {axis.name: axis.values[level] for axis, level in zip(self.axes, levels, strict=True)}
        return all(check(assignment) for checks in self._checks for check in checks)

    def children(self, levels: Point, effort: Effort) -> Iterator[int]:
        """Yield the valid positions of the next axis, given those of the axes before it."""
        depth = len(levels)
        if self.points is not None:
            yield from self._following.get(levels, ())
            return
        axis, checks = self.axes[depth], self._checks[depth]
        assignment = {axis.name: axis.values[level] for axis, level in zip(self.axes, levels, strict=False)}
        for level, value in enumerate(axis.values):
            assignment[axis.name] = value
            if all(check(assignment) for check in checks):
                yield level
            elif not effort.spend():
                return

    @functools.cached_property
    def known(self) -> tuple[tuple[Point, ...], int, int]:
        """Points of a part that was not enumerated; the same at every call.

        Returns:
            The points; the number of assignments drawn at random; how many of those draws were valid.
        """
        rng = random.Random(0)
        found = dict.fromkeys(self._seen)
        drawn, hits = 0, 0
        effort = Effort(_DRAWN)
        while hits < _KNOWN and effort.spend(self._cost):
            point, drawn = tuple(rng.randrange(len(axis)) for axis in self.axes), drawn + 1
            if self.has(point):
                found.setdefault(point)
                hits += 1
        for method in (self._aimed, self._descended):
            if len(found) < _ENOUGH:
                found.update(dict.fromkeys(itertools.islice(method(rng), _KNOWN)))
        return tuple(found), drawn, hits

    @functools.cached_property
    def count(self) -> int:
        """The number of points, or an estimate of it if not `exact`; 0 if no point was found."""
        if self.points is not None:
            return len(self.points)
        if self.free:
            return self.product
        points, drawn, hits = self.known
        if not points:
            return 0
        return min(max(self.product * max(hits, 1) // drawn, len(points)), self.product)

    def draw(self, rng: np.random.Generator, count: int, near: Iterable[Point] = ()) -> list[Point]:
        """Return up to `count` random points, possibly with repetitions; none if no point is known.

        Points are drawn evenly, unless fewer than one assignment in fifty is valid in a part too large to enumerate.

        Args:
            rng: The random numbers.
            count: The number of points.
            near: Valid points known to the caller, which help where points are rare.
        """
        if self.points is not None:
            return [self.points[i] for i in rng.integers(len(self.points), size=count).tolist()] if self.points else []
        if self.free:
            return self._drawn(rng, count)
        points, drawn, hits = self.known
        if hits * _REJECTIONS >= drawn:
            draws = (point for _ in range(2 * _REJECTIONS) for point in self._drawn(rng, count))
            return list(itertools.islice(filter(self.has, draws), count))
        starts = list(dict.fromkeys([*points, *near]))
        if not starts:
            return []
        found = dict.fromkeys(self._changed(starts, random.Random(int(rng.integers(2**62))), 4 * count))
        found.update(dict.fromkeys(starts))
        pool = list(found)
        return [pool[i] for i in rng.permutation(len(pool))[:count].tolist()]

    def _drawn(self, rng: np.random.Generator, count: int) -> list[Point]:
        levels = [rng.integers(len(axis), size=count).tolist() for axis in self.axes]
        return list(zip(*levels, strict=True))

    def _aimed(self, rng: random.Random) -> Iterator[Point]:
        """Yield valid points among assignments whose axes are all low, all high, or about equally high.

        Constraints that bound a sum or a product are met there, if anywhere.
        """
        last = [len(axis) - 1 for axis in self.axes]
        effort = Effort(_AIMED)
        corners: Iterator[Point] = iter([(0,) * len(last), tuple(last)])
        while effort.spend(self._cost):
            point = next(corners, None)
            if point is None:
                height, spread = rng.random(), rng.random() ** 2
                if rng.random() < 0.5:
                    point = tuple(end if rng.random() < height else 0 for end in last)
                else:
                    at = (min(max(height + spread * (rng.random() - 0.5), 0.0), 1.0) for _ in last)
                    point = tuple(round(end * share) for end, share in zip(last, at, strict=True))
            if self.has(point):
                yield point

    def _descended(self, rng: random.Random) -> Iterator[Point]:
        """Yield valid points found by choosing one axis after the other at random, with backtracking."""
        effort = Effort(_DESCENDED)
        while effort.left > 0:
            once = Effort(min(_ONCE * len(self.axes), effort.left))
            effort.left -= once.left
            yield from itertools.islice(self._search(self._order, once, rng), 1)
            effort.left += once.left

    def _changed(self, starts: Sequence[Point], rng: random.Random, count: int) -> Iterator[Point]:
        """Yield up to `count` valid points that differ on one or two axes from a start, or from another such point."""
        pool = list(starts)
        effort = Effort(_CHANGED)
        while len(pool) < len(starts) + count and effort.spend(self._cost):
            levels = list(rng.choice(pool))
            for position in rng.choices(range(len(self.axes)), k=rng.randint(1, 2)):
                levels[position] = rng.randrange(len(self.axes[position]))
            if self.has(point := tuple(levels)):
                pool.append(point)
                yield point

    @functools.cached_property
    def _order(self) -> list[int]:
        """The order of axes that completes the arguments of constraints soonest."""
        position = {name: i for i, name in enumerate(self.names)}
        left = [[position[name] for name in constraint.reads or position] for constraint in self.constraints]
        order: dict[int, None] = {}
        while left:
            costs = [math.prod(len(self.axes[i]) for i in reads if i not in order) for reads in left]
            order.update(dict.fromkeys(left.pop(costs.index(min(costs)))))
        return list(order)

    @functools.cached_property
    def _following(self) -> dict[Point, list[int]]:
        following: dict[Point, dict[int, None]] = {}
        for point in self.points or ():
            for depth, level in enumerate(point):
                following.setdefault(point[:depth], {}).setdefault(level)
        return {levels: list(after) for levels, after in following.items()}

    def _search(self, order: Sequence[int], effort: Effort, rng: random.Random | None = None) -> Iterator[Point]:
        """Yield the points, choosing the axes in this order; stop when the effort is spent.

        With `rng` the values of each axis come in random order, and only some of very many.
        """
        checks = by_last(self.constraints, [self.axes[i].name for i in order])
        costs = [_VISIT + sum(cost_of(check, self.names) for check in some) for some in checks]
        assignment: dict[str, Any] = dict.fromkeys(self.names)  # in the order of declaration
        chosen = [0] * len(self.axes)
        stack = [_levels(self.axes[order[0]], rng)]
        while stack:
            depth = len(stack) - 1
            level = next(stack[-1], None)
            if level is None:
                stack.pop()
                continue
            if not effort.spend(costs[depth]):
                return
            axis = self.axes[order[depth]]
            chosen[order[depth]], assignment[axis.name] = level, axis.values[level]
            if not all(check(assignment) for check in checks[depth]):
                continue
            if depth + 1 == len(order):
                yield tuple(chosen)
            else:
                stack.append(_levels(self.axes[order[depth + 1]], rng))


def parts_of(axes: Sequence[Axis], constraints: Sequence[Constraint]) -> list[list[int]]:
    """Return the positions of the axes of each part: axes that constraints connect, directly or through others."""
    position = {axis.name: i for i, axis in enumerate(axes)}
    part_of = [{i} for i in range(len(axes))]
    for constraint in constraints:
        joined = set().union(*(part_of[position[name]] for name in constraint.reads or position))
        for i in joined:
            part_of[i] = joined
    return sorted(sorted(part) for i, part in enumerate(part_of) if i == min(part))


def _levels(axis: Axis, rng: random.Random | None) -> Iterator[int]:
    """Return the positions of an axis' values in order; with `rng` in random order, and only some of very many."""
    count = len(axis)
    if rng is None:
        return iter(range(count))
    if count <= _SHUFFLED:
        return iter(rng.sample(range(count), count))
    return iter([rng.randrange(count) for _ in range(_SHUFFLED)])
