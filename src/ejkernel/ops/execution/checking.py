# SPDX-License-Identifier: Apache-2.0
"""Whether a candidate's results may be believed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import compat
from ejkernel.ops.errors import CandidateError


class Tolerance(NamedTuple):
    """How far results may be from the reference.

    Configurations sum in different orders and round in between, so every element differs by a few units in the last
    place, and the worst of millions by many more. A wrong scale moves all of them; a wrong index or mask moves few,
    but far.

    Attributes:
        overall: Root mean square of the difference, relative to that of the reference.
        worst: Difference of one element, relative to its value plus the root mean square of the reference.
    """

    overall: float
    worst: float


_TOLERANCE = {
    "float64": Tolerance(1e-10, 1e-8),
    "float32": Tolerance(1e-4, 2e-3),
    "float16": Tolerance(3e-3, 5e-2),
    "bfloat16": Tolerance(2e-2, 0.25),
}
# An accelerator multiplies float32 matrices in fewer bits unless told otherwise.
_LOOSE_FLOAT32 = Tolerance(5e-3, 5e-2)
_DEFAULT = Tolerance(0.1, 0.5)  # 8-bit floats


def tolerance(dtype: Any, *, platform: str, precision: str | None) -> Tolerance:
    """Return how far results of `dtype` may be from the reference."""
    name = str(compat.finfo(dtype).dtype) if jnp.issubdtype(dtype, jnp.complexfloating) else str(dtype)
    if name == "float32" and platform != "cpu" and precision not in ("highest", "float32"):
        return _LOOSE_FLOAT32
    return _TOLERANCE.get(name, _DEFAULT)


def check_results(results: Sequence[Any], truth: Sequence[Any], *, platform: str, precision: str | None) -> None:
    """Compare results with the reference's.

    Raises:
        CandidateError: they differ; the message says where and by how much.
    """
    if len(results) != len(truth):
        raise CandidateError(f"returns {len(results)} arrays, the reference {len(truth)}")
    for index, (result, true) in enumerate(zip(results, truth, strict=True)):
        _check_array(index, result, true, platform, precision)


def _check_array(index: int, result: Any, true: Any, platform: str, precision: str | None) -> None:
    if result.shape != true.shape:
        raise CandidateError(f"result {index} has shape {result.shape}, the reference {true.shape}")
    if compat.dtypes.issubdtype(result.dtype, compat.dtypes.prng_key):
        result, true = jax.random.key_data(result), jax.random.key_data(true)
    got, want = np.asarray(result), np.asarray(true)
    if not jnp.issubdtype(result.dtype, jnp.inexact):
        if not np.array_equal(got, want):
            raise CandidateError(f"result {index} differs from the reference in {np.sum(got != want)} places")
        return
    wide = np.complex128 if np.iscomplexobj(got) else np.float64
    got, want = got.astype(wide), want.astype(wide)
    _check_floats(index, got, want, tolerance(result.dtype, platform=platform, precision=precision))


def _check_floats(index: int, got: np.ndarray[Any, Any], want: np.ndarray[Any, Any], allowed: Tolerance) -> None:
    finite = np.isfinite(want)
    if not np.array_equal(finite, np.isfinite(got)) or not np.array_equal(got[~finite], want[~finite], equal_nan=True):
        raise CandidateError(f"result {index} has NaN or infinity where the reference has not, or the other way round")
    if not finite.any():
        return
    got, want = got[finite], want[finite]
    size = np.sqrt(np.mean(np.abs(want) ** 2))
    error, scale = np.abs(got - want), np.abs(want) + size
    overall = np.sqrt(np.mean(error**2))
    worst = int(np.argmax(error - allowed.worst * scale))
    if error[worst] > allowed.worst * scale[worst]:
        raise CandidateError(
            f"result {index} differs from the reference: {got[worst]:.6g} instead of {want[worst]:.6g}, "
            f"{error[worst] / max(scale[worst], 1e-300):.2g} relative (allowed: {allowed.worst:g})"
        )
    if overall > allowed.overall * size:
        raise CandidateError(
            f"result {index} differs from the reference by {overall / max(size, 1e-300):.2g} of its root mean square "
            f"(allowed: {allowed.overall:g})"
        )
