# SPDX-License-Identifier: Apache-2.0
"""Walks at random through configurations that meet constraints, and how a first one is found.

Constraints are functions of which nothing is known. Where so few assignments meet them that drawing is hopeless, and
they say so only once all axes are chosen, what helps is a configuration that meets them: most often, others do that
differ from it on one axis or on two.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ejkernel.ops.config.spaces.constraints import Constraint
from ejkernel.ops.errors import ConfigError

if TYPE_CHECKING:
    from ejkernel.ops.config.spaces.parts import Part, Point

_CALL = 8  # looks at a value that take as long as calling a constraint
_STEP = 40  # and a step of a walk
# How much is done for a part of which not all can be listed. A million takes 0.1 s to 0.2 s.
_DRAWN = 1_000_000  # on assignments that are drawn evenly
_AIMED = 1_000_000  # on those whose axes are all low, all high, or at one height
_DESCENDED = 2_000_000  # on those whose axes are chosen one after the other
_REPAIRED = 2_000_000  # on those that are changed until they meet all constraints
_ONCE = 400  # for each axis, before a search at random starts again
_PATIENCE = 200  # changes of an assignment before another is tried
_NOISE = 0.1  # share of changes that are made although they do not help
_TRIED = 16  # values of an axis of which the best is taken
_STARTS = 64  # points to walk from
_ENOUGH = 16  # of them, not to look for more in another way
_KINDS = 5  # of steps
_LEARNED = 64  # steps after which it is looked up anew which kinds are taken
_SPREAD = 200  # steps from each point that was found


@dataclasses.dataclass(slots=True)
class Effort:
    """How much may still be done, in looks at a value: a limit that does not depend on the machine or its load."""

    left: int

    def spend(self, amount: int = 1) -> bool:
        """Return whether there was as much."""
        self.left -= amount
        return self.left >= 0


class Chain:
    """A walk from point to point: each step proposes other values on an axis or two, and takes them if they are valid.

    Steps are as likely as their way back, so that in the end every point that can be reached is as likely as any
    other: a Metropolis walk. Two axes at a time, because sums and products may have to stay what they are.

    Args:
        part: The axes and constraints.
        point: Where to start, which must be valid.
        seed: Of the random numbers.
    """

    def __init__(self, part: Part, point: Point, seed: int) -> None:
        self.bounds = [(0, len(axis)) for axis in part.axes]
        self._movable = [i for i, axis in enumerate(part.axes) if len(axis) > 1]
        self._part, self._random = part, random.Random(seed)
        self._reading = part.reading
        self._kinds = [[0, 0] for _ in range(_KINDS)]  # of each kind of step, how many were proposed, and taken
        self._whole = any(constraint.reads is None for constraint in part.constraints)
        self._start(point)

    @property
    def cost(self) -> int:
        """Return what a step takes, about."""
        return _STEP + (len(self._part.axes) if self._whole else 0)

    def restrict(self, position: int, low: int, high: int, point: Point) -> None:
        """From now on leave an axis between these levels, the latter excluded; go on from a point where it is."""
        self.bounds[position] = (low, high)
        if high - low == 1:
            self._movable.remove(position)
        self._start(point)

    def _start(self, point: Point) -> None:
        self._levels = list(point)
        self._assignment = {a.name: a.values[level] for a, level in zip(self._part.axes, point, strict=True)}

    def run(self, steps: int) -> Iterator[Point]:
        """Take so many steps, and return where each of them ended."""
        points: list[Point] = []
        while len(points) < steps:
            weights = [(taken + 1) / (proposed + 2) for proposed, taken in self._kinds]
            count = min(_LEARNED, steps - len(points))
            points += [self._step(kind) for kind in self._random.choices(range(_KINDS), weights, k=count)]
        return iter(points)

    def _step(self, kind: int) -> Point:
        moves = self._proposed(kind)
        self._kinds[kind][0] += 1
        if all(self.bounds[i][0] <= level < self.bounds[i][1] for i, level in moves):
            before = [(i, self._levels[i]) for i, _ in moves]
            self._set(moves)
            if moves == before or all(check(self._assignment) for check in self._to_check([i for i, _ in moves])):
                self._kinds[kind][1] += moves != before
            else:
                self._set(before)
        return tuple(self._levels)

    def _proposed(self, kind: int) -> list[tuple[int, int]]:
        """Return what to set: an axis or two, to any value or to one that is not far away."""
        rng, levels, movable = self._random, self._levels, self._movable
        if not movable:
            return []
        first = rng.randrange(len(movable))
        i = movable[first]
        if kind < 2 or len(movable) == 1:
            return [(i, levels[i] + self._stride(i) if kind % 2 else self._drawn(i))]
        j = movable[first - rng.randrange(1, len(movable))]
        if kind == 2:
            return [(i, self._drawn(i)), (j, self._drawn(j))]
        stride = self._stride(i if rng.random() < 0.5 else j)
        return [(i, levels[i] + stride), (j, levels[j] + (stride if kind == 3 else -stride))]

    def _drawn(self, i: int) -> int:
        return self._random.randrange(*self.bounds[i])

    def _stride(self, i: int) -> int:
        """Return how far to go: one as often as up to two, four, ... values."""
        low, high = self.bounds[i]
        reach = 1 << self._random.randrange(max(1, (high - low - 1).bit_length()))
        return self._random.choice((-1, 1)) * self._random.randint(1, reach)

    def _set(self, moves: Sequence[tuple[int, int]]) -> None:
        for i, level in moves:
            self._levels[i] = level
            axis = self._part.axes[i]
            self._assignment[axis.name] = axis.values[level]

    def _to_check(self, positions: Sequence[int]) -> list[Constraint]:
        concerned = sorted({number for i in positions for number in self._reading[i]})
        return [self._part.constraints[number] for number in concerned]


def cost_of(constraint: Constraint, names: Sequence[str]) -> int:
    """Return what a call of it takes, about."""
    return _CALL + len(constraint.reads or names)


def start_points(part: Part, seen: Sequence[Point]) -> tuple[tuple[Point, ...], int, int]:
    """Look for points of a part, in a time that is limited.

    Args:
        part: The part.
        seen: Points that are known.

    Returns:
        Points that differ, if any was found; how many assignments were drawn evenly; how many of them are points.
    """
    rng = random.Random(0)
    found = dict.fromkeys(seen)
    drawn, hits = 0, 0
    effort = Effort(_DRAWN)
    while hits < _STARTS and effort.spend(part.cost):
        point, drawn = tuple(rng.randrange(len(axis)) for axis in part.axes), drawn + 1
        if part.has(point):
            found.setdefault(point)
            hits += 1
    for others in (_aimed, descended, _repaired):
        if len(found) < _ENOUGH:
            found.update(dict.fromkeys(itertools.islice(others(part, rng), _STARTS)))
    for number, point in enumerate(list(found)[:_STARTS]):
        found.update(dict.fromkeys(itertools.islice(Chain(part, point, number).run(_SPREAD), 0, None, _SPREAD // 4)))
    return tuple(found), drawn, hits


def _aimed(part: Part, rng: random.Random) -> Iterator[Point]:
    """Yield points among assignments whose axes are all low, all high, or at about one height.

    What bounds a sum or a product is met there, if anywhere.
    """
    last = [len(axis) - 1 for axis in part.axes]
    effort = Effort(_AIMED)
    tries: Iterator[Point] = iter([(0,) * len(last), tuple(last)])
    while effort.spend(part.cost):
        point = next(tries, None)
        if point is None:
            height, spread = rng.random(), rng.random() ** 2
            if rng.random() < 0.5:
                point = tuple(end if rng.random() < height else 0 for end in last)
            else:
                at = (min(max(height + spread * (rng.random() - 0.5), 0.0), 1.0) for _ in last)
                point = tuple(round(end * part_of) for end, part_of in zip(last, at, strict=True))
        if part.has(point):
            yield point


def descended(part: Part, rng: random.Random, most: int = _DESCENDED) -> Iterator[Point]:
    """Yield points that are found by choosing one axis after the other, and going back where there is no way on."""
    effort = Effort(most)
    while effort.left > 0:
        once = Effort(min(_ONCE * len(part.axes), effort.left))
        effort.left -= once.left
        yield from itertools.islice(part.descend(once, rng), 1)
        effort.left += max(once.left, 0)


def _repaired(part: Part, rng: random.Random) -> Iterator[Point]:
    """Yield points that are found by changing what violated constraints read, so that fewer are violated.

    Source: Selman, Kautz and Cohen, Noise strategies for improving local search, 1994.
    """
    if len(part.constraints) < 2:
        return  # which change helps cannot be told
    effort = Effort(_REPAIRED)
    while effort.left > 0:
        repair = _Repair(part, rng, effort)
        for _ in range(_PATIENCE + 2 * len(part.axes)):
            if not repair.violated:
                if part.has(point := tuple(repair.levels)):
                    yield point
                break
            if effort.left <= 0:
                break
            repair.change()


class _Repair:
    """An assignment that is changed until it violates no constraint."""

    def __init__(self, part: Part, rng: random.Random, effort: Effort) -> None:
        self._part, self._random, self._effort = part, rng, effort
        self._reading = part.reading
        self._position = {name: i for i, name in enumerate(part.names)}
        self.levels = [rng.randrange(len(axis)) for axis in part.axes]
        self._assignment = {axis.name: axis.values[level] for axis, level in zip(part.axes, self.levels, strict=True)}
        self.violated = dict.fromkeys(self._broken(range(len(part.constraints))))

    def change(self) -> None:
        """Change the value of an axis that a violated constraint reads to the one of some that helps most."""
        constraint = self._part.constraints[self._random.choice(list(self.violated))]
        i = self._position[self._random.choice(constraint.reads or self._part.names)]
        before = sum(number in self.violated for number in self._reading[i])
        old, count = self.levels[i], len(self._part.axes[i])
        levels = range(count) if count <= _TRIED else [self._random.randrange(count) for _ in range(_TRIED)]
        broken: dict[int, list[int]] = {}
        for level in levels:
            if level != old:
                self._set(i, level)
                broken[level] = self._broken(self._reading[i])
        fewest = min(map(len, broken.values()), default=before + 1)
        if (fewest > before and self._random.random() >= _NOISE) or not broken:
            self._set(i, old)
            return
        best = self._random.choice([level for level, some in broken.items() if len(some) == fewest])
        self._set(i, best)
        for number in self._reading[i]:
            self.violated.pop(number, None)
        self.violated.update(dict.fromkeys(broken[best]))

    def _set(self, i: int, level: int) -> None:
        axis = self._part.axes[i]
        self.levels[i], self._assignment[axis.name] = level, axis.values[level]

    def _broken(self, numbers: Iterable[int]) -> list[int]:
        return [number for number in numbers if not self._holds(self._part.constraints[number])]

    def _holds(self, constraint: Constraint) -> bool:
        self._effort.spend(cost_of(constraint, self._part.names))
        try:
            return constraint(self._assignment)
        except ConfigError:  # it may be asked only where others hold; if they all do, `Part.has` raises
            return False
