# SPDX-License-Identifier: Apache-2.0
"""Search strategies: which configuration to measure next. They ask, are told, and never measure anything themselves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ejkernel.ops.config._axes import ALIGNED_FROM, Floats
from ejkernel.ops.config.space import ConfigSpace, Point
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.execution._surrogate import Hyper, Pool, Process, Scale, expected_improvement

_EXHAUSTIVE = 64  # a space of at most this size is not worth a model
_SCATTERED = 512  # configurations among which the first ones are spread out
_SAMPLED = 4096  # configurations of a large space that are ranked, beside the neighbours of the best
_REFINED = 8  # of the best: their neighbours are ranked too
_POINTS = 256  # measurements that the model holds
_RECORDED = 256  # measurements of a record that stand for it where it has gaps
_LEAST = 3  # measurements before a model without records says anything
_REACH = 0.3  # distance, in unit-wide axes, over which a failure makes another one likelier


class Strategy(Protocol):
    """A search through configurations."""

    def ask(self, n: int = 1) -> list[Any]:
        """Return up to `n` configurations to measure, none of which was returned before; none at the end."""

    def tell(self, config: Any, seconds: float | None) -> None:
        """Take note of a configuration's time; `None` if it failed."""


@dataclasses.dataclass(frozen=True)
class Record:
    """What was measured for the same kernel elsewhere: on another device, or for another shape.

    Attributes:
        label: Where.
        times: Pairs of a configuration and its seconds; `None` for a failure.
    """

    label: str
    times: tuple[tuple[Any, float | None], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", tuple(self.times))

    def best(self, count: int) -> list[Any]:
        """Return the fastest configurations."""
        measured = [(seconds, i) for i, (_, seconds) in enumerate(self.times) if seconds is not None]
        return [self.times[i][0] for _, i in sorted(measured)[:count]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Parameters of `ModelSearch`, chosen on recorded spaces.

    Attributes:
        scattered: Configurations, seeds included, that are spread over the space before the model is asked.
        recorded: The fastest configurations of each record that are tried first.
        additive: Share of the model that is a sum of functions of one axis.
        aligned_from: Values that a numeric axis needs for the model to see how often two divides them.
    """

    scattered: int = 4
    recorded: int = 1
    additive: float = 0.2
    aligned_from: int = ALIGNED_FROM


def seeds_of(records: Iterable[Record], seeds: Iterable[Any] = (), *, count: int = 1) -> list[Any]:
    """Return the fastest `count` configurations of each record, in turns, and then `seeds`."""
    columns = [record.best(count) for record in records]
    turns = [column[i] for i in range(count) for column in columns if i < len(column)]
    return [*turns, *seeds]


class _Told:
    """What every strategy keeps: the seeds that are left, what was proposed, what was told."""

    def __init__(self, space: ConfigSpace[Any], seeds: Iterable[Any]) -> None:
        self.space = space
        self.times: dict[Point, float | None] = {}
        self._seeds = [config for config in seeds if config in space]
        self._proposed: set[Point] = set()

    def ask(self, n: int = 1) -> list[Any]:
        """Return up to `n` configurations to measure: the seeds in their order, and then what the strategy says."""
        chosen: list[Point] = []
        while len(chosen) < n and self._seeds:
            point = self.space.point(self._seeds.pop(0))
            if point not in self._proposed:
                self._proposed.add(point)
                chosen.append(point)
        while len(chosen) < n:
            points = self._choose(n - len(chosen))
            if not points:
                break
            self._proposed.update(points)
            chosen.extend(points)
        return [self.space.config(point) for point in chosen]

    def tell(self, config: Any, seconds: float | None) -> None:
        """Take note of a configuration's time; `None`, or what is not a positive finite number, is a failure.

        A configuration that is not in the space counts for nothing but the time to beat.
        """
        failed = seconds is None or not (math.isfinite(seconds) and seconds > 0.0)
        time = None if failed else seconds
        try:
            point = self.space.point(config)
        except ConfigError:
            point = None
        if point is not None:
            self._proposed.add(point)
            self.times[point] = time
        self._learn(point, time)

    def _choose(self, n: int) -> list[Point]:
        """Return up to `n` points that were not proposed, and at least one if there is any."""
        raise NotImplementedError

    def _learn(self, point: Point | None, seconds: float | None) -> None:
        """Take note of one time."""


class Exhaustive(_Told):
    """Every configuration, in the space's order.

    Args:
        space: The configurations.
        seeds: What comes first.
    """

    def __init__(self, space: ConfigSpace[Any], *, seeds: Iterable[Any] = ()) -> None:
        super().__init__(space, seeds)
        self._walk = space.walk()

    def _choose(self, n: int) -> list[Point]:
        points: list[Point] = []
        for point in self._walk:
            if point not in self._proposed:
                points.append(point)
            if len(points) == n:
                break
        return points


class Random(_Told):
    """Configurations at random, none twice.

    Args:
        space: The configurations.
        seeds: What comes first.
        seed: Of the random numbers.
    """

    def __init__(self, space: ConfigSpace[Any], *, seeds: Iterable[Any] = (), seed: int = 0) -> None:
        super().__init__(space, seeds)
        self._rng = np.random.default_rng(seed)
        self._order: Iterator[Point] | None = None

    def _choose(self, n: int) -> list[Point]:
        if not self.space.is_small:
            return _unseen(self.space.sample_points(self._rng, n + len(self._proposed)), self._proposed)[:n]
        if self._order is None:
            self._order = iter(self.space.sample_points(self._rng, self.space.size))
        points: list[Point] = []
        for point in self._order:
            if point not in self._proposed:
                points.append(point)
            if len(points) == n:
                break
        return points


class ModelSearch(_Told):
    """Bayesian optimisation: the configuration that is expected to improve most on the best, given all that is known.

    First come the fastest of each record, in the order of the records; then the seeds; then, where there are no
    records, configurations far from each other; then those which a Gaussian process over the logarithm of the time
    recommends. Records are believed as far as they agree with what is measured here. Failures lower the chance that
    is given to what is near them. Of a space that is too large to be ranked, a sample is, and what is near the best.

    Args:
        space: The configurations.
        seeds: Configurations to try early, such as the heuristic's.
        records: What is known from other devices or shapes, the nearest first.
        seed: Of the random numbers; with the same times, the same seed makes the same search.
        options: Parameters of the search.
    """

    def __init__(
        self,
        space: ConfigSpace[Any],
        *,
        seeds: Iterable[Any] = (),
        records: Iterable[Record] = (),
        seed: int = 0,
        options: SearchOptions | None = None,
    ) -> None:
        self.options = options or SearchOptions()
        records = list(records)
        super().__init__(space, seeds_of(records, seeds, count=self.options.recorded))
        self._rng = np.random.default_rng(seed)
        self._priors = [_Prior.of(space, record, self.options) for record in records]
        self._priors = [prior for prior in self._priors if len(prior.points) >= _LEAST]
        self._best = math.inf
        self._scatter: _Scatter | None = None
        self._model: _Model | None = None
        self._hyper: Hyper | None = None
        self._refit_at = 0

    def _learn(self, point: Point | None, seconds: float | None) -> None:
        improved = seconds is not None and seconds < self._best
        self._best = self._best if seconds is None else min(self._best, seconds)
        if point is None:
            return
        if improved and not self.space.is_small:
            self._refit_at = 0  # so that the new best's neighbours are ranked
        if self._model is not None:
            self._model.add(point, seconds)

    def _choose(self, n: int) -> list[Point]:
        measured = sum(seconds is not None for seconds in self.times.values())
        if not self._priors and (len(self._proposed) < self.options.scattered or measured < _LEAST):
            self._scatter = self._scatter or _Scatter(self.space, self._rng, self.options)
            point = self._scatter.farthest(self._proposed)
            if point is not None:
                return [point]
            if measured < _LEAST:
                return _unseen(self._candidates(), self._proposed)[:n]
        if self._model is None or measured >= self._refit_at:
            self._refit()
            self._refit_at = measured + max(2, measured // 5)
        assert self._model is not None
        return self._model.best(n, self._best, self._proposed)

    def _candidates(self) -> list[Point]:
        """Return what is ranked: everything, or a sample with the neighbours of the best."""
        everything = self.space.points()
        if everything is not None:
            return list(everything)
        measured = sorted((seconds, point) for point, seconds in self.times.items() if seconds is not None)
        points = dict.fromkeys(self.times)
        for _, point in measured[:_REFINED]:
            points.update(dict.fromkeys(self.space.neighbour_points(point)))
        points.update(dict.fromkeys(self.space.sample_points(self._rng, _SAMPLED)))
        return list(points)

    def _refit(self) -> None:
        pool = _Candidates(self.space, self._candidates(), self._priors, self.options)
        self._model = _Model(pool, self._hyper, self.times)
        self._hyper = self._model.hyper
