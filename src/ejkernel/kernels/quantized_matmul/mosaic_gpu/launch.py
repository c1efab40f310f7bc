# SPDX-License-Identifier: Apache-2.0
"""The entry points: they arrange operands and scales as the kernels read them, and launch these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels._hopper.backend import backend_for
from ejkernel.kernels._hopper.tile_shapes import ROWS, padded
from ejkernel.kernels._varying import one_by_one
from ejkernel.kernels.grouped_matmul.mosaic_gpu.launch import sizes_for
from ejkernel.kernels.grouped_matmul.mosaic_gpu.tiles import run_kernel
from ejkernel.kernels.quantized_matmul.common import QuantizedMatmulCall
from ejkernel.kernels.quantized_matmul.grouped.common import QuantizedGroupedActivationCall, QuantizedGroupedMatmulCall
from ejkernel.kernels.quantized_matmul.quantized import Block, spread

from .plan import (
    CHUNK,
    FEW_ROWS,
    HALF,
    ROW_TILE,
    FewRowsPlan,
    MosaicGpuParams,
    QuantizedPlan,
    activated_plan,
    few_rows_plan,
    grouped_plan,
    quantized_plan,
)


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
            return _few_rows(call, params, (x, w, *factors, w_scale), interpret)
        [x_scale] = factors
        sizes = jnp.full((1,), call.rows, jnp.int32)
        operands = _Operands(x, w[None], sizes, x_scale, w_scale[None], *blocks)
        return _multiplied(quantized_plan(call, params), operands, interpret)[: call.rows, : call.columns]

    found: jax.Array = one_by_one(compute, *(array for array in arrays if array is not None))
    return found


def _few_rows(
    call: QuantizedMatmulCall, params: MosaicGpuParams, arrays: Sequence[jax.Array], interpret: Any
) -> jax.Array:
    """Return the product of at most 64 rows."""
    from .few_rows import multiply  # Mosaic GPU is not available in every environment

    plan, (x, w, *x_scale, w_scale) = few_rows_plan(call, params), arrays
    with jax.enable_x64(False):  # the kernel counts in int32
        columns = call.columns
        if plan.wide:
            x, of_rows = _fitting(x, plan)
        else:
            of_rows = _factors(x_scale[0], (call.rows,), call.x_block or (), ROWS)
        of_columns = _factors(w_scale, (columns,), call.w_block or (), plan.factors)
        x, w = (_padded(array, (_whole_tiles(len(array)), plan.inner)) for array in (x, w))
        if plan.wide:
            x = x.reshape(len(x), -1, HALF // 2, 2, 2).swapaxes(2, 3).reshape(x.shape)
        return multiply(plan, x, w, of_rows, of_columns, interpret=interpret)[:, :columns]


def _whole_tiles(size: int) -> int:
    """Return the rows of an array that copies of tiles can read: whole tiles, or less than one."""
    return size if size < ROW_TILE else padded(size, ROW_TILE)


def _fitting(x: jax.Array, plan: FewRowsPlan) -> tuple[jax.Array, Any]:
    """Return rows in the dtype of the products, and factors, those of the rows first.

    The factors are powers of two: in float16 a row loses digits only of
    numbers that are 2**28 times smaller than its largest.
    """
    if x.dtype == plan.dtype:
        # A constant with a zero at the end: XLA would run a kernel to make equal numbers.
        return x, np.where(np.arange(2 * ROWS) < len(x), plan.divisor, 0).astype(np.float32)
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=1)
    exponent = lax.bitcast_convert_type(largest, jnp.int32) & 0x7F800000
    power = jnp.maximum(lax.bitcast_convert_type(exponent, jnp.float32), 2.0**-100)
    power = jnp.where(jnp.isfinite(largest), power, 1.0) * 2.0**-14
    return (wide / power[:, None]).astype(plan.dtype), jnp.pad(power, (0, ROWS - len(x)))


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

    def compute(lhs: Any, rhs: Any, groups: Any, lhs_scale: Any, rhs_scale: Any, *more: Any) -> list[jax.Array]:
        from .activated import activated  # Mosaic GPU is not available in every environment

        plan, sizes = activated_plan(call, params), sizes_for(call, groups)
        columns = call.columns
        with jax.enable_x64(False):  # the kernel counts in int32
            x = _padded(lhs, (plan.rows, plan.inner))
            shape = (call.groups, padded(columns, ROW_TILE), plan.inner)
            pairs = [(rhs, rhs_scale), *more[: call.gated]]
            matrices, scales = [_padded(w, shape) for w, _ in pairs], [scale for _, scale in pairs]
            if plan.blocks:
                factors = [_along(scale) for scale in (lhs_scale, *scales)]
            else:
                of_rows = _factors(lhs_scale, (call.rows,), lhs_block, plan.rows + plan.tile_rows)
                of_columns = [_factors(each, (call.groups, columns), rhs_block, plan.factors) for each in scales]
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
        x = _padded(given.x, (plan.rows, plan.inner))
        w = _padded(given.w, (groups, padded(columns, ROW_TILE), plan.inner))
        if plan.blocks:
            kernel: Any = BlocksKernel(plan, backend_for(interpret))
            scales = _along(given.x_scale), _of_columns(given.w_scale, plan) if plan.thin else _along(given.w_scale)
        else:
            kernel = QuantizedKernel(plan, backend_for(interpret))
            of_rows = _factors(given.x_scale, (rows,), given.x_block, plan.rows + plan.tile_rows)
            of_columns = _factors(given.w_scale, (groups, columns), given.w_block, plan.factors)
            scales = of_rows, of_columns
        arrays = x, w, given.sizes, *scales
        [out] = run_kernel(kernel, arrays, (plan.rows, plan.columns), name="quantized_matmul")
    return out


def _padded(array: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Return an array with zeros behind it."""
    added = [(0, wanted - size) for wanted, size in zip(shape, array.shape, strict=True)]
    return jnp.pad(array, added) if any(more for _, more in added) else array


def _factors(scale: jax.Array, shape: tuple[int, ...], block: Block, room: int) -> jax.Array:
    """Return float32 factors of rows or of each group's columns, with room behind them for tiles that end later."""
    each = spread(scale.astype(jnp.float32), (*shape, 1), block)[..., 0]
    added = [(0, 0)] * (len(shape) - 1) + [(0, room - shape[-1])]
    return jnp.pad(jnp.broadcast_to(each, shape), added).reshape(-1)


def _of_each_row(scale: jax.Array, shape: tuple[int, ...], block: Block) -> jax.Array:
    """Return float32 scales with an entry for each row."""
    each = spread(scale.astype(jnp.float32), (shape[0], 1), (block[0], None))
    return jnp.broadcast_to(each, (shape[0], scale.shape[1]))


def _along(scale: jax.Array) -> jax.Array:
    """Return float32 scales that copies of four along `k` can read."""
    more = padded(scale.shape[-1], CHUNK) - scale.shape[-1]
    return _padded(scale.astype(jnp.float32), (*scale.shape[:-1], scale.shape[-1] + more))


def _of_columns(scale: jax.Array, plan: QuantizedPlan) -> jax.Array:
    """Return the scales of 1x128 blocks of columns as `[groups * steps, columns]`, with room for whole tiles."""
    of_steps = jnp.swapaxes(scale.astype(jnp.float32), 1, 2).reshape(-1, scale.shape[1])
    return jnp.pad(of_steps, ((0, 0), (0, plan.column_tiles * plan.tile_columns - scale.shape[1])))
