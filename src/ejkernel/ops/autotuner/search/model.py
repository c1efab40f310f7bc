# SPDX-License-Identifier: Apache-2.0
"""What a model-based search knows: its candidates, the records of other devices, the measurements and the failures."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from ejkernel.ops.autotuner.search.feasibility import Failing
from ejkernel.ops.autotuner.search.gaussian_process import Hyper, Pool, Process, Scale, expected_improvement
from ejkernel.ops.config.spaces.axes import ALIGNED_FROM, Floats
from ejkernel.ops.config.spaces.space import ConfigSpace, Point
from ejkernel.ops.errors import ConfigError

LEAST = 3  # measurements below which a model without records says nothing, and a record nothing to a model

_SCATTERED = 512  # configurations among which the first ones are spread out
_HELD = 256  # measurements that a model holds
_RECORDED = 256  # measurements of a record that fill its gaps
_RESTLESS = 50.0  # measurements without a better time after which a model takes twice its own uncertainty
_MOST_RESTLESS = 3.0
_TRUST = 25.0  # measurements without a better time after which records count for half
_PENDING = 16  # configurations under measurement that a model reckons with
_REACH = 0.3  # how far a failure is felt, in unit-wide axes
_DOUBT = 0.1  # weight of the share of failures so far, against that of a failure nearby
_RECORD_WEIGHT = 3.0  # measurements that the records' spread is worth


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
        """Return the fastest `count` configurations."""
        measured = [(seconds, i) for i, (_, seconds) in enumerate(self.times) if is_time(seconds)]
        return [self.times[i][0] for _, i in sorted(measured)[:count]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """Parameters of `ModelSearch`, chosen on recorded spaces.

    Attributes:
        scattered: Configurations, seeds included, that are spread over the space before the model is asked.
        recorded: How many of the fastest configurations of each record are tried first.
        additive: Share of the model that is a sum of functions of one axis.
        aligned_from: Values that a numeric axis needs for the model to see how often two divides them.
    """

    scattered: int = 4
    recorded: int = 1
    additive: tuple[float, ...] = (0.1, 0.4)
    aligned_from: int = ALIGNED_FROM


def is_time(seconds: float | None) -> TypeGuard[float]:
    """Return whether this is a time, not a failure."""
    return seconds is not None and math.isfinite(seconds) and seconds > 0.0


class Prior:
    """A record, as times for any configuration of a space.

    Args:
        space: The configurations; others in the record count for nothing.
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

    def __len__(self) -> int:
        return len(self.times)

    def fill(self, points: Sequence[Point]) -> Floats:
        """Return the log times of all these points: as recorded, the worst for a failure, and a guess for the rest."""
        worst = max(self.times.values())
        values = np.array([self.times.get(p, worst if p in self.failed else math.nan) for p in points])
        gaps = np.flatnonzero(np.isnan(values)).tolist()
        if gaps:
            values[gaps] = self._guess([points[i] for i in gaps])
        return values

    def _guess(self, points: Sequence[Point]) -> Floats:
        """Interpolate: half of what is held is the fastest, for these matter, and half is any."""
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
        guess: Floats = mean[len(held) :]
        return guess


class Candidates:
    """Points that are ranked, and how likely each is to work.

    Args:
        space: The space.
        points: The points.
        priors: Records.
        options: Parameters of the search.
    """

    def __init__(
        self, space: ConfigSpace[Any], points: Sequence[Point], priors: Sequence[Prior], options: SearchOptions
    ) -> None:
        self.points = tuple(points)
        self.rows = {point: row for row, point in enumerate(self.points)}
        self.pool = _pool(space, self.points, priors, options)
        self.plain = self.pool.without_records()
        recorded = [[point in prior.failed for point in self.points] for prior in priors]
        self._failed_elsewhere = np.mean(recorded, axis=0) if recorded else np.zeros(len(self.points))
        self._near_failures = np.zeros(len(self.points))
        self._near_any = np.zeros(len(self.points))
        self._failures = self._known = 0

    def note(self, row: int, *, failed: bool) -> None:
        """Take note of a success or a failure."""
        distances = np.sqrt(((self.pool.columns - self.pool.columns[row]) ** 2).sum(axis=1))
        nearness = np.exp(-distances / _REACH)
        self._near_any += nearness
        self._known += 1
        if failed:
            self._near_failures += nearness
            self._failures += 1

    def chance(self) -> Floats:
        """Return for each point the chance that it works."""
        usual = (self._known - self._failures + 1) / (self._known + 1) * (1.0 - 0.9 * self._failed_elsewhere)
        chance: Floats = (self._near_any - self._near_failures + _DOUBT * usual) / (self._near_any + _DOUBT)
        return chance


class Model:
    """A Gaussian process over candidates, with the measurements so far.

    Args:
        candidates: What is ranked.
        hypers: Where the fits start.
        times: The measurements, and the failures.
        failing: Where the fit to the failures starts, if there were any before.
    """

    def __init__(
        self,
        candidates: Candidates,
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

    def best(self, n: int, seconds: float, proposed: Iterable[Point], pending: Sequence[Point]) -> list[Point]:
        """Return the `n` points that promise most.

        Args:
            n: How many points.
            seconds: The time to beat.
            proposed: Points that are not to be returned.
            pending: Those of them that are being measured; they are taken to be what the model expects.
        """
        rows = self.candidates.rows
        taken = np.zeros(len(rows), dtype=bool)
        taken[[rows[point] for point in proposed if point in rows]] = True
        values, count = list(self._values), len(self._values)
        chance = self.candidates.chance() * self.failing.chance()
        chosen: list[int] = []
        guessed = [rows[point] for point in pending[-_PENDING:] if point in rows]
        while len(chosen) < n and not taken.all():
            mean, promise = self._promise(np.array(values), seconds)
            if guessed:
                row = guessed.pop()
            else:
                row = int(np.argmax(np.where(taken, -1.0, promise * chance)))
                taken[row] = True
                chosen.append(row)
            if len(chosen) < n:
                for process in self._processes:
                    process.add(row)
                values.append(float(mean[row]))
        for process in self._processes:
            process.truncate(count)
        return [self.candidates.points[row] for row in chosen]

    def _promise(self, values: Floats, seconds: float) -> tuple[Floats, Floats]:
        """Return the expected log times, and how good it seems to measure each."""
        if not len(values):
            mean = self.candidates.pool.mean
            return mean, np.exp(mean.min() - mean)
        best = math.log(seconds)
        waited = len(values) - 1 - int(np.argmin(values))
        doubt = min(1.0 + waited / _RESTLESS, _MOST_RESTLESS)
        mean, improvement = np.zeros(self.candidates.pool.size), np.zeros(self.candidates.pool.size)
        for process, weight in zip(self._processes, self.weights(waited), strict=True):
            one, deviation = process.predict(values, self._scale(process.hyper, values))
            mean += weight * one
            improvement += weight * expected_improvement(best, one, deviation * doubt)
        return mean, improvement + 1e-9 * np.exp(mean.min() - mean)  # where nothing will improve, the fastest is next

    def weights(self, waited: int) -> list[float]:
        """Return how much each process counts, after so many measurements without a better time.

        Each of them is evidence against the records: what they can tell has been found, or they mislead. So at first
        the processes that know them decide alone, and later more and more those that know the measurements only.
        """
        informed = [hyper.informed for hyper in self.hypers]
        if all(informed) or not any(informed):
            return [1 / len(informed)] * len(informed)
        # A record that is believed to the end keeps the search where another device's optimum is.
        trust = _TRUST / (_TRUST + waited)
        return [trust / sum(informed) if i else (1 - trust) / (len(informed) - sum(informed)) for i in informed]

    def _pool_of(self, hyper: Hyper) -> Pool:
        return self.candidates.pool if hyper.informed else self.candidates.plain

    def _scale(self, hyper: Hyper, values: Floats) -> Scale:
        if hyper.informed:
            return Scale(self.candidates.pool.spread**2, _RECORD_WEIGHT)
        return Scale(float(values.var()) + 1e-12, 1.0)


class Scatter:
    """Points that are far from each other.

    Args:
        space: The space.
        rng: Draws the points that are chosen from.
        options: Parameters of the search.
        near: Points that are known.
    """

    def __init__(
        self, space: ConfigSpace[Any], rng: np.random.Generator, options: SearchOptions, near: Iterable[Point] = ()
    ) -> None:
        self._space, self._options = space, options
        self._points = space.sample_points(rng, _SCATTERED, near)
        self._columns = _columns(
            space.encode_points(self._points, aligned_from=options.aligned_from), len(self._points)
        )

    def farthest(self, proposed: Iterable[Point]) -> Point | None:
        """Return the point that is farthest from those that were proposed; `None` if there is no other."""
        before = list(proposed)
        if not before:
            return self._points[0]
        encoded = self._space.encode_points(before, aligned_from=self._options.aligned_from)
        others = _columns(encoded, len(before))
        distances = np.full(len(self._points), math.inf)
        for other in others:
            distances = np.minimum(distances, ((self._columns - other) ** 2).sum(axis=1))
        seen = set(before)
        distances[[point in seen for point in self._points]] = -1.0
        row = int(np.argmax(distances))
        return self._points[row] if distances[row] >= 0.0 else None


def _pool(space: ConfigSpace[Any], points: Sequence[Point], priors: Sequence[Prior], options: SearchOptions) -> Pool:
    axes = space.encode_points(points, aligned_from=options.aligned_from)
    records = np.array([prior.fill(points) for prior in priors]).reshape(len(priors), len(points))
    return Pool(axes, records)


def _columns(axes: Sequence[Floats], count: int) -> Floats:
    return np.concatenate([*axes, np.zeros((count, 0))], axis=1)


def _held(rows: list[int], values: list[float]) -> list[int]:
    """Return the rows that a model holds: all, or the fastest and the latest."""
    if len(rows) <= _HELD:
        return rows
    fastest = set(np.argsort(values, kind="stable")[: _HELD // 2].tolist())
    return [row for i, row in enumerate(rows) if i in fastest or i >= len(rows) - _HELD // 2]
