# SPDX-License-Identifier: Apache-2.0
"""The entry points with few rows: they arrange operands and scales as the kernel reads them, and launch it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels._hopper.tile_shapes import ROWS, padded, with_zeros
from ejkernel.kernels._varying import one_by_one
from ejkernel.kernels.grouped_matmul.common import (
    Groups,
    clipped_sizes,
    finished,
    own_rows,
    row_spans,
    taken_apart,
    without_rest,
)
from ejkernel.kernels.grouped_matmul.mosaic_gpu.launch import sizes_for
from ejkernel.kernels.quantized_matmul.common import QuantizedMatmulCall
from ejkernel.kernels.quantized_matmul.grouped.common import QuantizedGroupedMatmulCall

from .few_rows_plan import HALF, FewRowsPlan, few_rows_plan
from .padding import each_factor
from .plan import ROW_TILE, MosaicGpuParams


class _Tiles(NamedTuple):
    """The tiles of the rows of groups.

    Attributes:
        table: Their number, and the group of each.
        rows: The row at each place of the tiles.
        places: The place of each row.
    """

    table: jax.Array
    rows: jax.Array
    places: jax.Array


def few_rows(
    call: QuantizedMatmulCall, params: MosaicGpuParams, arrays: Sequence[jax.Array], interpret: Any
) -> jax.Array:
    """Return the product of at most 64 rows; see `launch.product`."""
    from .few_rows import multiply  # Mosaic GPU is not available in every environment

    plan, (x, w, *x_scale, w_scale) = few_rows_plan(call, params), arrays
    with jax.enable_x64(False):  # the kernel counts in int32
        if plan.wide:
            x, of_rows = _fitting(x, plan)
        else:
            of_rows = each_factor(x_scale[0], (call.rows,), call.x_block or (), ROWS)
        of_columns = each_factor(w_scale, (call.columns,), call.w_block or (), plan.factors)
        x, w = (with_zeros(array, (_whole_tiles(len(array)), plan.inner)) for array in (x, w))
        x = _in_order(x) if plan.wide else x
        [found] = multiply(plan, x, w, of_rows, of_columns, interpret=interpret)
        return found.astype(plan.out_dtype)[:, : call.columns]


def few_rows_of_groups(
    call: QuantizedGroupedMatmulCall, params: MosaicGpuParams, arrays: Sequence[Any], interpret: Any
) -> jax.Array:
    """Return the product of rows in 16 bits, after the epilogue of the call; see `launch.grouped_activation`."""

    def compute(lhs: Any, rhs: Any, groups: Groups, rhs_scale: Any, *more: Any) -> jax.Array:
        from .few_rows import multiply

        plan = few_rows_plan(call, params)
        sizes, first = taken_apart(groups)
        sizes = clipped_sizes(sizes, call.rows)  # before 64 bits are switched off
        groups = sizes if first is None else (sizes, first)
        pairs, factors = [(rhs, rhs_scale), *more[: call.gated]], more[call.gated :]
        factors = tuple(factor.astype(jnp.float32) for factor in factors)
        with jax.enable_x64(False):  # the kernel counts in int32
            x, of_rows = _fitting(lhs, plan)
            if plan.group_tiles:
                tiles = _tiles(call, plan, groups)
                x, of_rows = x[tiles.rows], of_rows if isinstance(of_rows, np.ndarray) else of_rows[tiles.rows]
                given = [*(factor[tiles.rows] for factor in factors), tiles.table]
            else:
                given = [*(jnp.pad(factor, (0, ROWS)) for factor in factors), sizes_for(call, groups)]
            x = _in_order(with_zeros(x, (_whole_tiles(len(x)), plan.inner)))
            shape = (call.groups, _whole_tiles(call.columns), plan.inner)
            matrices = [with_zeros(w, shape) if plan.group_tiles else with_zeros(w[0], shape[1:]) for w, _ in pairs]
            size, block = (call.groups, call.columns), call.rhs_block or ()
            of_columns = [each_factor(scale, size, block, plan.factors) for _, scale in pairs]
            found = multiply(plan, x, *matrices, of_rows, *of_columns, *given, interpret=interpret)
            if plan.splits > 1:
                own = own_rows(groups, call.rows, call.groups)
                row_scale = factors[0] if factors else None
                found = [without_rest(finished(found, own, row_scale, call.activation), own)]
            out = found[0].astype(plan.out_dtype)[:, : call.columns]
            if not plan.group_tiles:
                return out
            return without_rest(out[tiles.places], own_rows(groups, call.rows, call.groups))

    found: jax.Array = one_by_one(compute, *(array for array in arrays if array is not None))
    return found


def _tiles(call: QuantizedGroupedMatmulCall, plan: FewRowsPlan, groups: Groups) -> _Tiles:
    """Return the tiles of the rows of groups: each group's begin with a new one."""
    starts, ends = row_spans(groups, call.rows, call.groups)
    counts = -(-(ends - starts) // plan.tile_rows)
    last = jnp.cumsum(counts)
    first = last - counts
    number = jnp.arange(plan.group_tiles, dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(last[None] <= number[:, None], axis=1, dtype=jnp.int32), call.groups - 1)
    inside = (number - first[group])[:, None] * plan.tile_rows + jnp.arange(plan.tile_rows, dtype=jnp.int32)
    rows = jnp.clip(starts[group][:, None] + inside, 0, call.rows - 1).reshape(-1)
    row = jnp.arange(call.rows, dtype=jnp.int32)
    own = jnp.minimum(jnp.sum(ends[None] <= row[:, None], axis=1, dtype=jnp.int32), call.groups - 1)
    places = jnp.clip(first[own] * plan.tile_rows + row - starts[own], 0, plan.rows - 1)
    return _Tiles(jnp.concatenate([last[-1:], group]), rows, places)


def _whole_tiles(size: int) -> int:
    """Return the rows of an array that copies of tiles can read: whole tiles, or less than one."""
    return size if size < ROW_TILE else padded(size, ROW_TILE)


def _in_order(x: jax.Array) -> jax.Array:
    """Return rows with the first two of four columns before the last two, in each step."""
    return x.reshape(len(x), -1, HALF // 2, 2, 2).swapaxes(2, 3).reshape(x.shape)


def _fitting(x: jax.Array, plan: FewRowsPlan) -> tuple[jax.Array, Any]:
    """Return rows in the dtype of the products, and factors, those of the rows first.

    The factors are powers of two: in float16 a row loses digits only of
    numbers that are 2**28 times smaller than its largest.
    """
    if x.dtype == plan.dtype:
        # A constant with a zero at the end: XLA would run a kernel to make equal numbers.
        size = plan.rows if plan.group_tiles else len(x)
        return x, np.where(np.arange(size + ROWS) < size, plan.divisor, 0).astype(np.float32)
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=1)
    exponent = lax.bitcast_convert_type(largest, jnp.int32) & 0x7F800000
    power = jnp.maximum(lax.bitcast_convert_type(exponent, jnp.float32), 2.0**-100)
    power = jnp.where(jnp.isfinite(largest), power, 1.0) * 2.0**-14
    return (wide / power[:, None]).astype(plan.dtype), jnp.pad(power, (0, ROWS))
