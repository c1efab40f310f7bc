# SPDX-License-Identifier: Apache-2.0
"""RMS normalisation with a result in 8 bits by our kernel for Hopper GPUs: supported calls and launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from ejkernel.kernels._row_norms import implementation
from ejkernel.kernels._row_norms.launch import folded
from ejkernel.kernels._row_norms.plan import RowNormParams
from ejkernel.kernels.quantized_matmul.quantizing.common import BLOCK
from ejkernel.ops.implementation import Implementation
from ejkernel.ops.utils.values.signature import is_known

from .operation import QuantizedRmsNormCall
from .plan import QuantizedRowPlan, row_plan

_WHOLE = 4 * BLOCK  # elements that a warpgroup quantises at once: a block for each warp


class MosaicGpu(implementation.MosaicGpu[QuantizedRmsNormCall]):
    """The implementation for Hopper GPUs."""

    residuals = Implementation.residuals
    backward = Implementation.backward

    def unsupported(self, call: QuantizedRmsNormCall) -> str | None:
        """See `MosaicGpu`."""
        if is_known(call.dim) and call.dim % _WHOLE:
            return f"x has rows of {call.dim} elements; 'mosaic_gpu' quantises multiples of {_WHOLE}; use 'xla'."
        if call.values == "int8":
            return "quantize is int8; 'mosaic_gpu' makes float8; use 'xla'."
        return super().unsupported(call)

    def preference(self, call: QuantizedRmsNormCall) -> int:
        """Return 0: XLA reads the rows again for the scales."""
        return 0

    def _plan(self, call: QuantizedRmsNormCall, params: RowNormParams) -> QuantizedRowPlan:
        return row_plan(call, params, call.rows)

    def forward(self, call: QuantizedRmsNormCall, /, *args: Any, params: RowNormParams) -> tuple[Any, Any]:
        """Return the results, without residuals."""
        return normalized(call, args, params), ()


def normalized(
    call: QuantizedRmsNormCall, args: Sequence[Any], params: RowNormParams, *, interpret: Any = None
) -> tuple[jax.Array, ...]:
    """Return the results of a call, as the operation says.

    Args:
        call: The call.
        args: `x`, the weight or `None`, and the residual if the call has one.
        params: Launch parameters that `params_fault` accepts.
        interpret: `InterpretGPUParams` to simulate the kernel on a CPU; `None` runs it on a GPU.
    """
    x, weight, *residual = args
    count = 1 + len(residual)

    def compute(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        from .kernel import normalize_rows  # Mosaic GPU is not available in every environment

        shape = arrays[0].shape
        plan = row_plan(call, params, arrays[0].size // call.dim)
        values, *sums, scale = normalize_rows(plan, arrays[:count], arrays[count:], interpret=interpret)
        return values.reshape(shape), scale.reshape(*shape[:-1], -1), *(x.reshape(shape) for x in sums)

    vectors = [] if weight is None else [weight]
    found: tuple[jax.Array, ...] = folded(compute, count)(x, *residual, *vectors)
    return found
