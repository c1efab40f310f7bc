# SPDX-License-Identifier: Apache-2.0
"""The implementation `mosaic_gpu` of activations: supported calls, heuristics and search space."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ejkernel.kernels import _hopper as hopper
from ejkernel.kernels._hopper.tile_shapes import row_tiles, tile_width
from ejkernel.kernels.quantized_matmul.common import QuantizedMatmulCall
from ejkernel.kernels.quantized_matmul.grouped.common import QuantizedGroupedActivationCall
from ejkernel.kernels.quantized_matmul.quantizing.common import BLOCK
from ejkernel.ops.config.spaces.space import ConfigSpace

from . import launch
from .implementation import QuantizedProduct, groups_reason, register_fault
from .plan import ActivatedPlan, MosaicGpuParams, activated_plan

_VALUES = ("float8_e4m3fn", "float8_e5m2")
_MOST_STAGES = 8


class MosaicGpuActivation(QuantizedProduct[QuantizedGroupedActivationCall]):
    """The activation of the product of groups on Hopper GPUs, in 8 bits or wide."""

    features = frozenset({"activation", "gate", "row_scale", "first_group"})
    # `quantized_matmul` runs its epilogues as those of one group.
    names = ("lhs (x)", "rhs (w)", "transpose_rhs (transpose_w)")

    def dense(self, call: QuantizedGroupedActivationCall) -> QuantizedMatmulCall:
        """See `QuantizedProduct`."""
        return call.as_dense

    def plan(self, call: QuantizedGroupedActivationCall, params: MosaicGpuParams) -> ActivatedPlan:
        """See `QuantizedProduct`."""
        return activated_plan(call, params)

    def unsupported(self, call: QuantizedGroupedActivationCall) -> str | None:
        """See `QuantizedProduct`."""
        if reason := super().unsupported(call) or groups_reason(call):
            return reason
        if call.values not in (*_VALUES, None):
            return f"quantize is {call.values}; 'mosaic_gpu' returns {' or '.join(_VALUES)}; use 'xla'."
        if call.values is not None and self.is_wide(call):
            return (
                f"lhs has dtype {call.dtype}; with quantize, 'mosaic_gpu' needs 8-bit rows; quantize lhs, or use 'xla'."
            )
        dense = call.as_dense
        if not dense.scales_outside and dense.w_block != (BLOCK, BLOCK):
            return f"scales of rhs (w) are those of blocks {dense.w_block}; with an activation, use 128x128, or 'xla'."
        return None

    def few_rows(self, call: QuantizedGroupedActivationCall) -> bool:
        """See `QuantizedProduct`."""
        return call.values is None and super().few_rows(call)

    def tile_fault(self, call: QuantizedGroupedActivationCall, params: MosaicGpuParams) -> str | None:
        """See `QuantizedProduct`."""
        widths = self._widths(call)
        if params.block_m != 128 or params.block_n not in widths:
            return f"block_m must be 128 and block_n one of {widths}, got {params.block_m, params.block_n}."
        plan = self.plan(call, params)
        if plan.shared_bytes() > hopper.SHARED_MEMORY:
            return f"it needs {plan.shared_bytes()} of {hopper.SHARED_MEMORY} bytes of shared memory."
        if plan.pieces % params.out_slots:
            return f"out_slots must divide {plan.pieces}, the blocks in which a tile is stored, got {params.out_slots}."
        if plan.promoted > params.stages:
            return f"stages must be at least {plan.promoted}, got {params.stages}."
        return register_fault(plan)

    def tile_heuristic(self, call: QuantizedGroupedActivationCall) -> MosaicGpuParams:
        """Return good parameters, with the most stages that fit."""
        rows = row_tiles(call.own_rows, call.groups, MosaicGpuParams().block_m)
        block_n = tile_width(call.columns, self._widths(call), rows)
        deepest = [
            MosaicGpuParams(block_n=block_n, stages=stages, out_slots=1) for stages in range(_MOST_STAGES, 1, -1)
        ]
        return next(params for params in deepest if self.tile_fault(call, params) is None)

    def tile_space(self, call: QuantizedGroupedActivationCall) -> Collection[MosaicGpuParams]:
        """See `QuantizedProduct`."""

        def build(chosen: dict[str, Any]) -> MosaicGpuParams:
            return MosaicGpuParams(**chosen, out_slots=1)

        def fits(block_n: int, stages: int) -> bool:
            return self.tile_fault(call, build({"block_n": block_n, "stages": stages})) is None

        axes = {"block_n": self._widths(call), "stages": (3, 4, 5, 6), "panel": (2, 4, 8, 16, 32)}
        return ConfigSpace(axes, constraints=fits, build=build)

    def forward(self, call: QuantizedGroupedActivationCall, /, *args: Any, params: MosaicGpuParams) -> tuple[Any, Any]:
        """Return numbers and scales, or one array, without residuals."""
        found = launch.grouped_activation(call, args, params)
        return tuple(found) if call.values is not None else found[0], ()

    def _widths(self, call: QuantizedGroupedActivationCall) -> tuple[int, ...]:
        """Return the widths of tiles: whole blocks of the result, with sums that fit in registers."""
        return (BLOCK,) if call.gated or not call.as_dense.scales_outside else (BLOCK, 2 * BLOCK)
