# SPDX-License-Identifier: Apache-2.0
"""Compares gradients with finite differences along a few directions, for kernels without an independent derivative.

These are kernels without a reference whose `run` JAX cannot differentiate, or only with the kernel's own rule in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from ejkernel.ops.autotuner.measure.correctness import Deviation
from ejkernel.ops.core.transformations.nodes import is_inexact
from ejkernel.ops.utils.random_arrays import random_array
from ejkernel.testing.programs import Arrays, Results, compiled
from ejkernel.testing.report import CheckRow, compared, row

_CHECK: Final = "gradient, by differences"
_STEP: Final = {"float32": 1e-2, "float64": 1e-4}  # relative to an argument: balances rounding and curvature
_DIRECTIONS: Final = 3  # in addition to the gradient's own
_ALLOWED: Final = 0.1  # a wrong sign or factor gives an error near 1; a kink of the function nearby gives less


def numeric_row(
    gradient: Callable[[Arrays, Arrays], Results],
    config: object,
    arrays: Arrays,
    cotangents: Arrays,
    called: Sequence[str | None],
) -> CheckRow:
    """Return a row that compares gradients with central differences, along a few directions of each argument.

    Args:
        gradient: Computes results and gradients from arrays and cotangents.
        config: Its configuration.
        arrays, cotangents: Its arguments.
        called: The names of the arrays; `None` for arrays without a gradient.
    """
    dtypes = {str(array.dtype) for array, name in zip(arrays, called, strict=True) if name is not None}
    # Include results: the difference of two 16-bit numbers has few correct digits.
    dtypes |= {str(cotangent.dtype) for cotangent in cotangents}
    if not dtypes <= set(_STEP):
        reason = f"finite differences are too inaccurate in {', '.join(sorted(dtypes - set(_STEP)))}"
        return row(_CHECK, config, reason, skipped=True)
    program = compiled(gradient, arrays, cotangents)
    rng, worst, reason = np.random.default_rng(0), 0.0, ""
    gradients = iter(program(arrays, cotangents).gradients or ())
    for index, array in enumerate(arrays):
        if called[index] is not None:
            found = next(gradients)
            ways = [_unit(found), *(random_array(array, rng) for _ in range(_DIRECTIONS))]
            with np.errstate(all="ignore"):  # values that are not finite are reported below
                error = max(_relative_error(program, index, (arrays, cotangents), found, way) for way in ways)
            if error > max(worst, _ALLOWED):
                reason = f"the gradient of {called[index]} differs from finite differences: {error:.2g} relative"
            worst = max(worst, error)
    if not math.isfinite(worst):
        return row(_CHECK, config, "the results are not finite", skipped=True)
    return compared(_CHECK, config, [Deviation(worst, _ALLOWED, reason)])


def _relative_error(program: Any, index: int, inputs: tuple[Arrays, Arrays], gradient: object, direction: Any) -> float:
    """Return the error of the derivative along `direction`, relative to the expected size of its terms."""
    arrays, cotangents = inputs
    size = float(jnp.sqrt(jnp.mean(jnp.square(arrays[index])))) or 1.0 if arrays[index].size else 1.0
    step = size * _STEP[str(arrays[index].dtype)]

    def moved(sign: int) -> list[Any]:
        there = [array + sign * step * direction if i == index else array for i, array in enumerate(arrays)]
        return [np.asarray(out, np.float64) for out in program(there, cotangents).outs if is_inexact(out)]

    slopes = [(ahead - behind) / (2 * step) for ahead, behind in zip(moved(1), moved(-1), strict=True)]
    terms = [np.asarray(ct, np.float64) * slope for ct, slope in zip(cotangents, slopes, strict=True)]
    own = np.asarray(gradient, np.float64) * np.asarray(direction, np.float64)
    measured, claimed = sum(term.sum() for term in terms), own.sum()
    # Sums with random signs cancel, so the error is also compared with the size of the terms.
    expected = np.sqrt(sum((term**2).sum() for term in terms)) + np.sqrt((own**2).sum())
    scale = max(expected, abs(measured), abs(claimed))
    if not np.isfinite(scale):
        return math.inf
    return float(abs(measured - claimed) / scale) if scale else 0.0


def _unit(gradient: Any) -> Any:
    """Return the gradient, along which terms do not cancel, scaled to the size of a random direction."""
    size = jnp.sqrt(jnp.mean(jnp.square(gradient)))
    return gradient / jnp.where(size > 0, size, 1)
