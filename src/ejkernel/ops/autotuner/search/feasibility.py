# SPDX-License-Identifier: Apache-2.0
"""A model of failures: which other configurations are likely to fail."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ejkernel.ops.autotuner.search.gaussian_process import Hyper, Pool, Process, Scale, normal_cdf
from ejkernel.ops.config.spaces.axes import Floats

# Evidence from replaying recorded spaces (`benchmarks/search.py --failing`). In nine spaces the most promising pair of
# values was made to fail (8 % of the configurations; four seeds each): with this model 4 % of the first hundred
# measurements fail and the score is 0.69; with the share of failures nearby it was 35 % and 0.52. In three spaces with
# real failures (3 to 8 %; twenty seeds each), 78 % of the searches come within 5 % of the best after 100 measurements,
# before 73 %; the score, which also counts the way there, falls from 0.63 to 0.59.
_ADDITIVE = 0.5  # share of a sum over axes: most failures depend on one value or on a pair
_NOISE = 0.01  # variance of an outcome: a configuration that failed fails again
_HELD = 256  # outcomes in the model
_LEAST_DEVIATION = 0.1
_LEAST_CHANCE = 1e-6  # never zero, so that every configuration is proposed in the end


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
        start = start or Hyper(
            Hyper.start(pool.columns.shape[1], records=False, additive=_ADDITIVE).scales, _NOISE, additive=_ADDITIVE
        )
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
