# SPDX-License-Identifier: Apache-2.0
"""Compares the results of a call with those that it should have."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from ejkernel import compat
from ejkernel.ops.autotuner.measure.correctness import Deviation, deviations
from ejkernel.ops.core.transformations.nodes import is_inexact
from ejkernel.ops.errors import CandidateError

REFERENCE: Final = "the reference"
HEURISTIC: Final = "the heuristic's"
BY_JAX: Final = "JAX's gradient of `run`"
_UNITS: Final = 64  # in the last place, of the largest gradient


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """How results are compared.

    Attributes:
        platform: Platform of the results.
        precision: Default matmul precision.
        tolerance: The largest difference, relative to the largest value and at least 1; derivatives may differ by twice
            that. `None`: the tolerances of tuning.
    """

    platform: str
    precision: str | None
    tolerance: float | None = None

    def __call__(
        self, got: Sequence[Any], want: Sequence[Any], whose: str = REFERENCE, names: Sequence[str] = ()
    ) -> list[Deviation]:
        """Return the deviation of each array; of derivatives, which have names, small ones may cancel.

        NaN is correct only where a reference has NaN: two configurations that both compute NaN are both wrong.
        """
        if self.tolerance is not None and len(got) == len(want):
            allowed = self.tolerance * (2 if names else 1)
            called = names or [f"result {index}" for index in range(len(want))]
            return [_of_largest(*each, allowed, whose) for each in zip(called, got, want, strict=True)]
        options: dict[str, Any] = {"platform": self.platform, "precision": self.precision}
        try:
            found = list(deviations(got, want, **options, names=names, of=whose))
        except CandidateError as error:
            return [Deviation(np.inf, 0.0, str(error))]
        largest = max(map(_largest, want), default=0.0)
        for index, (mine, true, deviation) in enumerate(zip(got, want, found, strict=True)):
            if names and deviation.reason and _is_cancelled(mine, true, largest):
                found[index] = Deviation(0.0, deviation.allowed)
            elif not deviation.reason and whose in (HEURISTIC, BY_JAX) and _has_nan(mine):
                name = names[index] if names else f"result {index}"
                found[index] = Deviation(np.inf, deviation.allowed, f"{name} has NaN, and no reference confirms it")
        return found


def wide(array: Any) -> Any:
    """Return the array with 64-bit numbers, as a NumPy array."""
    is_complex = jnp.issubdtype(array.dtype, jnp.complexfloating)
    return np.asarray(array).astype(np.complex128 if is_complex else np.float64)


def _of_largest(name: str, got: Any, want: Any, allowed: float, whose: str) -> Deviation:
    if got.shape != want.shape:
        return Deviation(np.inf, allowed, f"{name} has shape {got.shape}, {whose} {want.shape}")
    mine, true = wide(got), wide(want)
    with np.errstate(invalid="ignore"):
        apart = np.where((mine == true) | (np.isnan(mine) & np.isnan(true)), 0.0, np.abs(mine - true))
    error = float(np.nan_to_num(apart, nan=np.inf).max(initial=0.0)) / max(1.0, float(np.abs(true).max(initial=0.0)))
    reason = f"{name} differs from {whose} by {error:.2g} of the largest value (allowed: {allowed:g})"
    return Deviation(error, allowed, "" if error <= allowed else reason)


def _is_cancelled(got: Any, want: Any, largest: float) -> bool:
    """Return whether all terms of a derivative cancel, as for a shift of a softmax, so that rounding errors remain.

    Such a derivative may have any values that are small compared with the largest of the others.
    """
    if got.shape != want.shape or not got.size or not jnp.issubdtype(got.dtype, jnp.floating):
        return False
    single, own = (float(compat.finfo(dtype).eps) * _UNITS * largest for dtype in (np.float32, got.dtype))
    return _largest(want) <= single and _largest(got) <= max(own, single)


def _largest(array: Any) -> float:
    if not array.size or not jnp.issubdtype(array.dtype, jnp.floating):
        return 0.0
    return float(np.abs(wide(array)).max())


def _has_nan(array: Any) -> bool:
    return is_inexact(array) and bool(np.isnan(np.asarray(array)).any())
