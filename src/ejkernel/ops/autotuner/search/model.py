# SPDX-License-Identifier: Apache-2.0
"""The state of a model-based search: candidates, records of other devices, measurements and failures."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from ejkernel.ops.autotuner.search.gaussian_process import Hyper, Pool, Process, Scale, expected_improvement, normal_cdf
from ejkernel.ops.config.spaces.axes import ALIGNED_FROM, Floats
from ejkernel.ops.config.spaces.space import ConfigSpace, Point
from ejkernel.ops.errors import ConfigError

# Evidence from replaying recorded spaces (`benchmarks/search.py --failing`). In nine spaces the most promising pair of
# values was made to fail (8 % of the configurations; four seeds each): with this model 4 % of the first hundred
# measurements fail and the score is 0.69; with the share of failures nearby it was 35 % and 0.52. The product of the
# two is no better than this model (four spaces, twenty seeds each: 4.8 % and 0.411 either way). In three spaces with
# real failures (3 to 8 %; twenty seeds each), 78 % of the searches come within 5 % of the best after 100 measurements,
# before 73 %; the score, which also counts the way there, falls from 0.63 to 0.59.
_ADDITIVE = 0.5  # share of a sum over axes: most failures depend on one value or on a pair
_NOISE = 0.01  # variance of an outcome: a configuration that failed fails again
_HELD = 256  # measurements in a model
_LEAST_DEVIATION = 0.1
_LEAST_CHANCE = 1e-6  # never zero, so that every configuration is proposed in the end
LEAST = 3  # measurements that a model without records needs, and that a record needs to be used
_SCATTERED = 512  # configurations from which the first, scattered ones are chosen
_RECORDED = 256  # measurements of a record used for interpolation
_RESTLESS = 50.0  # measurements without a better time after which the model's uncertainty is doubled
_MOST_RESTLESS = 3.0
_TRUST = 25.0  # measurements without a better time after which records have half their weight
_SAME_FAILURE = 0.9  # chance that a configuration fails here that failed in all records
_RECORD_WEIGHT = 3.0  # weight of the records' spread, in measurements


class Failing:
    """A Gaussian process over outcomes: 1 for a failure, 0 for a success.

    The same fit that finds the axes and values important for times finds those important for failures. The chance that
    a configuration works is the probability that the process is below one half. A few failures in one region therefore
    suffice to leave it, even if the time model promises much there. Without failures the model costs nothing.

    Args:
        pool: The configurations.
        rows: The rows of the tried configurations.
        failed: Whether each of them failed.
        start: The hyperparameters from which the fit starts, such as those of the previous fit.
    """

    def __init__(self, pool: Pool, rows: Sequence[int], failed: Sequence[bool], start: Hyper | None) -> None:
        self.hyper = start
        self._pool = pool
        self._outcomes = [float(outcome) for outcome in failed]
        self._process: Process | None = None
        if not any(failed):
            return
        kept = kept_outcomes(failed, _HELD)
        rows, self._outcomes = [rows[i] for i in kept], [self._outcomes[i] for i in kept]
        values = np.array(self._outcomes)
        first = Hyper.start(pool.columns.shape[1], records=False, additive=_ADDITIVE)
        start = start or dataclasses.replace(first, noise=_NOISE)
        self.hyper = pool.fit(start, np.array(rows, dtype=np.intp), values, self._scale(values))
        self._process = Process(pool, self.hyper, rows)

    def add(self, row: int, *, failed: bool) -> None:
        """Add one outcome."""
        if self._process is not None:
            self._process.add(row)
            self._outcomes.append(float(failed))

    def chance(self) -> Floats:
        """Return the estimated probability that each configuration works."""
        if self._process is None:
            return np.ones(self._pool.size)
        values = np.array(self._outcomes)
        mean, deviation = self._process.predict(values, self._scale(values))
        return np.maximum(normal_cdf((0.5 - mean) / np.maximum(deviation, _LEAST_DEVIATION)), _LEAST_CHANCE)

    def _scale(self, values: Floats) -> Scale:
        return Scale(float(values.var()) + 1e-3, 1.0)


def kept_outcomes(failed: Sequence[bool], most: int) -> list[int]:
    """Return the positions of the outcomes to keep: all, or those of the rarer kind and the latest others."""
    if len(failed) <= most:
        return list(range(len(failed)))
    kinds = ([i for i, outcome in enumerate(failed) if outcome is kind] for kind in (True, False))
    few, many = sorted(kinds, key=len)
    few = few[-(most // 2) :]
    return sorted([*few, *many[len(few) - most :]])


@dataclasses.dataclass(frozen=True)
class Record:
    """Measurements of the same kernel on another device or for another shape.

    Attributes:
        label: The device or shape.
        times: Pairs of a configuration and its time in seconds; `None` for a failure.
    """

    label: str
    times: tuple[tuple[Any, float | None], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", tuple(self.times))

    @property
    def best(self) -> list[Any]:
        """A list of the fastest configuration; empty without a time."""
        measured = [(seconds, config) for config, seconds in self.times if is_time(seconds)]
        return [min(measured, key=lambda pair: pair[0])[1]] if measured else []


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """Parameters of `ModelSearch`, chosen on recorded spaces.

    Attributes:
        scattered: Number of configurations, seeds included, measured before the model is used.
        additive: Share of the covariance that is a sum over single axes.
        aligned_from: Number of values from which a numeric axis has an alignment feature.
    """

    scattered: int = 4
    additive: tuple[float, ...] = (0.1, 0.4)
    aligned_from: int = ALIGNED_FROM


def is_time(seconds: float | None) -> TypeGuard[float]:
    """Return whether this is a valid time and not a failure."""
    return seconds is not None and math.isfinite(seconds) and seconds > 0.0


class Prior:
    """A record interpolated to every configuration of a space.

    Args:
        space: The search space; configurations outside it are ignored.
        record: The record.
        options: Parameters of the search.
    """

    def __init__(self, space: ConfigSpace[Any], record: Record, options: SearchOptions) -> None:
        self.space, self.options = space, options
        times: dict[Point, float] = {}
        self.failed: set[Point] = set()
        for config, seconds in record.times:
            try:
                point = space.point(config)
            except ConfigError:
                continue
            if is_time(seconds):
                times[point] = math.log(seconds)
            else:
                self.failed.add(point)
        middle = float(np.median(list(times.values()))) if times else 0.0
        self.times = {point: time - middle for point, time in times.items()}
        self._hyper: Hyper | None = None

    def fill(self, points: Sequence[Point]) -> Floats:
        """Return log times of `points`: recorded, the worst recorded for a failure, interpolated for the rest."""
        worst = max(self.times.values())
        values = np.array([self.times.get(p, worst if p in self.failed else math.nan) for p in points])
        gaps = np.flatnonzero(np.isnan(values)).tolist()
        if gaps:
            values[gaps] = self._interpolated([points[i] for i in gaps])
        return values

    def _interpolated(self, points: Sequence[Point]) -> Floats:
        """Return interpolated log times; half of the supporting points are the fastest ones, which matter most."""
        ranked = sorted(self.times, key=self.times.__getitem__)
        rest = ranked[_RECORDED // 2 :]
        held = ranked[: _RECORDED // 2] + rest[:: max(1, 2 * len(rest) // _RECORDED)]
        pool = _pool(self.space, [*held, *points], (), self.options)
        values, rows = np.array([self.times[point] for point in held]), np.arange(len(held))
        scale = Scale(float(values.var()) + 1e-12, 1.0)
        if self._hyper is None:
            self._hyper = pool.fit(
                Hyper.start(pool.columns.shape[1], records=False, additive=self.options.additive[0]),
                rows,
                values,
                scale,
            )
        mean, _ = Process(pool, self._hyper, rows.tolist()).predict(values, scale)
        interpolated: Floats = mean[len(held) :]
        return interpolated


class RankedPoints:
    """The points to rank, and the probability that each works.

    Args:
        space: The search space.
        points: The points.
        priors: The records.
        options: Parameters of the search.
    """

    def __init__(
        self, space: ConfigSpace[Any], points: Sequence[Point], priors: Sequence[Prior], options: SearchOptions
    ) -> None:
        self.points = tuple(points)
        self.rows = {point: row for row, point in enumerate(self.points)}
        self.pool = _pool(space, self.points, priors, options)
        self.plain = self.pool.without_records()
        recorded = np.array([[point in prior.failed for point in self.points] for prior in priors])
        # The probability that each point works, according to the records.
        self.chance: Floats = (
            1.0 - _SAME_FAILURE * recorded.mean(axis=0) if len(recorded) else np.ones(len(self.points))
        )


class Model:
    """Gaussian processes over the candidates, given the measurements so far.

    Args:
        candidates: The candidates to rank.
        hypers: The hyperparameters from which the fits start, one for each process.
        times: The measured times; `None` for a failure.
        failing: The hyperparameters from which the fit to failures starts, if there is an earlier fit.
    """

    def __init__(
        self,
        candidates: RankedPoints,
        hypers: Sequence[Hyper],
        times: Mapping[Point, float | None],
        failing: Hyper | None = None,
    ) -> None:
        self.candidates = candidates
        measured = {candidates.rows[p]: math.log(t) for p, t in times.items() if t is not None and p in candidates.rows}
        rows = _held(list(measured), list(measured.values()))
        self._values = [measured[row] for row in rows]
        self.hypers = tuple(hypers)
        if rows:
            values, indices = np.array(self._values), np.array(rows, dtype=np.intp)
            self.hypers = tuple(
                self._pool_of(hyper).fit(hyper, indices, values, self._scale(hyper, values)) for hyper in hypers
            )
        self._processes = [Process(self._pool_of(hyper), hyper, rows) for hyper in self.hypers]
        tried = {candidates.rows[p]: t is None for p, t in times.items() if p in candidates.rows}
        self.failing = Failing(candidates.plain, list(tried), list(tried.values()), failing)

    def add(self, row: int, seconds: float | None) -> None:
        """Add a measurement, or a failure."""
        self.failing.add(row, failed=seconds is None)
        if seconds is None:
            return
        for process in self._processes:
            process.add(row)
        self._values.append(math.log(seconds))

    def best(self, n: int, seconds: float, proposed: Iterable[Point]) -> list[Point]:
        """Return the `n` points with the largest expected improvement times probability of success.

        The model takes its own prediction as the time of each chosen point.

        Args:
            n: The number of points.
            seconds: The time to beat.
            proposed: Points to exclude.
        """
        rows = self.candidates.rows
        taken = np.zeros(len(rows), dtype=bool)
        taken[[rows[point] for point in proposed if point in rows]] = True
        values, processes = list(self._values), list(map(copy.copy, self._processes))
        chance = self.candidates.chance * self.failing.chance()
        chosen: list[int] = []
        while len(chosen) < n and not taken.all():
            mean, promise = self._promise(processes, np.array(values), seconds)
            row = int(np.argmax(np.where(taken, -1.0, promise * chance)))
            taken[row] = True
            chosen.append(row)
            if len(chosen) < n:
                for process in processes:
                    process.add(row)
                values.append(float(mean[row]))
        return [self.candidates.points[row] for row in chosen]

    def _promise(self, processes: Sequence[Process], values: Floats, seconds: float) -> tuple[Floats, Floats]:
        """Return the predicted log times and the expected improvements; without a time to beat, shorter times."""
        if not len(values) or math.isinf(seconds):
            mean = self.candidates.pool.mean
            return mean, np.exp(mean.min() - mean)
        best = math.log(seconds)
        waited = len(values) - 1 - int(np.argmin(values))
        doubt = min(1.0 + waited / _RESTLESS, _MOST_RESTLESS)
        mean, improvement = np.zeros(self.candidates.pool.size), np.zeros(self.candidates.pool.size)
        for process, weight in zip(processes, self.weights(waited), strict=True):
            one, deviation = process.predict(values, self._scale(process.hyper, values))
            mean += weight * one
            improvement += weight * expected_improvement(best, one, deviation * doubt)
        return mean, improvement + 1e-9 * np.exp(mean.min() - mean)  # a tie of zeros goes to the fastest

    def weights(self, waited: int) -> list[float]:
        """Return the weight of each process after `waited` measurements without a better time.

        Every such measurement is evidence against the records: they are exhausted or misleading. At first only the
        processes with records decide; their weight then shifts to those without.
        """
        informed = [hyper.informed for hyper in self.hypers]
        if all(informed) or not any(informed):
            return [1 / len(informed)] * len(informed)
        # Without this decay, a record would hold the search at another device's optimum.
        trust = _TRUST / (_TRUST + waited)
        return [trust / sum(informed) if i else (1 - trust) / (len(informed) - sum(informed)) for i in informed]

    def _pool_of(self, hyper: Hyper) -> Pool:
        return self.candidates.pool if hyper.informed else self.candidates.plain

    def _scale(self, hyper: Hyper, values: Floats) -> Scale:
        if hyper.informed:
            return Scale(self.candidates.pool.spread**2, _RECORD_WEIGHT)
        return Scale(float(values.var()) + 1e-12, 1.0)


class Scatter:
    """A choice of points far from each other.

    Args:
        space: The search space.
        rng: The random numbers for the sample to choose from.
        options: Parameters of the search.
        near: Known valid points.
    """

    def __init__(
        self, space: ConfigSpace[Any], rng: np.random.Generator, options: SearchOptions, near: Iterable[Point] = ()
    ) -> None:
        self._space, self._options = space, options
        self._points = space.sample_points(rng, _SCATTERED, near)
        self._columns = _pool(space, self._points, (), options).columns

    def farthest(self, proposed: Iterable[Point]) -> Point | None:
        """Return the point farthest from the proposed ones; `None` if all were proposed."""
        before = list(proposed)
        if not before:
            return self._points[0]
        distances = np.full(len(self._points), math.inf)
        for other in _pool(self._space, before, (), self._options).columns:
            distances = np.minimum(distances, ((self._columns - other) ** 2).sum(axis=1))
        seen = set(before)
        distances[[point in seen for point in self._points]] = -1.0
        row = int(np.argmax(distances))
        return self._points[row] if distances[row] >= 0.0 else None


def _pool(space: ConfigSpace[Any], points: Sequence[Point], priors: Sequence[Prior], options: SearchOptions) -> Pool:
    axes = space.encode(points, aligned_from=options.aligned_from)
    records = np.array([prior.fill(points) for prior in priors]).reshape(len(priors), len(points))
    return Pool(axes, records)


def _held(rows: list[int], values: list[float]) -> list[int]:
    """Return the rows to keep in a model: all, or the fastest and the latest."""
    if len(rows) <= _HELD:
        return rows
    fastest = set(np.argsort(values, kind="stable")[: _HELD // 2].tolist())
    return [row for i, row in enumerate(rows) if i in fastest or i >= len(rows) - _HELD // 2]
