# SPDX-License-Identifier: Apache-2.0
"""Whether a candidate's results may be believed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import compat
from ejkernel.ops.errors import CandidateError

# Allowed difference, relative to the value and to the root mean square of the reference. Configurations sum in
# different orders, so results differ by several units in the last place; a wrong index or mask differs by far more.
_TOLERANCE = {"float64": 1e-9, "float32": 2e-4, "float16": 1e-2, "bfloat16": 5e-2}
_LOOSE_FLOAT32 = 2e-2  # an accelerator multiplies float32 matrices in fewer bits unless told otherwise
_DEFAULT = 0.25  # 8-bit floats


def tolerance(dtype: Any, *, platform: str, precision: str | None) -> float:
    """Return the relative difference that results of `dtype` may have from the reference."""
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


def _check_floats(index: int, got: np.ndarray[Any, Any], want: np.ndarray[Any, Any], allowed: float) -> None:
    finite = np.isfinite(want)
    if not np.array_equal(finite, np.isfinite(got)) or not np.array_equal(got[~finite], want[~finite], equal_nan=True):
        raise CandidateError(f"result {index} has NaN or infinity where the reference has not, or the other way round")
    if not finite.any():
        return
    got, want = got[finite], want[finite]
    scale = np.abs(want) + np.sqrt(np.mean(np.abs(want) ** 2))
    error = np.abs(got - want)
    worst = int(np.argmax(error - allowed * scale))
    if error[worst] > allowed * scale[worst]:
        raise CandidateError(
            f"result {index} differs from the reference: {got[worst]:.6g} instead of {want[worst]:.6g}, "
            f"{error[worst] / max(scale[worst], 1e-300):.2g} relative (allowed: {allowed:g})"
        )
