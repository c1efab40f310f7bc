# SPDX-License-Identifier: Apache-2.0
"""Arithmetic inside of a kernel, and of its blocks."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._vector_memory import LANES, up

LOG2E = 1.4426950408889634
# exp2(MASKED - START) is 0, so a row without visible keys keeps a sum of 0.
MASKED, START = -2.0e38, -1.0e30
# Axes of a product that are summed: the last with the first one, both last ones, both first ones.
NN, NT, TN = ((1,), (0,)), ((1,), (1,)), ((0,), (0,))


def dot(a: Any, b: Any, axes: tuple[tuple[int, ...], tuple[int, ...]] = NN) -> Any:
    """Return a float32 product; float32 operands are not rounded."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, (axes, ((), ())), preferred_element_type=jnp.float32, precision=precision)


def wide(x: Any, columns: int) -> Any:
    """Return `[rows, 128]` of equal columns with another number of columns."""
    if columns > LANES:
        x = jnp.tile(x, (1, -(-columns // LANES)))
    return x[:, :columns]


def column(line: Any) -> Any:
    """Return `[1, n]` as `[n, 128]` of equal columns."""
    return jnp.transpose(jnp.broadcast_to(line, (LANES, line.shape[1])))


def floor(x: Any, size: int) -> Any:
    """Return `max(x, 0) // size`; `//` on a traced integer asks for the kind of a device, which may not be here."""
    if isinstance(x, int):
        return max(x, 0) // size
    return lax.div(jnp.int32(jnp.maximum(x, 0)), jnp.int32(size))


def least(x: Any, y: Any) -> Any:
    """Return the minimum, a Python number if both are."""
    return min(x, y) if isinstance(x, int) and isinstance(y, int) else jnp.minimum(x, y)


def most(x: Any, y: Any) -> Any:
    """Return the maximum, a Python number if both are."""
    return max(x, y) if isinstance(x, int) and isinstance(y, int) else jnp.maximum(x, y)


def down(x: int, size: int = LANES) -> int:
    """Return `x` rounded down to a multiple of `size`."""
    return x // size * size


def balanced(length: int, block: int) -> int:
    """Return the smallest block, a multiple of 128, that covers `length` with as many blocks as `block` does."""
    return up(-(-length // -(-length // block)))


def divisor(block: int, largest: int) -> int:
    """Return the largest multiple of 128, at most `largest`, that divides `block`."""
    return next(size for size in range(min(block, largest), 0, -LANES) if block % size == 0)
