# SPDX-License-Identifier: Apache-2.0
"""What a search learns from failures: which configurations are likely to fail too."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ejkernel.ops.autotuner.search.gaussian_process import Hyper, Pool, Process, Scale, normal_cdf
from ejkernel.ops.config.spaces.axes import Floats

# Replayed on recorded spaces (`benchmarks/search.py --failing`) of which the most tempting pair of values was made to
# fail, 8 % of the configurations: 4 % of the first hundred measurements fail, and the score is 0.69, where by the share
# of failures nearby it was 35 % and 0.52 (nine such spaces, four seeds each). On the three spaces that have failures of
# their own, 3 to 8 %, 78 % of searches find the best within 5 % after 100 measurements, where 73 % did; but the score,
# which counts the way there, is 0.59 for 0.63 (twenty seeds each). In the former nine the failures are made up, the
# times are not. Spaces without failures are searched as before, and no option of the search was chosen anew.
_ADDITIVE = 0.5  # share of a sum over axes: most failures are one value's, or that of two together
_NOISE = 0.01  # of an outcome; the same configuration fails again
_HELD = 256  # outcomes
_LEAST_DEVIATION = 0.1
_LEAST_CHANCE = 1e-6  # nothing is impossible: what remains is asked for in the end


class Failing:
    """A Gaussian process over the outcomes, 1 for a failure and 0 for a success.

    It finds the axes and values that failures depend on by the same fit that finds those that times depend on. A
    configuration is as likely to work as the process is to be below one half: the evidence of a few failures in one
    place is enough to leave it, which that of their share there would not be where the model promises much. It costs
    nothing where nothing fails.

    Args:
        pool: The configurations.
        rows: Those that were tried.
        failed: Whether they failed.
        start: Where the fit starts; that of the last time, if there was one.
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
        """Take note of an outcome."""
        if self._process is not None:
            self._process.add(row)
            self._outcomes.append(float(failed))

    def chance(self) -> Floats:
        """Return for each configuration the chance that it works, as far as failures tell."""
        if self._process is None:
            return np.ones(self._pool.size)
        values = np.array(self._outcomes)
        mean, deviation = self._process.predict(values, self._scale(values))
        return np.maximum(normal_cdf((0.5 - mean) / np.maximum(deviation, _LEAST_DEVIATION)), _LEAST_CHANCE)

    def _scale(self, values: Floats) -> Scale:
        return Scale(float(values.var()) + 1e-3, 1.0)


def kept_outcomes(failed: Sequence[bool], most: int) -> list[int]:
    """Return the positions of the outcomes that are held: all, or those of the rarer kind and the latest others."""
    if len(failed) <= most:
        return list(range(len(failed)))
    kinds = ([i for i, outcome in enumerate(failed) if outcome is kind] for kind in (True, False))
    few, many = sorted(kinds, key=len)
    few = few[-(most // 2) :]
    return sorted([*few, *many[len(few) - most :]])
