# SPDX-License-Identifier: Apache-2.0
"""Gradients against differences of results along a few directions, for kernels that are their own only truth.

That is where nothing independent has a derivative: no reference, and JAX cannot differentiate `run`, or finds the
kernel's own rule inside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from ejkernel.ops.core.transformations.nodes import is_inexact
from ejkernel.ops.execution.checks.programs import Arrays, Results, compiled
from ejkernel.ops.execution.checks.report import CheckRow, CheckStatus
from ejkernel.ops.utils.random_arrays import random_array

_CHECK: Final = "gradient, by differences"
_STEP: Final = {"float32": 1e-2, "float64": 1e-4}  # of an argument's size: rounding and curvature both cost little
_DIRECTIONS: Final = 3  # beside the gradient's own
_ALLOWED: Final = 0.1  # a wrong sign or factor is off by one; a kink of the function close by, by little


def numeric_row(
    gradient: Callable[[Arrays, Arrays], Results],
    config: object,
    arrays: Arrays,
    cotangents: Arrays,
    called: Sequence[str | None],
) -> CheckRow:
    """Compare gradients, along a few directions of each argument, with the difference of results on both sides.

    Args:
        gradient: Results and gradients, of arrays and cotangents.
        config: The configuration that it runs with.
        arrays, cotangents: What it takes.
        called: The names of the arrays; `None` for those that have no gradient.
    """
    dtypes = {str(array.dtype) for array, name in zip(arrays, called, strict=True) if name is not None}
    # Of results too: a difference of two 16-bit numbers has few digits left.
    dtypes |= {str(cotangent.dtype) for cotangent in cotangents}
    if not dtypes <= set(_STEP):
        reason = f"differences say little in {', '.join(sorted(dtypes - set(_STEP)))}"
        return CheckRow(check=_CHECK, config=config, status=CheckStatus.SKIPPED, reason=reason)
    program = compiled(gradient, arrays, cotangents)
    rng, worst, reason = np.random.default_rng(0), 0.0, ""
    gradients = iter(program(arrays, cotangents).gradients or ())
    for index, array in enumerate(arrays):
        if called[index] is not None:
            found = next(gradients)
            ways = [_unit(found), *(random_array(array, rng) for _ in range(_DIRECTIONS))]
            with np.errstate(all="ignore"):  # what is not finite is said below
                error = max(_off(program, index, (arrays, cotangents), found, way) for way in ways)
            if error > max(worst, _ALLOWED):
                reason = f"the gradient of {called[index]} is not what differences of results say: {error:.2g} off"
            worst = max(worst, error)
    if not math.isfinite(worst):
        reason = "differences say nothing where results are not finite"
        return CheckRow(check=_CHECK, config=config, status=CheckStatus.SKIPPED, reason=reason)
    status = CheckStatus.FAILED if worst > _ALLOWED else CheckStatus.OK
    return CheckRow(check=_CHECK, config=config, status=status, reason=reason, error=worst, allowed=_ALLOWED)


def _off(program: Any, index: int, inputs: tuple[Arrays, Arrays], gradient: object, direction: Any) -> float:
    """Return how far the derivative along `direction` is off, relative to the size that its terms let expect."""
    arrays, cotangents = inputs
    size = float(jnp.sqrt(jnp.mean(jnp.square(arrays[index])))) or 1.0 if arrays[index].size else 1.0
    step = size * _STEP[str(arrays[index].dtype)]

    def moved(sign: int) -> list[Any]:
        there = [array + sign * step * direction if i == index else array for i, array in enumerate(arrays)]
        return [np.asarray(out, np.float64) for out in program(there, cotangents).outs if is_inexact(out)]

    slopes = [(ahead - behind) / (2 * step) for ahead, behind in zip(moved(1), moved(-1), strict=True)]
    terms = [np.asarray(ct, np.float64) * slope for ct, slope in zip(cotangents, slopes, strict=True)]
    own = np.asarray(gradient, np.float64) * np.asarray(direction, np.float64)
    measured, claimed = sum(part.sum() for part in terms), own.sum()
    # Sums of random signs cancel, so that what is off is held against the size of the terms, too.
    expected = np.sqrt(sum((part**2).sum() for part in terms)) + np.sqrt((own**2).sum())
    scale = max(expected, abs(measured), abs(claimed))
    if not np.isfinite(scale):
        return math.inf
    return float(abs(measured - claimed) / scale) if scale else 0.0


def _unit(gradient: Any) -> Any:
    """Return the gradient, along which nothing cancels, in the size of a random direction."""
    size = jnp.sqrt(jnp.mean(jnp.square(gradient)))
    return gradient / jnp.where(size > 0, size, 1)
