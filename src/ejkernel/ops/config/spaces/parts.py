# SPDX-License-Identifier: Apache-2.0
"""The parts of a configuration space: axes that constraints tie together. Parts are independent of each other.

Constraints are functions of which nothing is known but the axes that they name. A part is listed by itself if that can
be done, so that a space of 8^40 with constraints on few axes each is counted exactly and drawn from evenly. One that
cannot be listed, because its constraints read the whole assignment, has points that are found by drawing, by aiming at
its corners, by choosing axis by axis with going back, and by repair; from these, walks go on (`chains.py`). Its size
is an estimate, and nothing is called empty that was not gone through. All of that is limited by looks at values and not
by the clock, so that a seed makes the same search on any machine.
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
from ejkernel.ops.config.spaces.chains import Chain, Effort, cost_of, descended, start_points
from ejkernel.ops.config.spaces.constraints import Constraint, by_last

Point = tuple[int, ...]  # of each axis, the position of its value

_LISTED = 200_000  # points up to which a part is listed
_SHUFFLED = 64  # values of an axis that are tried in a search at random
_MORE = 300_000  # of `Effort`: on points that no walk came by
_BRANCHED = 500  # tries of an estimate
_STEPS = 8  # of a walk at random, for each point that is wanted
_CHAINS = 16
_REJECTIONS = 50  # draws for each point, up to which points are drawn evenly
_WARM_UP = 32  # steps that a walk takes before its points count
_HITS = 6  # of points drawn evenly, that say how many there are
_ROUND = 3000  # steps that say how the valid points are shared between two halves
_LEAST_ROUND = 50
_ESTIMATING = 8_000_000  # of `Effort`
_VISIT = 4  # of `Effort`: what it takes to set an axis


class Part:
    """Axes, and the constraints between them.

    Args:
        axes: The axes.
        constraints: Those that read these axes and no others.
        points: All the points, where these are known.
    """

    def __init__(
        self, axes: Sequence[Axis], constraints: Sequence[Constraint], points: Sequence[Point] | None = None
    ) -> None:
        self.axes, self.constraints = tuple(axes), tuple(constraints)
        self.names = tuple(axis.name for axis in axes)
        self.product = math.prod(len(axis) for axis in self.axes)
        self.points: tuple[Point, ...] | None = None if points is None else tuple(points)
        self._members = None if points is None else frozenset(self.points or ())
        self._seen: list[Point] = []  # some points, where not all could be listed
        self._checks = by_last(self.constraints, self.names)
        self.cost = len(self.axes) + sum(cost_of(constraint, self.names) for constraint in self.constraints)

    @property
    def free(self) -> bool:
        """Whether every combination of values is a point."""
        return not self.constraints and self._members is None

    @property
    def exact(self) -> bool:
        """Whether it is known how many points there are."""
        return self.free or self.points is not None

    def find_all(self, effort: Effort) -> None:
        """Find all points, if that takes no more than this effort; what it takes is subtracted."""
        if self.exact:
            return
        order = self._order
        checks = by_last(self.constraints, [self.axes[i].name for i in order])
        first = next(depth for depth, some in enumerate(checks) if some)
        least = _VISIT + sum(cost_of(check, self.names) for check in checks[first])
        if math.prod(len(self.axes[i]) for i in order[: first + 1]) * least > effort.left:
            return  # nothing can be left out before the first check
        points = tuple(itertools.islice(self._search(order, effort), _LISTED + 1))
        if effort.left < 0 or len(points) > _LISTED:
            self._seen = list(points[:: max(1, len(points) // _CHAINS)])
        else:
            self.points = tuple(sorted(points))

    def has(self, levels: Point) -> bool:
        """Return whether these positions are a point."""
        if self._members is not None:
            return levels in self._members
        if not self.constraints:
            return True
        assignment = {axis.name: axis.values[level] for axis, level in zip(self.axes, levels, strict=True)}
        return all(check(assignment) for checks in self._checks for check in checks)

    def descend(self, effort: Effort, rng: random.Random) -> Iterator[Point]:
        """Yield points in no order, with the values of an axis at random; not all of them if there are many values."""
        return self._search(self._order, effort, rng)

    def children(self, levels: Point, effort: Effort) -> Iterator[int]:
        """Yield the positions of the next axis that may follow those of the axes before it."""
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
    def reading(self) -> list[list[int]]:
        """Of each axis, the positions of the constraints that read it."""
        position = {name: i for i, name in enumerate(self.names)}
        reading: list[list[int]] = [[] for _ in self.axes]
        for number, constraint in enumerate(self.constraints):
            for name in constraint.reads or self.names:
                reading[position[name]].append(number)
        return reading

    @functools.cached_property
    def _order(self) -> list[int]:
        return _order(self.axes, self.constraints)

    @functools.cached_property
    def _following(self) -> dict[Point, list[int]]:
        following: dict[Point, dict[int, None]] = {}
        for point in self.points or ():
            for depth, level in enumerate(point):
                following.setdefault(point[:depth], {}).setdefault(level)
        return {levels: list(after) for levels, after in following.items()}

    @functools.cached_property
    def known(self) -> tuple[tuple[Point, ...], int, int]:
        """Some points of a part that could not be listed, the same each time.

        Returns:
            The points; how many assignments were drawn evenly, and how many of them are points.
        """
        return start_points(self, self._seen)

    @functools.cached_property
    def count(self) -> int:
        """How many points there are, or, if that is not `exact`, an estimate; 0 if none was found."""
        if self.points is not None:
            return len(self.points)
        if self.free:
            return self.product
        points, drawn, hits = self.known
        if not points:
            return 0
        # The latter two see too few rather than too many: what walks do not come by, and what few choices lead to.
        drawing = hits >= _HITS
        estimate = self.product * hits // drawn if drawing else max(self._halved(points), self._branched())
        return min(max(estimate, len(points)), self.product)

    def draw(self, rng: np.random.Generator, count: int, near: Iterable[Point] = ()) -> list[Point]:
        """Return up to `count` points at random, which need not differ; none if none is known.

        Args:
            rng: Random numbers.
            count: How many.
            near: Some points, which help where few are known.
        """
        if self.points is not None:
            return [self.points[i] for i in rng.integers(len(self.points), size=count).tolist()] if self.points else []
        if self.free:
            levels = [rng.integers(len(axis), size=count).tolist() for axis in self.axes]
            return list(zip(*levels, strict=True))
        points, drawn, hits = self.known
        starts = [*points, *near]
        if not starts or not count:
            return []
        if hits * _REJECTIONS >= drawn:
            return self._rejecting(rng, count)
        seed = int(rng.integers(2**62))
        chains = min(_CHAINS, count)
        steps = -(-_STEPS * count // chains)
        visited: dict[Point, None] = {}
        for number, start in enumerate(rng.integers(len(starts), size=chains).tolist()):
            chain = Chain(self, starts[start], seed + number)
            chain.run(_WARM_UP)
            visited.update(dict.fromkeys(chain.run(steps)))
        if len(visited) < count:
            more = descended(self, random.Random(seed), _MORE)
            visited.update(dict.fromkeys(itertools.islice(more, count - len(visited))))
        found = list(visited)
        chosen = rng.permutation(len(found))[:count].tolist() if len(found) >= count else range(len(found))
        return [found[i] for i in chosen]

    def _rejecting(self, rng: np.random.Generator, count: int) -> list[Point]:
        found: list[Point] = []
        for _ in range(2 * _REJECTIONS):
            levels = [rng.integers(len(axis), size=count).tolist() for axis in self.axes]
            found += filter(self.has, zip(*levels, strict=True))
            if len(found) >= count:
                break
        return found[:count]

    def _halved(self, points: Sequence[Point]) -> int:
        """Estimate the number of points: halve an axis' range, walk to see the halves' shares, go on in the larger.

        Source: Jerrum, Valiant and Vazirani, Random generation of combinatorial structures from a uniform
        distribution, 1986.
        """
        chain = Chain(self, points[0], 0)
        halvings = sum(math.ceil(math.log2(len(axis))) for axis in self.axes)
        steps = max(_LEAST_ROUND, min(_ROUND, _ESTIMATING // (chain.cost * max(halvings, 1))))
        done, total, effort = 0, 0.0, Effort(_ESTIMATING)
        for position in range(len(self.axes)):
            low, high = chain.bounds[position]
            while high - low > 1:
                if not effort.spend(steps * chain.cost):  # the rest is taken to be like what was seen
                    return int(2.0 ** min(total / done * halvings, 1000.0)) if done else 1
                middle = (low + high) // 2
                visited = list(chain.run(steps))
                below = [point for point in visited if point[position] < middle]
                half = below if 2 * len(below) >= len(visited) else [p for p in visited if p[position] >= middle]
                low, high = (low, middle) if half is below else (middle, high)
                chain.restrict(position, low, high, half[-1])
                total, done = total + math.log2(len(visited) / len(half)), done + 1
        return int(math.exp2(min(total, 1000.0)))

    def _branched(self) -> int:
        """Estimate the number of points: choose the axes at random, one by one, and multiply how many ways there are.

        Source: Knuth, Estimating the efficiency of backtrack programs, 1975.
        """
        rng, effort = random.Random(0), Effort(_ESTIMATING)
        checks = by_last(self.constraints, [self.axes[i].name for i in self._order])
        costs = [_VISIT + sum(cost_of(check, self.names) for check in some) for some in checks]
        total, tries = 0.0, 0
        while effort.left > 0 and tries < _BRANCHED:
            assignment, ways = dict[str, Any].fromkeys(self.names), 1.0
            for i, some, cost in zip(self._order, checks, costs, strict=True):
                axis, levels = self.axes[i], list(_levels(self.axes[i], rng))
                kept = []
                for level in levels:
                    effort.spend(cost)
                    assignment[axis.name] = axis.values[level]
                    if all(check(assignment) for check in some):
                        kept.append(level)
                ways = min(ways * len(axis) * len(kept) / len(levels), 1e300)
                if not kept:
                    break
                assignment[axis.name] = axis.values[rng.choice(kept)]
            total, tries = total + ways, tries + 1
        return round(total / max(tries, 1))

    def _search(self, order: Sequence[int], effort: Effort, rng: random.Random | None = None) -> Iterator[Point]:
        """Yield the points, choosing the axes in this order; end early when the effort is spent."""
        checks = by_last(self.constraints, [self.axes[i].name for i in order])
        costs = [_VISIT + sum(cost_of(check, self.names) for check in some) for some in checks]
        assignment: dict[str, Any] = dict.fromkeys(self.names)  # in the order in which they were declared
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
    """Return the positions of the axes of each part: those that constraints tie together."""
    position = {axis.name: i for i, axis in enumerate(axes)}
    leader = list(range(len(axes)))

    def first(i: int) -> int:
        while leader[i] != i:
            leader[i] = i = leader[leader[i]]
        return i

    for constraint in constraints:
        reads = [first(position[name]) for name in constraint.reads or position]
        for i in reads:
            leader[first(i)] = first(reads[0])
    tied: dict[int, list[int]] = {}
    for i in range(len(axes)):
        tied.setdefault(first(i), []).append(i)
    return sorted(tied.values())


def _levels(axis: Axis, rng: random.Random | None) -> Iterator[int]:
    """Return the positions of an axis' values in their order; or with `rng` in another, and not all of very many."""
    count = len(axis)
    if rng is None:
        return iter(range(count))
    if count <= _SHUFFLED:
        return iter(rng.sample(range(count), count))
    return iter([rng.randrange(count) for _ in range(_SHUFFLED)])


def _order(axes: Sequence[Axis], constraints: Sequence[Constraint]) -> list[int]:
    """Return the order of axes in which constraints can be checked soonest."""
    position = {axis.name: i for i, axis in enumerate(axes)}
    left = [[position[name] for name in constraint.reads or position] for constraint in constraints]
    order: dict[int, None] = {}
    while left:
        costs = [math.prod(len(axes[i]) for i in reads if i not in order) for reads in left]
        order.update(dict.fromkeys(left.pop(costs.index(min(costs)))))
    return list(order)
