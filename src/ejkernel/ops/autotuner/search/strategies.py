# SPDX-License-Identifier: Apache-2.0
"""Search strategies: which configuration to measure next. A strategy proposes and learns; it never measures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ejkernel.ops.autotuner.search.gaussian_process import Hyper
from ejkernel.ops.autotuner.search.model import LEAST, Model, Prior, RankedPoints, Scatter, is_time
from ejkernel.ops.autotuner.search.model import Record as Record
from ejkernel.ops.autotuner.search.model import SearchOptions as SearchOptions
from ejkernel.ops.config.spaces.space import ConfigSpace, Point
from ejkernel.ops.errors import ConfigError

_SAMPLED = 4096  # configurations sampled from a large space for ranking, beside the neighbours of the best
_REFINED = 8  # number of best configurations whose neighbours are ranked too
_NEIGHBOURS = 512  # nearest neighbours ranked for each of them
_MODELLED = 256  # with more axes, random search replaces the model


def seeds_of(records: Iterable[Record], seeds: Iterable[object]) -> list[Any]:
    """Return the fastest configuration of each record, followed by `seeds`."""
    return [*(config for record in records for config in record.best), *seeds]


class Strategy:
    """A search through configurations: remaining seeds, proposed configurations and recorded times."""

    def __init__(self, space: ConfigSpace[Any], seeds: Iterable[object]) -> None:
        self.space = space
        self.times: dict[Point, float | None] = {}
        self._seeds = [config for config in seeds if config in space]
        self._best = math.inf
        self._proposed: dict[Point, None] = {}  # in this order

    def ask(self, n: int = 1) -> list[Any]:
        """Return up to `n` configurations to measure: first the seeds in order, then the strategy's choices."""
        chosen: list[Point] = []
        while len(chosen) < n and self._seeds:
            point = self.space.point(self._seeds.pop(0))
            if point not in self._proposed:
                self._proposed.setdefault(point)
                chosen.append(point)
        while len(chosen) < n:
            points = self._choose(n - len(chosen))
            if not points:
                break
            self._proposed.update(dict.fromkeys(points))
            chosen.extend(points)
        return [self.space.config(point) for point in chosen]

    def tell(self, config: object, seconds: float | None) -> None:
        """Record the time of a configuration; `None`, or anything but a positive finite number, is a failure.

        The time of a configuration outside the space only counts as the time to beat.
        """
        time = seconds if is_time(seconds) else None
        self._best = self._best if time is None else min(self._best, time)
        try:
            point = self.space.point(config)
        except ConfigError:
            return
        again = point in self.times
        self._proposed.setdefault(point)
        self.times[point] = time
        if not again:
            self._learn(point, time)

    def _choose(self, n: int) -> list[Point]:
        """Return up to `n` points not proposed before, and at least one if any is left."""
        raise NotImplementedError

    def _learn(self, point: Point, seconds: float | None) -> None:
        """Update the strategy with the first result of a configuration."""

    def _unseen(self, points: Iterable[Point], n: int) -> list[Point]:
        """Return the first `n` points not proposed before, and leave the rest of an iterator for the next call."""
        return list(itertools.islice((point for point in points if point not in self._proposed), n))


class Random(Strategy):
    """Propose random configurations without repetition.

    Args:
        space: The search space.
        seeds: Configurations to propose first.
        seed: Seed of the random numbers.
    """

    def __init__(self, space: ConfigSpace[Any], *, seeds: Iterable[object] = (), seed: int = 0) -> None:
        super().__init__(space, seeds)
        self._rng = np.random.default_rng(seed)
        self._order: Iterator[Point] | None = None

    def _choose(self, n: int) -> list[Point]:
        if self.space.points() is None:
            return self._unseen(self.space.sample_points(self._rng, 4 * n + 16, near=self._proposed), n)
        self._order = self._order or iter(self.space.sample_points(self._rng, self.space.size))
        return self._unseen(self._order, n)


class ModelSearch(Strategy):
    """Bayesian optimisation: propose the configuration with the largest expected improvement.

    The search proposes, in this order: the fastest configuration of each record; the seeds; without records, a few
    configurations far from each other; and then the recommendations of a Gaussian process over the log of the time.
    The weight of a record depends on its agreement with the local measurements and falls while no better time is
    found. A failure lowers the chance of its neighbours. A space too large to rank is sampled, and the sample and the
    neighbours of the best are ranked.

    Args:
        space: The search space.
        seeds: Configurations to try early, such as the heuristic; those outside the space are ignored.
        records: Measurements from other devices or shapes, the most similar first.
        seed: Seed of the random numbers; the same times and seed give the same search.
        options: Parameters of the search.
    """

    def __init__(
        self,
        space: ConfigSpace[Any],
        *,
        seeds: Iterable[object] = (),
        records: Iterable[Record] = (),
        seed: int = 0,
        options: SearchOptions | None = None,
    ) -> None:
        self.options = options or SearchOptions()
        records = tuple(records)
        super().__init__(space, seeds_of(records, seeds))
        self._rng = np.random.default_rng(seed)
        priors = (Prior(space, record, self.options) for record in records)
        self._priors = tuple(prior for prior in priors if len(prior.times) >= LEAST)
        self._measured = self._failures = 0
        self._scatter: Scatter | None = None
        self._candidates: RankedPoints | None = None
        self._model: Model | None = None
        self._hypers: tuple[Hyper, ...] = ()
        self._failing: Hyper | None = None
        self._stale_at = 0

    def _learn(self, point: Point, seconds: float | None) -> None:
        self._measured += seconds is not None
        self._failures += seconds is None
        if seconds == self._best and self.space.points() is None:
            self._stale_at = 0  # rank the neighbours of the new best
        row = None if self._candidates is None else self._candidates.rows.get(point)
        if row is None or self._candidates is None:
            return
        if self._model is not None:
            self._model.add(row, seconds)
        if seconds is None and self._failures == 1:
            self._stale_at = 0  # the current model expects no failures

    def _choose(self, n: int) -> list[Point]:
        if not self._priors and (len(self._proposed) < self.options.scattered or self._measured < LEAST):
            self._scatter = self._scatter or Scatter(self.space, self._rng, self.options, near=self._proposed)
            point = self._scatter.farthest(self._proposed)
            if point is not None:
                return [point]
        model = self._refit() if self._model is None or self._measured >= self._stale_at else self._model
        points = model.best(n, self._best, self._proposed)
        if not points and self.space.points() is None:
            points = self._refit().best(n, self._best, self._proposed)  # the whole sample was measured: draw another
        return points

    def _refit(self) -> Model:
        """Fit the hyperparameters again; this is slow and happens only now and then."""
        if self._candidates is None or self.space.points() is None:
            self._candidates = RankedPoints(self.space, self._ranked(), self._priors, self.options)
        columns = self._candidates.pool.columns.shape[1]
        self._hypers = self._hypers or tuple(
            Hyper.start(columns, records=records, additive=share)
            for records, shares in self._kinds()
            for share in shares
        )
        self._model = model = Model(self._candidates, self._hypers, self.times, self._failing)
        self._hypers, self._failing = model.hypers, model.failing.hyper
        self._stale_at = self._measured + max(2, self._measured // 5)
        return model

    def _kinds(self) -> list[tuple[bool, tuple[float, ...]]]:
        """Return the Gaussian processes to use, as pairs: whether it knows the records, and its additive shares.

        With records, one process of each kind is enough, and an evaluation stays cheap.
        """
        shares = self.options.additive
        return [(True, shares[-1:]), (False, shares[-1:])] if self._priors else [(False, shares)]

    def _ranked(self) -> list[Point]:
        """Return the points to rank: all, or the measured ones, a sample, and the neighbours of the best."""
        everything = self.space.points()
        if everything is not None:
            return list(everything)
        measured = sorted((seconds, point) for point, seconds in self.times.items() if seconds is not None)
        points = dict.fromkeys(self.times)
        for _, point in measured[:_REFINED]:
            points.update(dict.fromkeys(self.space.neighbour_points(point, _NEIGHBOURS)))
        points.update(dict.fromkeys(self.space.sample_points(self._rng, _SAMPLED, near=self._proposed)))
        return list(points)


def default_strategy(
    space: ConfigSpace[Any], *, seeds: Iterable[object] = (), records: Iterable[Record] = (), seed: int = 0
) -> Strategy:
    """Return the strategy for a space too large to list: random with hundreds of axes, otherwise model-based."""
    seeds = (*seeds, *space.seeds)
    if len(space.axes) > _MODELLED:
        return Random(space, seeds=seeds_of(records, seeds), seed=seed)
    return ModelSearch(space, seeds=seeds, records=records, seed=seed)
