# SPDX-License-Identifier: Apache-2.0
"""The implementation `mosaic_gpu`: supported calls, and the search space."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel.kernels import _hopper as hopper
from ejkernel.kernels._varying import one_by_one
from ejkernel.ops.implementation import Implementation
from ejkernel.ops.utils.values.signature import is_known

from .common import BLOCK, QuantizeCall
from .groups import blocks_of
from .plan import QuantizeParams, quantizing_plan

_COPIED = 16  # bytes between the rows that a copy addresses


class MosaicGpu(Implementation[QuantizeCall]):
    """One pass over the matrix on Hopper GPUs."""

    name = "mosaic_gpu"
    params = QuantizeParams
    features = frozenset({"group_sizes"})

    def unsupported(self, call: QuantizeCall) -> str | None:
        """Return why the kernel does not run the call, and an alternative; `None` if it does."""
        if not is_known(call.rows, call.columns):
            return "it needs static shapes, and this program is exported with symbolic ones; use 'xla'."
        if reason := hopper.unavailable(call, "x", "'xla'"):
            return reason
        if call.dtype not in hopper.DTYPES or call.values == "int8":
            return f"it quantises bfloat16 and float16 to float8, got {call.dtype} to {call.values}; use 'xla'."
        sizes = (call.rows, call.columns) if call.transposed and call.groups is None else (call.columns,)
        if 0 in (call.rows, call.columns) or any(size % _COPIED for size in sizes):
            return f"its copies need sizes that {_COPIED} divides, and x is {call.rows} x {call.columns}; use 'xla'."
        return None if call.rows * call.columns < 2**38 else "it counts tiles in int32; use 'xla'."

    def params_fault(self, call: QuantizeCall, params: QuantizeParams) -> str | None:
        """Return why the call cannot run with these parameters; `None` if it can."""
        needed = params.blocks * quantizing_plan(call, params).shared_bytes()
        if needed > hopper.SHARED_MEMORY:
            return f"its blocks need {needed} of {hopper.SHARED_MEMORY} bytes of shared memory."
        return None

    def space(self, call: QuantizeCall) -> list[QuantizeParams]:
        """Return all parameters that fit, the default first."""
        found = [QuantizeParams(tiles=tiles, blocks=blocks) for tiles in range(1, 5) for blocks in range(1, 5)]
        fitting = [params for params in found if self.params_fault(call, params) is None]
        return sorted(fitting, key=lambda params: params != self.heuristic(call))

    def forward(self, call: QuantizeCall, /, *args: Any, params: QuantizeParams) -> tuple[Any, Any]:
        """Return the results, without residuals."""
        return quantized(call, args, params), ()


def quantized(call: QuantizeCall, arrays: tuple[Any, ...], params: QuantizeParams, *, interpret: Any = None) -> Any:
    """Return the results of a call, as the operation says.

    Args:
        call: The call.
        arrays: The array, and the sizes of groups if the call has any.
        params: Launch parameters that `params_fault` accepts.
        interpret: `InterpretGPUParams` to simulate the kernel on a CPU; `None` runs it on a GPU.
    """
    plan, sizes = quantizing_plan(call, params), (call.rows, call.columns)

    def compute(x: jax.Array, *group_sizes: jax.Array) -> tuple[jax.Array, ...]:
        # Mosaic GPU is not available in every environment.
        from .grouped_kernel import quantized_groups
        from .kernel import quantized_blocks

        lead, rows = x.shape[:-1], x.reshape(sizes)
        with jax.enable_x64(False):  # the kernels count in int32
            if group_sizes:
                found = quantized_groups(plan, rows, blocks_of(group_sizes[0], call.rows), interpret=interpret)
                found[3] = found[3].T
            else:
                found = quantized_blocks(plan, rows, interpret=interpret)
        kept = call.rows, -(-call.columns // BLOCK) if call.square else call.columns
        scales = [scale[:size] for scale, size in zip(found[1::2], kept, strict=False)]
        results = [found[0].reshape(x.shape), scales[0].reshape(*lead, -1), *found[2:3], *scales[1:]]
        return tuple(results)

    return one_by_one(compute, *(array for array in arrays if array is not None))
