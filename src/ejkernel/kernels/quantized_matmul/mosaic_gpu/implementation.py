# SPDX-License-Identifier: Apache-2.0
"""The implementation `mosaic_gpu`: supported calls, heuristics and search space."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel.kernels import _hopper as hopper
from ejkernel.kernels._hopper.tile_shapes import REGISTERS
from ejkernel.kernels.quantized_matmul.common import QuantizedMatmulCall
from ejkernel.ops.config.spaces.space import ConfigSpace
from ejkernel.ops.implementation import Implementation
from ejkernel.ops.utils.values.signature import is_known

from . import launch
from .plan import STEP, MosaicGpuParams, QuantizedPlan, quantized_plan

_OUT_DTYPES = (*hopper.DTYPES, "float32")
_MOST_SUMS = 192  # registers per thread, of 232, for sums and an accumulator
_LARGEST = 2**31 - 2**16  # rows and tiles are counted in int32
_LONGEST = 2**31 // 127**2  # products of int8 numbers whose sum fits in int32
_BLOCKS = ((1, STEP), (STEP, STEP))
_ROW_TILE = 8  # rows of a tile of shared memory
_WIDTHS = (64, 128, 192, 256)
_STAGES = {64: 8, 128: 6, 192: 4, 256: 4}  # by columns of a tile: about as many as shared memory holds


class MosaicGpu(Implementation[QuantizedMatmulCall]):
    """The product of two 8-bit operands with scales of rows and columns, or of blocks, on Hopper GPUs."""

    name = "mosaic_gpu"
    params = MosaicGpuParams

    def unsupported(self, call: QuantizedMatmulCall) -> str | None:
        """Return why the kernel does not run the call, and an alternative; `None` if it does."""
        if not is_known(call.rows, call.inner, call.columns):
            return "it needs static shapes, and this program is exported with symbolic ones; use 'xla'."
        return hopper.unavailable(call, "both operands", "'xla'") or _operands_reason(call) or _shape_reason(call)

    def params_fault(self, call: QuantizedMatmulCall, params: MosaicGpuParams) -> str | None:
        """Return why the call cannot run with these parameters; `None` if it can."""
        plan = quantized_plan(call, params)
        if plan.shared_bytes() > hopper.SHARED_MEMORY:
            return f"it needs {plan.shared_bytes()} of {hopper.SHARED_MEMORY} bytes of shared memory."
        # Each tile starts at the first slot: with a remainder, a slot would be overwritten while it is copied.
        if plan.pieces % plan.out_slots:
            return f"out_slots must divide {plan.pieces}, the pieces in which a tile is stored, got {plan.out_slots}."
        if fault := _register_fault(plan):
            return fault
        if plan.blocks and (params.block_m, plan.parts) != (128, 1):
            return f"blocks' scales need block_m=128 and block_n of at most 192, got {params.block_m, params.block_n}."
        # While sums are promoted, the stages of a chunk are held together.
        if plan.promoted > params.stages:
            return f"stages must be at least {plan.promoted}, got {params.stages}."
        return None

    def heuristic(self, call: QuantizedMatmulCall) -> MosaicGpuParams:
        """Return good parameters: the widest tile that wastes few columns in the last one."""
        # Two parts with blocks' scales spill registers.
        widths = _WIDTHS if call.scales_outside else _WIDTHS[:-1]
        waste = {size: -(-call.columns // size) * size for size in widths}
        block_n = max(size for size, covered in waste.items() if covered <= 1.1 * min(waste.values()))
        pieces = quantized_plan(call, MosaicGpuParams(block_n=block_n)).pieces
        out_slots = next(slots for slots in (2, 3, 1) if pieces % slots == 0)
        # Blocks' scales take shared memory, too.
        stages = _STAGES[block_n] - (block_n == 128 and not call.scales_outside)
        return MosaicGpuParams(block_n=block_n, stages=stages, out_slots=out_slots)

    def space(self, call: QuantizedMatmulCall) -> ConfigSpace[MosaicGpuParams]:
        """Return the search space."""

        def fits(block_m: int, block_n: int, stages: int, out_slots: int) -> bool:
            params = MosaicGpuParams(block_m=block_m, block_n=block_n, stages=stages, out_slots=out_slots)
            return self.params_fault(call, params) is None

        axes = {
            "block_m": (128, 256),
            "block_n": tuple(size for size in _WIDTHS if size < call.columns + 64),
            "stages": (3, 4, 5, 6, 8, 10),
            "panel": (2, 4, 8, 16, 32),
            "out_slots": (1, 2, 3, 4),
        }
        return ConfigSpace(axes, constraints=fits, build=MosaicGpuParams)

    def forward(self, call: QuantizedMatmulCall, /, *args: Any, params: MosaicGpuParams) -> tuple[jax.Array, Any]:
        """Return the product, without residuals."""
        return launch.product(call, args, params), ()


def _register_fault(plan: QuantizedPlan) -> str | None:
    sums = plan.sums_per_thread()
    if sums > _MOST_SUMS:
        return f"it needs {sums} of {REGISTERS.consumer} registers per thread for sums; {_MOST_SUMS} leave enough."
    if not plan.promoted and sums > 128:
        return f"one accumulator has at most 128 registers per thread, got {sums}; use smaller tiles."
    return None


def _operands_reason(call: QuantizedMatmulCall) -> str | None:
    if not call.is_narrow or (call.x_dtype == "int8") != (call.w_dtype == "int8"):
        return (
            f"x is {call.x_dtype} and w is {call.w_dtype}; 'mosaic_gpu' multiplies two float8 or two int8 operands; "
            "quantise both, or use 'xla'."
        )
    if not call.scales_outside and ((call.x_block, call.w_block) != _BLOCKS or call.is_integer):
        return (
            f"scales vary along k in blocks {call.x_block} of {call.x_dtype} and {call.w_block}; 'mosaic_gpu' has "
            "float8 blocks of 1x128 by 128x128; quantise whole rows, or use 'xla'."
        )
    if not call.transpose_w:
        return "w is [k, n]; 'mosaic_gpu' reads 8-bit numbers along k: pass [n, k] with transpose_w=True, or use 'xla'."
    if call.out_dtype not in _OUT_DTYPES:
        return f"preferred_element_type is {call.out_dtype}; 'mosaic_gpu' supports {', '.join(_OUT_DTYPES)}; use 'xla'."
    return None


def _shape_reason(call: QuantizedMatmulCall) -> str | None:
    if 0 in (call.rows, call.inner, call.columns):
        return "x or w is empty; use 'xla'."
    if call.inner % STEP or call.columns % _ROW_TILE:
        return (
            f"k must be a multiple of {STEP} and n of {_ROW_TILE} for 'mosaic_gpu', got k={call.inner} and "
            f"n={call.columns}; pad both operands, or use 'xla'."
        )
    if max(call.rows, call.inner, call.columns) > _LARGEST:
        return f"it supports at most {_LARGEST} rows and columns; use 'xla'."
    if call.is_integer and call.inner > _LONGEST:
        return f"sums of int8 products are int32, which may overflow where k exceeds {_LONGEST}; use 'xla'."
    return None
