# SPDX-License-Identifier: Apache-2.0
"""RMS normalisation in plain JAX: all rows in one pass, or block after block of rows.

XLA reads the rows once for their mean and once more to scale them. A block that stays in cache is fetched from memory
only once; where there are enough rows, that outweighs the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._varying import unify_varying


def forward(x: jax.Array, weight: jax.Array, eps: float, block_rows: int | None) -> tuple[jax.Array, jax.Array]:
    """Return the normalised `x`, `[..., dim]`, and `1 / rms` of every row, `[...]`, in float32.

    Args:
        x: What is normalised, over its last axis.
        weight: `[dim]`.
        eps: Added to the mean of squares.
        block_rows: Rows per block; `None`: one pass over all.
    """

    def block(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        wide = rows.astype(jnp.promote_types(rows.dtype, jnp.float32))
        scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
        return (wide * scale * weight.astype(wide.dtype)).astype(rows.dtype), scale[..., 0]

    rows = x.reshape(-1, x.shape[-1])
    if block_rows is None or block_rows >= rows.shape[0]:
        out, scale = block(rows)
    else:
        out, scale = _in_blocks(block, block_rows, rows)
    return out.reshape(x.shape), scale.reshape(x.shape[:-1])


def backward(
    x: jax.Array, weight: jax.Array, scale: jax.Array, dout: jax.Array, block_rows: int | None
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of `x` and `weight`.

    Args:
        x, weight: As in the forward.
        scale: `1 / rms` of every row, from the forward.
        dout: Cotangent of the output.
        block_rows: Rows per block; `None`: one pass over all.
    """

    def block(rows: jax.Array, scale: jax.Array, dout: jax.Array) -> tuple[jax.Array, jax.Array]:
        wide, wide_dout = rows.astype(scale.dtype), dout.astype(scale.dtype)
        normal = wide * scale[..., None]
        dnormal = wide_dout * weight.astype(scale.dtype)
        inner = jnp.mean(dnormal * normal, axis=-1, keepdims=True)
        return (scale[..., None] * (dnormal - normal * inner)).astype(rows.dtype), (wide_dout * normal).sum(axis=0)

    dim = x.shape[-1]
    weight, *arrays = unify_varying((weight, x.reshape(-1, dim), scale.reshape(-1), dout.reshape(-1, dim)))
    if block_rows is None or block_rows >= arrays[0].shape[0]:
        dx, dweight = block(*arrays)
    else:
        dx, dweight = _summed_in_blocks(block, block_rows, arrays)
    return dx.reshape(x.shape), dweight.astype(weight.dtype)


def _in_blocks(block: Callable[..., Any], size: int, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    out, scale = lax.map(block, _cut(rows, size))
    return _join(out, rows.shape[0]), _join(scale, rows.shape[0])


def _summed_in_blocks(block: Callable[..., Any], size: int, arrays: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    def step(total: jax.Array, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        dx, dweight = block(*parts)
        return total + dweight, dx

    zero = unify_varying((jnp.zeros(arrays[0].shape[-1], arrays[1].dtype), arrays[0]))[0]
    dweight, dx = lax.scan(step, zero, tuple(_cut(x, size) for x in arrays))
    return _join(dx, arrays[0].shape[0]), dweight


def _cut(x: jax.Array, size: int) -> jax.Array:
    """Pad the rows to whole blocks with zeros, which add nothing to any sum."""
    missing = -x.shape[0] % size
    x = jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) if missing else x
    return x.reshape(-1, size, *x.shape[1:])


def _join(x: jax.Array, rows: int) -> jax.Array:
    return x.reshape(-1, *x.shape[2:])[:rows]
