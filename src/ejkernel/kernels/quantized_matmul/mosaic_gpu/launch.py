# SPDX-License-Identifier: Apache-2.0
"""The entry point: it arranges scales as the kernels read them, and launches these."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._hopper.backend import backend_for
from ejkernel.kernels._hopper.tile_shapes import ROWS, padded
from ejkernel.kernels._varying import one_by_one
from ejkernel.kernels.grouped_matmul.mosaic_gpu.tiles import run_kernel
from ejkernel.kernels.quantized_matmul.common import QuantizedMatmulCall
from ejkernel.kernels.quantized_matmul.quantized import spread

from .plan import SCALES, STEP, MosaicGpuParams, QuantizedPlan, quantized_plan


def product(call: QuantizedMatmulCall, arrays: Any, params: MosaicGpuParams, *, interpret: Any = None) -> jax.Array:
    """Return the product.

    Args:
        call: The call.
        arrays: `x [m, k]`, `w [n, k]` and their scales.
        params: Launch parameters that `params_fault` accepts.
        interpret: `InterpretGPUParams` to simulate the kernel on a CPU; `None` runs it on a GPU.
    """

    def compute(x: jax.Array, w: jax.Array, x_scale: jax.Array, w_scale: jax.Array) -> jax.Array:
        # Mosaic GPU is not available in every environment.
        from .blocks import BlocksKernel
        from .kernel import QuantizedKernel

        plan = quantized_plan(call, params)
        with jax.enable_x64(False):  # the kernel counts in int32
            if call.rows < ROWS:
                x = jnp.pad(x, ((0, ROWS - call.rows), (0, 0)))
            operands = x, w[None], jnp.full((1,), call.rows, jnp.int32)
            if plan.blocks:
                kernel: Any = BlocksKernel(plan, backend_for(interpret))
                scales = _of_rows(x_scale, plan), _of_tiles(w_scale, plan)
            else:
                kernel = QuantizedKernel(plan, backend_for(interpret))
                rows = _factors(x_scale, call.rows, call.x_block, plan.rows + plan.tile_rows)
                scales = rows, _factors(w_scale, call.columns, call.w_block, plan.columns + plan.tile_columns)
            [out] = run_kernel(kernel, (*operands, *scales), (plan.rows, plan.columns), name="quantized_matmul")
        return out[: call.rows, : call.columns]

    found: jax.Array = one_by_one(compute, *arrays)
    return found


def _factors(scale: jax.Array, size: int, block: Any, room: int) -> jax.Array:
    """Return a float32 factor for each row or column, with room behind them for tiles that read past the end."""
    each = spread(scale.astype(jnp.float32), (size, 1), block)[:, 0]
    return jnp.pad(jnp.broadcast_to(each, (size,)), (0, room - size))


def _of_rows(scale: jax.Array, plan: QuantizedPlan) -> jax.Array:
    """Return the scales of 1x128 blocks as `[steps, rows]`, so that those of a tile's step lie together."""
    room = padded(plan.rows + plan.scale_rows, 4) - scale.shape[0]
    return jnp.pad(scale.astype(jnp.float32).T, ((0, 0), (0, room)))


def _of_tiles(scale: jax.Array, plan: QuantizedPlan) -> jax.Array:
    """Return the scales of 128x128 blocks as `[steps, tiles, 32]`: those of a tile's columns, from the first on."""
    first = jnp.arange(plan.column_tiles) * plan.tile_columns // STEP
    at = jnp.minimum(first[:, None] + jnp.arange(SCALES), scale.shape[0] - 1)
    return scale.astype(jnp.float32).T[:, at]
