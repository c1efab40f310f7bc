# SPDX-License-Identifier: Apache-2.0
"""Entry points: they pad the operands for the kernels and launch these, under any transformation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._hopper.tile_shapes import with_zeros
from ejkernel.kernels._varying import one_by_one
from ejkernel.kernels.grouped_matmul.common import GroupedMatmulCall, Groups, clipped_sizes, row_spans, taken_apart

from .plan import ProductParams, ProductPlan, WgradParams, product_plan, wgrad_plan


def product(
    call: GroupedMatmulCall, arrays: tuple[Any, ...], params: ProductParams, *, interpret: Any = None
) -> jax.Array:
    """Return the product, after the epilogue of the call.

    Args:
        call: The call.
        arrays: Left operand, right operand and groups; then the gate's matrices and the row factors, if any.
        params: Launch parameters that `params_fault` accepts.
        interpret: `InterpretGPUParams` to simulate the kernel on a CPU; `None` runs it on a GPU.
    """
    return _multiplied(call, arrays, params, keep=False, interpret=interpret)[0]


def product_keeping(
    call: GroupedMatmulCall, arrays: tuple[Any, ...], params: ProductParams, *, interpret: Any = None
) -> list[jax.Array]:
    """Return the result and the products before the epilogue; see `product`."""
    return _multiplied(call, arrays, params, keep=True, interpret=interpret)


def _multiplied(
    call: GroupedMatmulCall, arrays: tuple[Any, ...], params: ProductParams, *, keep: bool, interpret: Any
) -> list[jax.Array]:
    def compute(lhs: jax.Array, rhs: jax.Array, groups: Groups, *others: jax.Array) -> list[jax.Array]:
        from .product import multiply  # Mosaic GPU is not available in every environment

        plan = product_plan(call, params, keep=keep)
        sizes = sizes_for(call, groups)
        scales = [_with_room(row_scale, plan) for row_scale in others[plan.products - 1 :]]
        with jax.enable_x64(False):  # the kernels count in int32
            lhs = with_zeros(lhs, (plan.rows, plan.inner))
            shape = (plan.columns, plan.inner) if plan.transpose_rhs else (plan.inner, plan.columns)
            matrices = [with_zeros(x, (plan.groups, *shape)) for x in (rhs, *others[: plan.products - 1])]
            found = multiply(plan, lhs, *matrices, sizes, *scales, interpret=interpret)
            return [x[: call.rows, : call.columns] for x in found]

    # One launch per example: each has other groups.
    found: list[jax.Array] = one_by_one(compute, *arrays)
    return found


def weights_gradient(
    call: GroupedMatmulCall, arrays: tuple[Any, Any, Any], params: WgradParams, *, interpret: Any = None
) -> jax.Array:
    """Return the weight gradient of each group; see `product`."""

    def compute(lhs: jax.Array, rhs: jax.Array, groups: Groups) -> jax.Array:
        from .wgrad import sum_products

        plan = wgrad_plan(call, params)
        table = table_of(*row_spans(groups, call.rows, call.groups), largest_first=params.largest_first)
        with jax.enable_x64(False):
            lhs, rhs = with_zeros(lhs, (plan.rows, plan.inner)), with_zeros(rhs, (plan.rows, plan.columns))
            return sum_products(plan, lhs, rhs, table, interpret=interpret)[:, : call.inner, : call.columns]

    found: jax.Array = one_by_one(compute, *arrays)
    return found


def sizes_for(call: GroupedMatmulCall, groups: Groups) -> jax.Array:
    """Return the sizes of all groups; if only some have matrices here, followed by the number of the first of these.

    Empty groups are then added before and after, so that the first number and those after it are always valid.
    """
    group_sizes, first = taken_apart(groups)
    if first is None and group_sizes.dtype == jnp.int32:
        return group_sizes  # the kernel clips them
    sizes = clipped_sizes(group_sizes, call.rows)
    if first is None or call.all_groups is None:
        return sizes
    number = jnp.clip(first, -call.groups, call.all_groups).astype(jnp.int32) + call.groups
    return jnp.append(jnp.pad(sizes, call.groups), number)


def table_of(starts: jax.Array, ends: jax.Array, *, largest_first: bool) -> jax.Array:
    """Return number, first row and rows of each group, in the order of the tile scheduler."""
    numbers = jnp.arange(ends.shape[0], dtype=jnp.int32)
    table = jnp.stack([numbers, starts, ends - starts], axis=1)
    # Tiles are dealt statically: with large groups first, only small tiles remain at the end.
    return table[jnp.argsort(starts - ends)] if largest_first else table


def _with_room(row_scale: jax.Array, plan: ProductPlan) -> jax.Array:
    """Return float32 row factors, padded so that the last tile can read past the end."""
    return jnp.pad(row_scale.astype(jnp.float32), (0, plan.rows + plan.tile_rows - row_scale.shape[0]))
