# SPDX-License-Identifier: Apache-2.0
"""The entry point: it makes the factors of rows and columns that the kernel reads, and launches it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._hopper.tile_shapes import ROWS
from ejkernel.kernels._varying import one_by_one
from ejkernel.kernels.quantized_matmul.common import QuantizedMatmulCall
from ejkernel.kernels.quantized_matmul.quantized import spread

from .plan import MosaicGpuParams, quantized_plan


def product(call: QuantizedMatmulCall, arrays: Any, params: MosaicGpuParams, *, interpret: Any = None) -> jax.Array:
    """Return the product.

    Args:
        call: The call.
        arrays: `x [m, k]`, `w [n, k]` and their scales, which do not vary along `k`.
        params: Launch parameters that `params_fault` accepts.
        interpret: `InterpretGPUParams` to simulate the kernel on a CPU; `None` runs it on a GPU.
    """

    def compute(x: jax.Array, w: jax.Array, x_scale: jax.Array, w_scale: jax.Array) -> jax.Array:
        from .kernel import multiply  # Mosaic GPU is not available in every environment

        plan = quantized_plan(call, params)
        with jax.enable_x64(False):  # the kernel counts in int32
            if call.rows < ROWS:
                x = jnp.pad(x, ((0, ROWS - call.rows), (0, 0)))
            rows = _factors(x_scale, call.rows, call.x_block, plan.rows + plan.tile_rows)
            columns = _factors(w_scale, call.columns, call.w_block, plan.columns + plan.tile_columns)
            sizes = jnp.full((1,), call.rows, jnp.int32)
            out = multiply(plan, x, w[None], sizes, rows, columns, interpret=interpret)
        return out[: call.rows, : call.columns]

    found: jax.Array = one_by_one(compute, *arrays)
    return found


def _factors(scale: jax.Array, size: int, block: Any, room: int) -> jax.Array:
    """Return a float32 factor for each row or column, with room behind them for tiles that read past the end."""
    each = spread(scale.astype(jnp.float32), (size, 1), block)[:, 0]
    return jnp.pad(jnp.broadcast_to(each, (size,)), (0, room - size))
