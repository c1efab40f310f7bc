# SPDX-License-Identifier: Apache-2.0
"""A Gaussian process over the logarithm of a kernel's time, on a fixed pool of configurations.

The covariance is a Matérn-5/2 function of all axes together, plus a smaller sum of functions of single axes, which
learns main effects from few measurements. Records of other devices or shapes enter as the prior mean, as a linear term
(which learns the weight of each record) and as a Matérn function of their times. Coordinate search maximises the
marginal likelihood over all scales.

Source: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, algorithm 2.1 and equation 5.8.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ejkernel.ops.config.spaces.axes import Floats

Ints = npt.NDArray[np.intp]

_JITTER = 1e-8
_LEAST_SCALE, _MOST_SCALE = math.log(0.08), math.log(8.0)
_SCALE_PRIOR, _SCALE_SPREAD = math.log(0.7), 0.8  # of a unit-wide axis; log-normal
_PART_PRIOR, _PART_SPREAD = np.array([0.3, 0.3, 0.5]), 1.5  # of `Hyper.parts`; log-normal
_MEAN_PRECISION = 0.1  # prior precision of the constant mean, relative to one measurement
_FITTED = 96  # points used to fit hyperparameters
_ROUNDS = 2  # rounds of the coordinate search; the next fit continues from its end


@dataclasses.dataclass(frozen=True)
class Hyper:
    """Hyperparameters.

    Attributes:
        scales: The log length scale of each feature column.
        noise: Variance of a measurement, relative to the variance of the process.
        parts: Weights of the linear function of the records, of their Matérn function, and of the function of the axes.
        record_scale: The log length scale of the Matérn function of the records.
        additive: Share of the function of the axes that is a sum over single axes; not fitted.
    """

    scales: tuple[float, ...]
    noise: float = 1e-3
    parts: tuple[float, float, float] = (0.0, 0.0, 1.0)
    record_scale: float = 0.0
    additive: float = 0.0

    @classmethod
    def start(cls, columns: int, *, records: bool, additive: float) -> Hyper:
        """Return the initial hyperparameters of the first fit."""
        scales = (math.log(0.6),) * columns
        return cls(scales, parts=(0.3, 0.3, 0.5) if records else (0.0, 0.0, 1.0), additive=additive)

    @property
    def informed(self) -> bool:
        """Whether the process uses records."""
        return self.parts[0] > 0.0

    def nearby(self) -> Iterator[Hyper]:
        """Yield hyperparameters that differ by one step in one of them; a coordinate search tries each."""
        for i, scale in enumerate(self.scales):
            for step in (-0.5, 0.5):
                yield dataclasses.replace(self, scales=(*self.scales[:i], _clip(scale + step), *self.scales[i + 1 :]))
        for step in (-0.4, 0.4):
            yield dataclasses.replace(self, scales=tuple(_clip(scale + step) for scale in self.scales))
        for factor in (0.3, 3.0):
            yield dataclasses.replace(self, noise=min(max(self.noise * factor, 1e-5), 0.1))
        if self.parts[0] == 0.0:
            return
        for i in range(3):
            for factor in (0.4, 2.5):
                parts = list(self.parts)
                parts[i] = min(max(parts[i] * factor, 1e-3), 10.0)
                yield dataclasses.replace(self, parts=(parts[0], parts[1], parts[2]))
        for step in (-0.5, 0.5):
            yield dataclasses.replace(self, record_scale=min(max(self.record_scale + step, -1.5), 2.0))

    def penalty(self) -> float:
        """Return the negative logarithm of the prior."""
        penalty = float(((np.array(self.scales) - _SCALE_PRIOR) ** 2).sum()) / (2 * _SCALE_SPREAD**2)
        if self.parts[0] > 0.0:
            penalty += float((np.log(np.array(self.parts) / _PART_PRIOR) ** 2).sum()) / (2 * _PART_SPREAD**2)
            penalty += self.record_scale**2 / 2
        return penalty


class Pool:
    """The features of a fixed set of configurations.

    Args:
        axes: For each axis, its feature columns with one row for each configuration.
        records: Centred log times, one row for each record, without gaps.
    """

    def __init__(self, axes: Sequence[Floats], records: Floats) -> None:
        self.size = records.shape[1]
        self.columns = np.concatenate([*axes, np.zeros((self.size, 0))], axis=1)
        self.mean: Floats = records.mean(axis=0) if len(records) else np.zeros(self.size)
        self.spread = math.sqrt(float((records**2).mean())) if len(records) else 0.0
        self.records = np.ascontiguousarray(records.T) / max(self.spread, 1e-9)
        self._distinct = [np.unique(axis, axis=0, return_inverse=True) for axis in axes]
        widths = [axis.shape[1] for axis in axes]
        ends = np.cumsum(widths).tolist()
        self._slices = [slice(end - width, end) for width, end in zip(widths, ends, strict=True)]

    def without_records(self) -> Pool:
        """Return the same pool without records."""
        # a shallow copy: the columns and their distinct values are large
        plain = copy.copy(self)
        plain.mean, plain.spread = np.zeros(self.size), 0.0
        return plain

    def covariance(self, hyper: Hyper, rows: Ints) -> Floats:
        """Return the covariance of the configurations `rows` with all."""
        inverse_scales = np.exp(-np.array(hyper.scales))
        scaled = self.columns * inverse_scales
        own = matern(_squares(scaled[rows], scaled))
        if hyper.additive and self._slices:
            single = np.zeros_like(own)
            for where, (values, inverse) in zip(self._slices, self._distinct, strict=True):
                values = values * inverse_scales[where]
                single += matern(_squares(values[inverse[rows]], values))[:, inverse]
            own *= 1.0 - hyper.additive
            own += (hyper.additive / len(self._slices)) * single
        return self._with_records(hyper, own, rows, np.arange(self.size))

    def variance(self, hyper: Hyper) -> Floats:
        """Return the prior variance of all configurations."""
        total = np.full(self.size, hyper.parts[1] + hyper.parts[2])
        if hyper.parts[0] > 0.0:
            total += hyper.parts[0] * (self.records**2).mean(axis=1)
        return total

    def _with_records(self, hyper: Hyper, own: Floats, rows: Ints, others: Ints) -> Floats:
        linear, smooth, axes = hyper.parts
        if linear == 0.0:
            return own
        mine, theirs = self.records[rows], self.records[others]
        distances = _squares(mine, theirs) * math.exp(-2 * hyper.record_scale)
        total: Floats = linear / mine.shape[1] * (mine @ theirs.T) + smooth * matern(distances) + axes * own
        return total

    def fit(self, hyper: Hyper, rows: Ints, values: Floats, scale: Scale) -> Hyper:
        """Return improved hyperparameters, given `values` of the configurations `rows`."""
        if len(rows) > _FITTED:
            # the fastest, where accuracy matters, and the latest, which the previous fit did not see
            keep = np.union1d(np.argsort(values)[: _FITTED // 2], np.arange(len(rows) - _FITTED // 2, len(rows)))
            rows, values = rows[keep], values[keep]
        columns = self.columns[rows].T
        squares = (columns[:, :, None] - columns[:, None, :]) ** 2
        singles: dict[tuple[int, tuple[float, ...]], Floats] = {}
        rest = values - self.mean[rows]
        rest = rest - rest.mean()

        def single(position: int, where: slice, scales: tuple[float, ...]) -> Floats:
            key = (position, scales)
            if key not in singles:
                singles[key] = matern(np.tensordot(np.exp(-2 * np.array(scales)), squares[where], 1))
            return singles[key]

        def loss(hyper: Hyper) -> float:
            own = matern(np.tensordot(np.exp(-2 * np.array(hyper.scales)), squares, 1))
            if hyper.additive and self._slices:
                parts = [single(i, where, hyper.scales[where]) for i, where in enumerate(self._slices)]
                own = (1 - hyper.additive) * own + hyper.additive / len(parts) * np.sum(parts, axis=0)
            covariance = self._with_records(hyper, own, rows, rows)
            return _loss(covariance, hyper.noise, rest, scale) + hyper.penalty()

        return _descend(hyper, loss)


@dataclasses.dataclass(frozen=True, slots=True)
class Scale:
    """The prior variance of a process, and its weight in measurements."""

    variance: float
    weight: float

    def posterior(self, squares: float, count: int) -> float:
        """Return the posterior variance after `count` measurements with this whitened sum of squares."""
        return (squares + self.weight * self.variance) / (count + self.weight)


class Process:
    """The posterior over a pool, updated one measurement at a time; measurements added to a copy stay there.

    Args:
        pool: The configurations.
        hyper: The hyperparameters.
        rows: The measured configurations.
    """

    def __init__(self, pool: Pool, hyper: Hyper, rows: Sequence[int]) -> None:
        self.pool, self.hyper, self.rows = pool, hyper, list(rows)
        count = len(rows)
        known = pool.covariance(hyper, np.array(rows, dtype=np.intp))
        covariance = known[:, self.rows] + (hyper.noise + _JITTER) * np.eye(count)
        # A measurement appends a row to this inverse; factorising again would cost one power more.
        self._inverse: Floats = np.linalg.inv(np.linalg.cholesky(covariance))  # of the Cholesky factor
        self._projected = np.zeros((max(16, 2 * count), pool.size))  # the inverse times the covariance with the pool
        self._projected[:count] = self._inverse @ known
        self._prior = pool.variance(hyper)
        self._variance: Floats = self._prior - (self._projected[:count] ** 2).sum(axis=0)

    def add(self, row: int) -> None:
        """Add a measured configuration, in time proportional to measurements times configurations."""
        count = len(self.rows)
        covariance = self.pool.covariance(self.hyper, np.array([row], dtype=np.intp))[0]
        factor = self._inverse @ covariance[self.rows]
        last = math.sqrt(max(float(covariance[row] + self.hyper.noise + _JITTER - factor @ factor), _JITTER))
        inverse = np.zeros((count + 1, count + 1))
        inverse[:count, :count] = self._inverse
        inverse[count, :count] = -(factor @ self._inverse) / last
        inverse[count, count] = 1.0 / last
        if count == len(self._projected):
            # double the capacity, so that this is rare
            self._projected = np.concatenate([self._projected, np.zeros_like(self._projected)])
        projected = (covariance - factor @ self._projected[:count]) / last
        self._projected[count] = projected
        self._inverse, self._variance = inverse, self._variance - projected**2
        self.rows = [*self.rows, row]

    def predict(self, values: Floats, scale: Scale) -> tuple[Floats, Floats]:
        """Return the mean and standard deviation of all configurations, given the values of the measured ones."""
        count = len(self.rows)
        rest = values - self.pool.mean[self.rows]
        middle = float(rest.mean())
        ones, rest = (self._inverse @ np.stack([np.ones(count), rest - middle], axis=1)).T
        constant, squares = _constant(ones, rest)
        mean = self.pool.mean + middle + constant + (rest - constant * ones) @ self._projected[:count]
        variance = np.maximum(self._variance, _JITTER) * scale.posterior(squares, count)
        return mean, np.sqrt(variance)


def matern(squares: Floats) -> Floats:
    """Return the Matérn-5/2 covariance for squared distances."""
    distances: Floats = np.sqrt(5.0 * squares)
    covariance: Floats = distances / 3.0  # in place from here on: a search spends most of its time on these arrays
    covariance += 1.0
    covariance *= distances
    covariance += 1.0
    np.negative(distances, out=distances)
    np.exp(distances, out=distances)
    covariance *= distances
    return covariance


def expected_improvement(best: float, mean: Floats, deviation: Floats) -> Floats:
    """Return the expected improvement of each configuration on `best`."""
    z = (best - mean) / deviation
    improvement: Floats = deviation * (z * normal_cdf(z) + np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi))
    return np.maximum(improvement, 0.0)


def normal_cdf(z: Floats) -> Floats:
    """Return the normal distribution function, to 1e-7; after Abramowitz and Stegun 1964, 7.1.26."""
    x = np.abs(z) * math.sqrt(0.5)
    t = 1.0 / (1.0 + 0.3275911 * x)
    tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    error: Floats = 1.0 - tail * np.exp(-x * x)
    return 0.5 * (1.0 + np.sign(z) * error)


def _squares(left: Floats, right: Floats) -> Floats:
    """Return the squared distances between the rows of `left` and `right`."""
    squares: Floats = left @ right.T
    squares *= -2.0
    squares += (left**2).sum(axis=1)[:, None]
    squares += (right**2).sum(axis=1)[None, :]
    return np.maximum(squares, 0.0, out=squares)


def _constant(ones: Floats, rest: Floats) -> tuple[float, float]:
    """Return the constant mean and the remaining sum of squares, given whitened ones and values."""
    constant = float(ones @ rest) / (float(ones @ ones) + _MEAN_PRECISION)
    left = rest - constant * ones
    return constant, float(left @ left) + _MEAN_PRECISION * constant**2


def _loss(covariance: Floats, noise: float, rest: Floats, scale: Scale) -> float:
    count = len(rest)
    try:
        factor = np.linalg.cholesky(covariance + (noise + _JITTER) * np.eye(count))
    except np.linalg.LinAlgError:
        return math.inf
    ones, rest = np.linalg.solve(factor, np.stack([np.ones(count), rest], axis=1)).T
    _, squares = _constant(ones, rest)
    variance = scale.posterior(squares, count)
    return 0.5 * (count + scale.weight) * math.log(max(variance, 1e-300)) + float(np.log(np.diag(factor)).sum())


def _descend(hyper: Hyper, loss: Callable[[Hyper], float]) -> Hyper:
    least = loss(hyper)
    for _ in range(_ROUNDS):
        before = least
        for i in itertools.count():
            step = next(itertools.islice(hyper.nearby(), i, None), None)
            if step is None:
                break
            value = loss(step)
            # take an improving step at once and continue from there
            if value < least - 1e-9:
                hyper, least = step, value
        if least == before:
            break
    return hyper


def _clip(scale: float) -> float:
    return min(max(scale, _LEAST_SCALE), _MOST_SCALE)
