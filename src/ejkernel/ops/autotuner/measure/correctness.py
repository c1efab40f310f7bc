# SPDX-License-Identifier: Apache-2.0
"""Checks of a candidate's results against the reference result."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import compat
from ejkernel.ops.errors import CandidateError


class Tolerance(NamedTuple):
    """The largest accepted difference from the reference result.

    Configurations sum in different orders and round in between, so every element differs by a few units in the last
    place, and the worst of millions by many more. A wrong scale changes all elements; a wrong index or mask changes
    few, but by a lot.

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
# By default, accelerators multiply float32 matrices with fewer bits.
_LOOSE_FLOAT32 = Tolerance(5e-3, 5e-2)
_DEFAULT = Tolerance(0.1, 0.5)  # 8-bit floats
_SMALL = 1 << 16  # results up to this number of elements are compared on the host
_REFERENCE: Final = "the reference"
NOT_FINITE: Final = "has NaN or infinity"
_TINY = 1e-300  # avoids division by zero


def tolerance(dtype: Any, *, platform: str, precision: str | None) -> Tolerance:
    """Return the tolerance for results of `dtype`."""
    name = str(compat.tracing.finfo(dtype).dtype) if jnp.issubdtype(dtype, jnp.complexfloating) else str(dtype)
    if name == "float32" and platform != "cpu" and precision not in ("highest", "float32"):
        return _LOOSE_FLOAT32
    return _TOLERANCE.get(name, _DEFAULT)


class Deviation(NamedTuple):
    """The difference of one array from the reference result.

    Attributes:
        error: The largest difference; for integers the number of differing elements.
        allowed: The tolerance.
        reason: Description of the error; empty if within the tolerance.
    """

    error: float
    allowed: float
    reason: str = ""


def is_nowhere_finite(result: Any) -> bool:
    """Return whether an array of floats has elements, but no finite one."""
    return bool(result.size) and _finite_count(result) == 0


def is_all_finite(result: Any) -> bool:
    """Return whether all elements of an array are finite."""
    return _finite_count(result) == int(result.size)


def _finite_count(result: Any) -> int:
    if not jnp.issubdtype(result.dtype, jnp.inexact):
        return int(result.size)
    if result.size > _SMALL:
        return int(_count_finite(result))
    wide = np.asarray(result)  # NumPy's `isfinite` rejects 8-bit floats
    return int(np.isfinite(wide if wide.dtype.itemsize >= 4 else wide.astype(np.float32)).sum())


_count_finite: Final = jax.jit(lambda result: jnp.isfinite(result).sum())


def check_results(results: Sequence[object], truth: Sequence[object], **options: Any) -> None:
    """Compare results with the reference result; `options` are those of `deviations`.

    Raises:
        CandidateError: They differ; the message says where and by how much.
    """
    for found in deviations(results, truth, **options):
        if found.reason:
            raise CandidateError(found.reason)


def deviations(
    results: Sequence[object],
    truth: Sequence[object],
    *,
    platform: str,
    precision: str | None,
    names: Sequence[str] = (),
    inputs: Sequence[Any] = (),
    of: str = _REFERENCE,
) -> Iterator[Deviation]:
    """Yield the deviation of each result from the reference result.

    Args:
        results: The candidate's results.
        truth: The reference result.
        platform: Kind of the device.
        precision: The default matmul precision in force.
        names: Names of the results for the message; their numbers by default.
        inputs: Dtypes of the inputs, whose rounding also counts.
        of: Name of the reference for the message.

    Raises:
        CandidateError: The number of results differs from the reference.
    """
    if len(results) != len(truth):
        raise CandidateError(f"returns {len(results)} arrays, {of} {len(truth)}")
    # Rounding of the inputs counts, too, and the reference may be less precise than the candidate.
    allowed = functools.partial(tolerance, platform=platform, precision=precision)
    called = names or [f"result {index}" for index in range(len(results))]
    for name, result, true in zip(called, results, truth, strict=True):
        yield _deviation(name, result, true, lambda *dtypes: max(map(allowed, (*dtypes, *inputs))), of)


def _deviation(name: str, result: Any, true: Any, allowance: Callable[..., Tolerance], of: str) -> Deviation:
    if result.shape != true.shape:
        return Deviation(math.inf, 0.0, f"{name} has shape {result.shape}, {of} {true.shape}")
    if compat.tracing.dtypes.issubdtype(result.dtype, compat.tracing.dtypes.prng_key):
        result, true = jax.random.key_data(result), jax.random.key_data(true)
    if not jnp.issubdtype(result.dtype, jnp.inexact):
        return _deviation_of_integers(name, result, true, of)
    allowed = allowance(result.dtype, true.dtype)
    if not result.size:
        return Deviation(0.0, allowed.worst)
    return _judge(name, _compare(result, true, allowed.worst), allowed, of, result.shape)


def _deviation_of_integers(name: str, got: Any, want: Any, of: str) -> Deviation:
    if not got.size:
        return Deviation(0, 0.0)
    is_small = got.size <= _SMALL
    found = _differing(np.asarray(got), np.asarray(want)) if is_small else _differing_on_device(got, want)
    count, row, column = map(int, found)
    at = position(row * _rows(got).shape[1] + column, got.shape)
    values = f"{_rows(got)[row, column]} instead of {_rows(want)[row, column]}{at}" if count else ""
    return Deviation(count, 0.0, f"{name} differs from {of} in {count} elements: {values}" if count else "")


def _differing(got: Any, want: Any) -> tuple[Any, Any, Any]:
    """Return the number of differing elements, and row and column of the first one, as in `_rows`."""
    differs = _rows(got != want)
    row = differs.any(axis=1).argmax()
    return differs.sum(), row, differs[row].argmax()


_differing_on_device: Final = jax.jit(_differing)


def _rows(array: Any) -> Any:
    """Return an array as a matrix: on a device, an index of all elements could exceed int32."""
    return array.reshape(-1, array.shape[-1] if array.ndim else 1)


def position(index: int, shape: Sequence[int]) -> str:
    """Return the position of an element of a flattened array in words, such as ` at [3, 0]`; empty for a scalar."""
    return f" at {[int(each) for each in np.unravel_index(index, shape)]}" if shape else ""


class _Comparison(NamedTuple):
    """The differences of two arrays of floats.

    Attributes:
        same_kinds: Whether both have the same NaN and infinities in the same places.
        row, column: Where the first NaN or infinity is that only one of them has; otherwise the element that exceeds
            the tolerance most. See `_rows`.
        size: Root mean square of the finite expected values.
        overall: Root mean square of the differences.
        got, want, error: The element there, its expected value and their difference.
        scale: The divisor for the relative error.
    """

    same_kinds: Any
    row: Any
    column: Any
    size: Any
    overall: Any
    got: Any
    want: Any
    error: Any
    scale: Any


def _compare(got: Any, want: object, worst: float) -> _Comparison:
    """Compare large results on the device, as they take seconds to transfer, and small ones without compiling."""
    if got.size > _SMALL:
        found: _Comparison = jax.device_get(_compare_on_device(got, want, worst))
        return found
    with np.errstate(all="ignore"):
        return _compared(np.asarray(got), np.asarray(want), worst, np)


def _compared(got: Any, want: Any, worst: float, xp: Any) -> _Comparison:
    wide = got.dtype if got.dtype.itemsize >= 4 else jnp.float32  # 8-bit floats have no implicit promotion
    got, want = _rows(got.astype(wide)), _rows(want.astype(wide))
    finite = xp.isfinite(want)
    same = (got == want) | (xp.isnan(got) & xp.isnan(want))
    count = xp.maximum(finite.sum(dtype=xp.float32), 1)  # it may exceed int32, too
    difference = xp.where(finite, xp.abs(got - want), 0)
    magnitude = xp.where(finite, xp.abs(want), 0)
    size = _root_mean_square(magnitude, count, xp)
    scale = magnitude + size
    alike = xp.where(finite, xp.isfinite(got), same)
    excess = xp.where(alike, xp.where(finite, difference - worst * scale, -xp.inf), xp.inf)
    row = xp.argmax(xp.max(excess, axis=1))
    at = row, xp.argmax(excess[row])
    return _Comparison(
        same_kinds=xp.all(alike),
        row=at[0],
        column=at[1],
        size=size,
        overall=_root_mean_square(difference, count, xp),
        got=got[at],
        want=want[at],
        error=difference[at],
        scale=scale[at],
    )


_compare_on_device: Final = jax.jit(functools.partial(_compared, xp=jnp))


def _root_mean_square(values: Any, count: Any, xp: Any) -> Any:
    largest = xp.max(values)  # scale first: squares of large values overflow, squares of small values underflow
    unit = xp.where(largest > 0, largest, 1)
    return largest * xp.sqrt(xp.sum((values / unit) ** 2) / count)


def _judge(name: str, found: _Comparison, allowed: Tolerance, of: str, shape: Sequence[int]) -> Deviation:
    found = _Comparison(*(value.item() for value in found))
    worst, overall = found.error / max(found.scale, _TINY), found.overall / max(found.size, _TINY)
    at = position(found.row * (shape[-1] if shape else 1) + found.column, shape)
    values = f"{found.got:.6g} instead of {found.want:.6g}{at}"
    if not found.same_kinds:
        return Deviation(math.inf, allowed.worst, f"{name} {NOT_FINITE} where {of} has none, or vice versa: {values}")
    if found.error > allowed.worst * found.scale:
        differs = f"{name} differs from {of}: {values}, {worst:.2g} relative"
        return Deviation(worst, allowed.worst, f"{differs} (allowed: {allowed.worst:g})")
    if found.overall > allowed.overall * found.size:
        differs = f"{name} differs from {of} by {overall:.2g} of its root mean square (allowed: {allowed.overall:g})"
        return Deviation(overall, allowed.overall, f"{differs}, most {values}")
    return max(
        Deviation(worst, allowed.worst),
        Deviation(overall, allowed.overall),
        key=lambda deviation: deviation.error / deviation.allowed,
    )
