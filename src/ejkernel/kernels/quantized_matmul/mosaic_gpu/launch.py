# SPDX-License-Identifier: Apache-2.0
"""The entry points: they arrange operands and scales as the kernels read them, and launch these."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels._hopper.backend import backend_for
from ejkernel.kernels._hopper.launch import unsliced
from ejkernel.kernels._hopper.tile_shapes import ROWS, padded, with_zeros
from ejkernel.kernels._varying import one_by_one
from ejkernel.kernels.grouped_matmul.mosaic_gpu.launch import sizes_for
from ejkernel.kernels.grouped_matmul.mosaic_gpu.tiles import run_kernel
from ejkernel.kernels.quantized_matmul.common import QuantizedMatmulCall
from ejkernel.kernels.quantized_matmul.grouped.common import QuantizedGroupedActivationCall, QuantizedGroupedMatmulCall
from ejkernel.kernels.quantized_matmul.quantized import Block, spread

from .few_rows_launch import few_rows, few_rows_of_groups
from .padding import each_factor, in_chunks
from .plan import (
    FEW_ROWS,
    ROW_TILE,
    MosaicGpuParams,
    QuantizedPlan,
    activated_plan,
    grouped_plan,
    quantized_plan,
    split_plan,
)
from .splits import added


class _Operands(NamedTuple):
    """Operands of groups: `x [m, k]`, `w [groups, n, k]`, int32 sizes, scales, and the blocks of these."""

    x: jax.Array
    w: jax.Array
    sizes: jax.Array
    x_scale: jax.Array
    w_scale: jax.Array
    x_block: Block
    w_block: Block


def product(call: QuantizedMatmulCall, arrays: Any, params: MosaicGpuParams, *, interpret: Any = None) -> jax.Array:
    """Return the product of the dequantised operands, `x @ w.T`: `[m, n]` in `call.out_dtype`.

    Args:
        call: The call, which the kernel supports; it gives the blocks of the scales.
        arrays: `x [m, k]`, `w [n, k]`, the scales of `x` and those of `w`; those of `x` are `None` if it has 16 bits.
        params: Launch parameters that `params_fault` accepts.
        interpret: `InterpretGPUParams` to simulate the kernel on a CPU; `None` runs it on a GPU.
    """
    blocks: Any = call.x_block, (1, *(call.w_block or ()))

    def compute(x: jax.Array, w: jax.Array, *given: jax.Array) -> jax.Array:
        *factors, w_scale = given
        if params.block_m == FEW_ROWS:
            return few_rows(call, params, (x, w, *factors, w_scale), interpret)
        [x_scale] = factors
        sizes = jnp.full((1,), call.rows, jnp.int32)
        operands = _Operands(x, w[None], sizes, x_scale, w_scale[None], *blocks)
        plan = quantized_plan(call, params)
        multiplied = _multiplied if params.splits == 1 else functools.partial(_partly_split, params.splits)
        return multiplied(plan, operands, interpret)[: call.rows, : call.columns]

    found: jax.Array = one_by_one(compute, *(array for array in arrays if array is not None))
    return found


def grouped_product(
    call: QuantizedGroupedMatmulCall, arrays: Any, params: MosaicGpuParams, *, interpret: Any = None
) -> jax.Array:
    """Return the dequantised rows of each group times the group's matrix transposed: `[m, n]` in `call.out_dtype`.

    Args:
        call: The call, which the kernel supports; it gives the blocks of the scales.
        arrays: `lhs [m, k]`, `rhs [groups, n, k]`, the groups, the scales of `lhs` and of `rhs`, and a factor for each
            row if the call has them.
        params, interpret: As for `product`.
    """
    blocks: Any = call.lhs_block, call.rhs_block

    if params.block_m == FEW_ROWS:
        return few_rows_of_groups(call, params, arrays, interpret)

    def compute(lhs: Any, rhs: Any, groups: Any, lhs_scale: Any, rhs_scale: Any, *factors: jax.Array) -> jax.Array:
        sizes, scale, x_block = sizes_for(call, groups), lhs_scale, blocks[0]
        for each in factors:  # the kernel multiplies them with the result's rows in any case
            scale = _of_each_row(lhs_scale, lhs.shape, x_block) * each.astype(jnp.float32)[:, None]
            x_block = (1, x_block[1])
        operands = _Operands(lhs, rhs, sizes, scale, rhs_scale, x_block, blocks[1])
        return _multiplied(grouped_plan(call, params), operands, interpret)[: call.rows, : call.columns]

    found: jax.Array = one_by_one(compute, *(array for array in arrays if array is not None))
    return found


def grouped_activation(
    call: QuantizedGroupedActivationCall, arrays: Any, params: MosaicGpuParams, *, interpret: Any = None
) -> list[jax.Array]:
    """Return `[result]`, the activation of each group's product, `[m, n]`; if it has 8 bits, `[result, scales]`.

    The scales are float32, one for 128 columns of a row.

    Args:
        call: The call, which the kernel supports; it gives the blocks of the scales.
        arrays: `lhs [m, k]`, `rhs [groups, n, k]`, groups, both scales, the gate with its scales or `None`, and factors
            of rows if the call has them.
        params, interpret: As for `product`.
    """
    lhs_block: Any = call.lhs_block
    rhs_block: Any = call.rhs_block
    if params.block_m == FEW_ROWS:
        return [few_rows_of_groups(call, params, arrays, interpret)]

    def compute(lhs: Any, rhs: Any, groups: Any, lhs_scale: Any, rhs_scale: Any, *more: Any) -> list[jax.Array]:
        from .activated import activated  # Mosaic GPU is not available in every environment

        plan, sizes = activated_plan(call, params), sizes_for(call, groups)
        columns = call.columns
        with jax.enable_x64(False):  # the kernel counts in int32
            x = with_zeros(lhs, (plan.rows, plan.inner))
            shape = (call.groups, padded(columns, ROW_TILE), plan.inner)
            pairs = [(rhs, rhs_scale), *more[: call.gated]]
            matrices, scales = [with_zeros(w, shape) for w, _ in pairs], [scale for _, scale in pairs]
            if plan.blocks:
                factors = [in_chunks(scale) for scale in (lhs_scale, *scales)]
            else:
                of_rows = each_factor(lhs_scale, (call.rows,), lhs_block, plan.rows + plan.tile_rows)
                of_columns = [each_factor(each, (call.groups, columns), rhs_block, plan.factors) for each in scales]
                factors = [of_rows, *of_columns]
            room = plan.rows + plan.tile_rows - call.rows
            last = [jnp.pad(each.astype(jnp.float32), (0, room)) for each in more[call.gated :]]
            values, *scale = activated(plan, [x, *matrices, sizes, *factors, *last], interpret=interpret)
        return [values[: call.rows, :columns], *(each[: call.rows] for each in scale)]

    found: list[jax.Array] = one_by_one(compute, *(array for array in arrays if array is not None))
    return found


def _multiplied(plan: QuantizedPlan, given: _Operands, interpret: Any) -> jax.Array:
    """Return the kernel's result, with padded rows and columns."""
    # Mosaic GPU is not available in every environment.
    from .blocks import BlocksKernel
    from .kernel import QuantizedKernel

    with jax.enable_x64(False):  # the kernel counts in int32
        rows, (groups, columns, _) = given.x.shape[0], given.w.shape
        padded_rows = max(rows, ROWS)
        x = with_zeros(given.x, (padded_rows, plan.inner))
        w = with_zeros(given.w, (groups, padded(columns, ROW_TILE), plan.inner))
        if plan.blocks:
            kernel: Any = BlocksKernel(plan, backend_for(interpret))
            of_matrix = _of_columns(given.w_scale, plan) if plan.thin else in_chunks(given.w_scale)
            scales = in_chunks(given.x_scale), of_matrix
        else:
            kernel = QuantizedKernel(plan, backend_for(interpret))
            of_rows = each_factor(given.x_scale, (rows,), given.x_block, padded_rows + plan.tile_rows)
            of_columns = each_factor(given.w_scale, (groups, columns), given.w_block, plan.factors)
            scales = of_rows, of_columns
        arrays = x, w, given.sizes, *scales
        [out] = run_kernel(kernel, arrays, (plan.rows, plan.columns), name="quantized_matmul")
    return out


def _partly_split(splits: int, plan: QuantizedPlan, given: _Operands, interpret: Any) -> jax.Array:
    """Return the kernel's result; blocks of threads share the tiles that whole rounds of tiles leave."""
    split = split_plan(plan, splits)
    # A constant with a zero at the end: XLA would run a kernel to make equal numbers.
    sizes = np.where(np.arange(split.splits + 1) < split.splits, split.own_rows, 0).astype(np.int32)
    sums = _multiplied(split, given._replace(sizes=jnp.asarray(sizes)), interpret)
    sums = sums.reshape(split.splits, split.own_rows, -1)[:, : plan.rows - split.first_row]
    rest = added(sums).astype(plan.out_dtype)
    if not split.first_row:
        return rest
    whole = _multiplied(plan, given._replace(sizes=jnp.full((1,), split.first_row, jnp.int32)), interpret)
    return lax.dynamic_update_slice(unsliced(whole), rest, (split.first_row, 0))


def _of_each_row(scale: jax.Array, shape: tuple[int, ...], block: Block) -> jax.Array:
    """Return float32 scales with an entry for each row."""
    each = spread(scale.astype(jnp.float32), (shape[0], 1), (block[0], None))
    return jnp.broadcast_to(each, (shape[0], scale.shape[1]))


def _of_columns(scale: jax.Array, plan: QuantizedPlan) -> jax.Array:
    """Return the scales of 1x128 blocks of columns as `[groups * steps, columns]`, with room for whole tiles."""
    of_steps = jnp.swapaxes(scale.astype(jnp.float32), 1, 2).reshape(-1, scale.shape[1])
    more_steps = plan.groups * plan.steps - len(of_steps)
    return jnp.pad(of_steps, ((0, more_steps), (0, plan.column_tiles * plan.tile_columns - scale.shape[1])))
