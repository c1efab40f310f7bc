# SPDX-License-Identifier: Apache-2.0
"""Loops over chunks of rows, and over chunks of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._varying import unify_varying

from ._xla_problem import Partial, Problem
from .common import Coefficients, Statistics

Carry = TypeVar("Carry")


def statistics_by_rows(problem: Problem, chunk: int | None) -> Statistics:
    """Return the statistics; a chunk has complete rows."""

    def step(carry: tuple[()], rows: Any) -> tuple[tuple[()], Statistics]:
        part = problem.rows(*rows[:2])
        return carry, part.statistics(part.logits()).finished(part.factor)

    found: Statistics = over_rows(step, (), (problem.x, problem.labels), chunk)[1]
    return found


def gradients_by_rows(
    problem: Problem,
    chunk: int | None,
    sum_dtype: str,
    coefficients: Callable[[Problem, jax.Array, Any, Any], tuple[Coefficients, jax.Array, Any]],
    given: Any,
    lse: jax.Array | None = None,
) -> tuple[dict[str, Any], Any]:
    """Return the gradients, and what else `coefficients` returns for each row.

    Args:
        problem: The arrays.
        chunk: Rows per chunk; `None`: all.
        sum_dtype: Dtype of the sum of the weight's gradient over chunks.
        coefficients: From the problem of a chunk, its logits and its parts of `given` and `lse`: coefficients,
            log-sum-exp, and further results.
        given: Arrays of one number per row; a row with zeros has no gradient.
        lse: The log-sum-exp, if known.
    """
    x, weight, bias = problem.x, problem.weight, problem.bias
    given, lse, _ = unify_varying((given, lse, x))

    def gradients(rows: Any, dtype: Any) -> tuple[dict[str, Any], Any]:
        part = problem.rows(*rows[:2])
        values = part.logits()
        own, of_rows, more = coefficients(part, values, *rows[2:])
        return part.gradients(values, of_rows, own, (x.dtype, dtype)), more

    if _is_one(chunk, x.shape[0]):
        made, more = gradients((x, problem.labels, given, lse), weight.dtype)
        return made | {"bias": None if bias is None else made["bias"].astype(bias.dtype)}, more

    def step(sums: tuple[Any, Any], rows: Any) -> tuple[tuple[Any, Any], Any]:
        made, more = gradients(rows, sum_dtype)
        dbias = None if bias is None else sums[1] + made["bias"]
        return (sums[0] + made["weight"], dbias), (made["x"], more)

    zeros = problem.zeros(weight.shape, sum_dtype), None if bias is None else problem.zeros(bias.shape, problem.wide)
    (dweight, dbias), (dx, more) = over_rows(step, zeros, (x, problem.labels, given), chunk, lse)
    dbias = None if bias is None else dbias.astype(bias.dtype)
    return {"x": dx, "weight": dweight.astype(weight.dtype), "bias": dbias}, more


def statistics_by_columns(problem: Problem, chunk: int | None) -> Statistics:
    """Return the statistics, merged over chunks of columns."""
    nothing = problem.zeros(problem.labels.shape, problem.wide)

    def step(found: Partial, start: Any, count: int) -> Partial:
        part = problem.columns(start, count)
        return found.merged(part.statistics(part.logits()), part.factor)

    empty = Partial(nothing - jnp.inf, nothing, nothing, nothing, nothing)
    return over_columns(step, empty, problem.call.columns, chunk).finished(problem.factor)


def gradients_by_columns(
    problem: Problem, chunk: int | None, coefficients: Coefficients, lse: jax.Array
) -> dict[str, Any]:
    """Return the gradients; each chunk finishes its columns of the weight's gradient."""
    x, weight, bias, axis = problem.x, problem.weight, problem.bias, 0 if problem.call.transpose_weight else 1
    coefficients, lse, _ = unify_varying((coefficients, lse, x))

    def step(made: dict[str, Any], start: Any, count: int) -> dict[str, Any]:
        part = problem.columns(start, count)
        own = part.gradients(part.logits(), lse, coefficients, (problem.wide, weight.dtype))
        dbias = None
        if bias is not None:
            dbias = lax.dynamic_update_slice_in_dim(made["bias"], own["bias"].astype(bias.dtype), start, 0)
        dweight = lax.dynamic_update_slice_in_dim(made["weight"], own["weight"], start, axis)
        return {"x": made["x"] + own["x"], "weight": dweight, "bias": dbias}

    zeros: dict[str, Any] = {
        "x": problem.zeros(x.shape, problem.wide),
        "weight": problem.zeros(weight.shape, weight.dtype),
        "bias": None if bias is None else problem.zeros(bias.shape, bias.dtype),
    }
    made = over_columns(step, zeros, problem.call.columns, chunk)
    return made | {"x": made["x"].astype(x.dtype)}


def _is_one(chunk: int | None, length: Any) -> bool:
    return chunk is None or chunk >= length


def over_rows(
    step: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    arrays: Any,
    chunk: int | None,
    lse: Any = None,
    multiple: int = 1,
) -> Any:
    """Scan over chunks of rows; the last is padded with zeros, and `lse` so that their softmax is 0.

    `chunk` and the rows of all chunks are multiples of `multiple`. Without a carry, `None`, the first chunk makes it: a
    sum need not start from zeros.
    """
    rows = jax.tree.leaves(arrays)[0].shape[0]
    if chunk is None or _is_one(chunk, rows):
        return step(carry, (*arrays, lse))
    size = -(-rows // -(-rows // chunk))  # equal chunks need the least padding
    size += -size % multiple
    cut = (
        *(jax.tree.map(lambda x: _cut(x, size), y) for y in arrays),
        None if lse is None else _cut(lse, size, jnp.inf),
    )
    if carry is None:
        carry, first = step(None, jax.tree.map(lambda x: x[0], cut))
        # One chunk after the other: two at once would take twice the memory.
        carry, cut = lax.optimization_barrier((carry, jax.tree.map(lambda x: x[1:], cut)))
        carry, made = lax.scan(step, carry, cut)
        made = jax.tree.map(lambda x, y: jnp.concatenate([x[None], y]), first, made)
    else:
        carry, made = lax.scan(step, carry, cut)
    return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:rows], made)


def _cut(x: jax.Array, size: int, fill: float = 0) -> jax.Array:
    missing = -x.shape[0] % size
    padding = [(0, missing)] + [(0, 0)] * (x.ndim - 1)
    x = jnp.pad(x, padding, constant_values=fill) if missing else x
    return x.reshape(-1, size, *x.shape[1:])


def over_columns(step: Callable[[Carry, Any, int], Carry], carry: Carry, columns: int, chunk: int | None) -> Carry:
    """Run chunks of columns one after the other; the last may be narrower."""
    width = columns if chunk is None else min(chunk, columns)
    whole = columns // width
    if whole == 1:
        carry = step(carry, 0, width)
    else:
        carry = lax.fori_loop(0, whole, lambda i, found: step(found, i * width, width), carry)
    return step(carry, whole * width, columns % width) if columns % width else carry
