# SPDX-License-Identifier: Apache-2.0
"""The implementation `mosaic_gpu` of the groups' weight gradient: supported calls, search space and launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels import _hopper as hopper
from ejkernel.kernels._hopper.tile_shapes import tile_width
from ejkernel.kernels._varying import one_by_one
from ejkernel.kernels.grouped_matmul.common import Groups, clipped_sizes, row_spans, taken_apart
from ejkernel.kernels.grouped_matmul.mosaic_gpu.launch import table_of
from ejkernel.kernels.grouped_matmul.mosaic_gpu.plan import WgradParams
from ejkernel.kernels.quantized_matmul.grouped.common import QuantizedGroupedWgradCall
from ejkernel.kernels.quantized_matmul.quantizing.groups import whole_blocks
from ejkernel.ops.config.spaces.space import ConfigSpace
from ejkernel.ops.implementation import Implementation
from ejkernel.ops.utils.values.signature import is_known

from .padding import in_chunks
from .plan import MOST_SUMS, quantized_wgrad_plan

_WIDTHS = (64, 128, 192)  # of a tile: sums and accumulator of 256 columns do not fit in registers
_STAGES = {64: 8, 128: 6, 192: 4}  # by width: the most, if they fit
_OUT_DTYPES = (*hopper.DTYPES, "float32")
_MOST_GROUPS = 2**20


class MosaicGpuGroupedWgrad(Implementation[QuantizedGroupedWgradCall]):
    """The weight gradient of float8 columns in groups on Hopper GPUs."""

    name = "mosaic_gpu"
    params = WgradParams
    features = frozenset({"first_group"})

    def unsupported(self, call: QuantizedGroupedWgradCall) -> str | None:
        """Return why the kernel does not run the call, and an alternative; `None` if it does."""
        if not is_known(call.rows, call.groups, call.inner, call.columns):
            return "it needs static shapes, and this program is exported with symbolic ones; use 'xla'."
        if reason := hopper.unavailable(call, "both operands", "'xla'"):
            return reason
        if "int8" in (call.dtype, call.rhs_dtype):
            return f"lhs is {call.dtype} and rhs is {call.rhs_dtype}; it multiplies float8 blocks; use 'xla'."
        if call.out_dtype not in _OUT_DTYPES:
            return f"preferred_element_type is {call.out_dtype}; it supports {', '.join(_OUT_DTYPES)}; use 'xla'."
        if 0 in (call.rows, call.groups, call.inner, call.columns) or call.groups > _MOST_GROUPS:
            return "lhs or rhs is empty, or has more groups than the kernel counts; use 'xla'."
        return None

    def params_fault(self, call: QuantizedGroupedWgradCall, params: WgradParams) -> str | None:
        """Return why the call cannot run with these parameters; `None` if it can."""
        if params.block_k != 128 or params.block_n not in _WIDTHS:
            return f"block_k must be 128 and block_n 64, 128 or 192, got {params.block_k, params.block_n}."
        plan = quantized_wgrad_plan(call, params)
        if plan.shared_bytes() > hopper.SHARED_MEMORY:
            return f"it needs {plan.shared_bytes()} of {hopper.SHARED_MEMORY} bytes of shared memory."
        # Each tile starts at the first slot: with a remainder, a slot would be overwritten while it is copied.
        if plan.pieces % plan.out_slots:
            return f"out_slots must divide {plan.pieces}, the pieces in which a tile is stored, got {plan.out_slots}."
        if plan.sums_per_thread() > MOST_SUMS:
            return f"it needs {plan.sums_per_thread()} registers per thread for sums; {MOST_SUMS} leave enough."
        return None

    def heuristic(self, call: QuantizedGroupedWgradCall) -> WgradParams:
        """Return good parameters, with the most stages that fit."""
        block_n = tile_width(call.columns, _WIDTHS, call.groups * -(-call.inner // WgradParams().block_k))
        plan = quantized_wgrad_plan(call, WgradParams(block_n=block_n))
        out_slots = next(slots for slots in (2, 3, 1) if plan.pieces % slots == 0)
        deepest = [
            WgradParams(block_n=block_n, stages=stages, out_slots=out_slots)
            for stages in range(_STAGES[block_n], 1, -1)
        ]
        return next(params for params in deepest if self.params_fault(call, params) is None)

    def space(self, call: QuantizedGroupedWgradCall) -> ConfigSpace[WgradParams]:
        """Return the search space."""

        def fits(block_k: int, block_n: int, stages: int, out_slots: int) -> bool:
            params = WgradParams(block_k=block_k, block_n=block_n, stages=stages, out_slots=out_slots)
            return self.params_fault(call, params) is None

        axes = {
            "block_k": (128,),
            "block_n": tuple(size for size in _WIDTHS if size < call.columns + 64),
            "stages": (3, 4, 5, 6, 8),
            "panel": (2, 4, 8, 16, 32),
            "out_slots": (1, 2, 3, 4),
            "largest_first": (False, True),
            "snake": (False, True),
        }
        return ConfigSpace(axes, constraints=fits, build=WgradParams)

    def forward(self, call: QuantizedGroupedWgradCall, /, *args: Any, params: WgradParams) -> tuple[jax.Array, Any]:
        """Return the gradient, without residuals."""
        return weights_gradient(call, args, params), ()


def weights_gradient(
    call: QuantizedGroupedWgradCall, arrays: Sequence[Any], params: WgradParams, *, interpret: Any = None
) -> jax.Array:
    """Return the weight gradient of each group.

    Args:
        call: The call.
        arrays: `lhs [k, m]`, `rhs [n, m]`, groups, and both scales.
        params: Launch parameters that `params_fault` accepts.
        interpret: `InterpretGPUParams` to simulate the kernel on a CPU; `None` runs it on a GPU.
    """

    def compute(lhs: Any, rhs: Any, groups: Groups, lhs_scale: Any, rhs_scale: Any) -> jax.Array:
        from .wgrad import sum_products  # Mosaic GPU is not available in every environment

        plan = quantized_wgrad_plan(call, params)
        table = table_of(*_spans(call, groups), largest_first=params.largest_first)
        with jax.enable_x64(False):  # the kernel counts in int32
            # Our quantising kernel stores scales in this order, so the transposes cancel.
            scales = [in_chunks(scale.T) for scale in (lhs_scale, rhs_scale)]
            return sum_products(plan, lhs, rhs, table, *scales, interpret=interpret)[:, : call.inner, : call.columns]

    found: jax.Array = one_by_one(compute, *arrays)
    return found


def _spans(call: QuantizedGroupedWgradCall, groups: Groups) -> tuple[jax.Array, jax.Array]:
    """Return the starts and ends of the groups' rows; a group starts with a block."""
    starts, ends = row_spans(whole_blocks(groups, call.rows), call.rows, call.groups)
    sizes, first = taken_apart(groups)
    own = clipped_sizes(sizes, call.rows)
    if first is not None:  # groups without a size have no blocks
        own = own[jnp.clip(first + jnp.arange(call.groups), 0, len(own) - 1)]
    return starts, jnp.minimum(starts + own, ends)
