# SPDX-License-Identifier: Apache-2.0
"""The kernels on TPUs: they walk a block of rows in strips, and a strip in chunks of columns.

The values of one chunk fit in registers, so the compiler keeps few of them in vector memory. In the simulator this
takes fewer cycles than a whole block at once, and a chunk of 2,048 columns fewer than one of 1,024.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels._vector_memory import LANES

from .common import Formula

SUMS = 8  # rows of the sums over rows: one tile of float32
CHUNK = 2048
_ROWS = 16

Values = Callable[[Any], tuple[jax.Array, ...]]


def rows_of_strip(block_rows: int) -> int:
    """Return the rows of a strip."""
    return _ROWS if block_rows % _ROWS == 0 else SUMS


def normalize(*refs: Any, formula: Formula) -> None:
    """Normalise a block of rows, and store the statistics of each."""
    left = list(refs)
    x, residual = left.pop(0), left.pop(0) if formula.residual else None
    weight, bias = left.pop(0) if formula.weight is not None else None, left.pop(0) if formula.bias else None
    out = left.pop(0)
    total = left.pop(0) if formula.residual else x
    *means, scales = left

    def on_strip(rows: Any) -> None:
        def first(columns: Any) -> jax.Array:
            if residual is not None:
                total[rows, columns] = x[rows, columns] + residual[rows, columns]
            return again(columns)

        def again(columns: Any) -> jax.Array:
            found: jax.Array = total[rows, columns].astype(jnp.float32)
            return found

        mean: Any = 0.0
        for ref in means:
            (mean,) = _means(x, 1, lambda columns: (first(columns),))
            ref[rows, :] = mean
        read = again if means else first
        (square,) = _means(x, 1, lambda columns: (jnp.square(read(columns) - mean),))
        scales[rows, :] = scale = lax.rsqrt(square + formula.eps)

        def write(columns: Any) -> None:
            normal = (again(columns) - mean) * scale
            normal = normal if weight is None else normal * _factor(weight, columns, formula)
            normal = normal if bias is None else normal + bias[:, columns].astype(jnp.float32)
            out[rows, columns] = normal.astype(out.dtype)

        _each_chunk(x.shape[1], write)

    _each_strip(x.shape[0], on_strip)


def differentiate(*refs: Any, formula: Formula, total: int) -> None:
    """Differentiate a block of rows, and add their gradients of weight and bias to eight running sums."""
    left = list(refs)
    x, dout = left.pop(0), left.pop(0)
    dsum = left.pop(0) if formula.residual else None
    weight = None if formula.weight is None else left.pop(0)
    means = [left.pop(0)] if formula.centred else []
    scales, dx, *sums = left
    block = x.shape[0]
    start = pl.program_id(0) * block

    @pl.when(start == 0)
    def _() -> None:
        for ref in sums:
            ref[...] = jnp.zeros_like(ref)

    def on_strip(rows: Any) -> None:
        scale, mean = scales[rows, :], means[0][rows, :] if means else 0.0

        def normal(columns: Any) -> jax.Array:
            found: jax.Array = (x[rows, columns].astype(jnp.float32) - mean) * scale
            return found

        def dnormal(columns: Any) -> jax.Array:
            found: jax.Array = dout[rows, columns].astype(jnp.float32)
            return found if weight is None else found * _factor(weight, columns, formula)

        def products(columns: Any) -> tuple[jax.Array, ...]:
            found = dnormal(columns)
            return (found * normal(columns), *[found] * len(means))

        dot, *rest = _means(x, 1 + len(means), products)

        def write(columns: Any) -> None:
            found = dnormal(columns) - normal(columns) * dot
            for one in rest:
                found = found - one
            found = (found * scale).astype(dx.dtype)
            dx[rows, columns] = found if dsum is None else found + dsum[rows, columns]
            given = dout[rows, columns].astype(jnp.float32)
            terms = [*([] if weight is None else [given * normal(columns)]), *[given] * formula.bias]
            # Rows past the end of the array may hold any values.
            row = start + rows.start + lax.broadcasted_iota(jnp.int32, given.shape, 0)
            for ref, term in zip(sums, terms, strict=True):
                term = jnp.where(row < total, term, 0) if total % block else term
                ref[:, columns] += term.reshape(-1, SUMS, term.shape[1]).sum(axis=0)

        _each_chunk(x.shape[1], write)

    _each_strip(block, on_strip)


def _factor(weight: Any, columns: Any, formula: Formula) -> jax.Array:
    found: jax.Array = weight[:, columns].astype(jnp.float32) + formula.weight
    return found


def _each_strip(block: int, on_strip: Callable[[Any], None]) -> None:
    size = rows_of_strip(block)

    def step(index: Any, _: None) -> None:
        on_strip(pl.ds(pl.multiple_of(index * size, size), size))

    lax.fori_loop(0, block // size, step, None)


def _each_chunk(dim: int, on_chunk: Callable[[Any], None]) -> None:
    """Apply a function to each chunk of columns; the last may be shorter."""

    def step(columns: Any, _: None) -> None:
        on_chunk(columns)

    _over_chunks(dim, step, None)


def _over_chunks(dim: int, step: Callable[[Any, Any], Any], carry: Any) -> Any:
    whole, rest = divmod(dim, CHUNK)
    if whole:
        carry = lax.fori_loop(
            0, whole, lambda index, carry: step(pl.ds(pl.multiple_of(index * CHUNK, CHUNK), CHUNK), carry), carry
        )
    return step(pl.ds(whole * CHUNK, rest), carry) if rest else carry


def _means(x: Any, count: int, values: Values) -> list[jax.Array]:
    """Return the means of `count` values over the columns of a strip, `[rows, 1]`; `values` takes a chunk."""
    block, dim = x.shape
    lanes = dim // LANES * LANES
    zero = jnp.zeros((rows_of_strip(block), LANES), jnp.float32)

    def add(columns: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(one + _folded(value) for one, value in zip(sums, values(columns), strict=True))

    found = [one.sum(axis=-1, keepdims=True) for one in _over_chunks(lanes, add, (zero,) * count)]
    if dim % LANES:
        rest = values(pl.ds(lanes, dim % LANES))
        found = [one + value.sum(axis=-1, keepdims=True) for one, value in zip(found, rest, strict=True)]
    return [one / dim for one in found]


def _folded(value: jax.Array) -> jax.Array:
    """Return the sum of groups of `LANES` columns, so that a strip is summed across lanes only once."""
    return functools.reduce(jnp.add, jnp.split(value, value.shape[1] // LANES, axis=1))
