# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels' results in plain JAX: for programs that Pallas's interpreter does not run, such as meshes."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax

from ejkernel.kernels.linear_cross_entropy.mosaic_gpu.plan import EXPONENTIALS, GRADIENT, PRODUCT


def run_head(plan, arrays, into=(), *, interpret=None):
    """Return the results of `kernel.run_head`."""
    if plan.conditional:
        at = 3 + plan.bias
        plain = dataclasses.replace(plan, conditional=False)
        found = run_head(plain, (*arrays[:at], *arrays[at + 1 :]))
        return [jnp.where(arrays[at][0] != 0, y, before) for y, before in zip(found, into, strict=True)]
    x, weight, *others = arrays
    if plan.mode == PRODUCT:
        matrix = weight.T if plan.transpose_weight else weight
        product = jnp.dot(x[:, : len(matrix)], matrix, preferred_element_type=jnp.float32)
        return [(product * others[0][: len(x), None]).astype(x.dtype)]
    rows, x = len(x), jnp.pad(x, ((0, plan.rows - len(x)), (0, 0)))
    bias = others.pop(0) if plan.bias else None
    labels, *others = others
    start = others.pop(0)[0] if plan.mode == GRADIENT else jnp.int32(0)
    raw = jnp.dot(x, weight.T if plan.transpose_weight else weight, preferred_element_type=jnp.float32)
    raw = jnp.pad(raw, ((0, 0), (0, plan.width - raw.shape[1])))
    numbers = start + jnp.arange(plan.columns)
    raw = lax.dynamic_slice_in_dim(raw, start, plan.columns, 1)
    raw = raw if bias is None else raw + lax.dynamic_slice_in_dim(bias, start, plan.columns)
    removed = (raw == -jnp.inf) | (numbers >= plan.last)
    finite = jnp.where(removed, 0, raw) * plan.scale
    slope = jnp.ones_like(finite)
    if plan.soft_cap is not None:
        squashed = jnp.tanh(finite / plan.soft_cap)
        finite, slope = plan.soft_cap * squashed, 1 - squashed**2
    s = jnp.where(removed, -jnp.inf, finite)
    hit = numbers == labels[:, None]
    if plan.mode == GRADIENT:
        return [_gradient(plan, s, finite, slope, hit, *others).astype(x.dtype)[:rows]]
    relative_to = others[1] if plan.mode == EXPONENTIALS else None
    parts = _parts(plan, s, hit, relative_to)
    found = [jnp.stack(parts[name]) for name in plan.per_tile]
    if plan.mode == EXPONENTIALS:
        found.append((jnp.exp2(s * jnp.log2(jnp.e) - relative_to[:, None]) * slope).astype(x.dtype)[:rows])
    return found


def add_product(total, left, right, *, interpret=None):
    """Return the result of `sums.add_product`."""
    left, right = (x[:, :size] for x, size in zip((left, right), total.shape, strict=True))
    return total + jnp.dot(left.T, right, preferred_element_type=total.dtype)


def product(left, right, rows, dtype, *, interpret=None):
    """Return the result of `sums.product`."""
    return jnp.dot(left[:, :rows].T, right, preferred_element_type=dtype)


def _parts(plan, s, hit, relative_to):
    """Return the numbers per row of each tile, by name."""
    parts = {name: [] for name in plan.per_tile}
    for i in range(plan.column_tiles):
        own = slice(i * plan.block_n, (i + 1) * plan.block_n)
        tile, label = s[:, own], jnp.where(hit, s, 0)[:, own].sum(1)
        top = tile.max(axis=1)
        base = jnp.where(top == -jnp.inf, 0, top) if relative_to is None else relative_to / jnp.log2(jnp.e)
        e, finite = jnp.exp(tile - base[:, None]), jnp.where(tile == -jnp.inf, 0, tile)
        # The kernel leaves numbers of other tiles' labels unwritten.
        label = jnp.where(hit[:, own].any(axis=1), label, jnp.nan)
        values = {"max": top, "total": e.sum(1), "label": label, "sum": finite.sum(1), "expected": (finite * e).sum(1)}
        for name, found in parts.items():
            found.append(values[name])
    return parts


def _gradient(plan, s, finite, slope, hit, lse, softmax, label, *more):
    d = softmax[:, None]
    if plan.has_expected:
        d = d + more[-1][:, None] * finite
    d = d * jnp.exp2(s * jnp.log2(jnp.e) - lse[:, None]) + jnp.where(hit, label[:, None], 0)
    if plan.has_constant:
        d = d + more[0][:, None]
    return jnp.where(s == -jnp.inf, 0, d * slope)
