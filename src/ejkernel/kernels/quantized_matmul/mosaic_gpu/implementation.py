# SPDX-License-Identifier: Apache-2.0
"""The implementations `mosaic_gpu`: supported calls, heuristics and search space."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any, Generic, TypeVar

import jax

from ejkernel.kernels import _hopper as hopper
from ejkernel.kernels._hopper.device import MULTIPROCESSORS
from ejkernel.kernels._hopper.tile_shapes import REGISTERS, row_tiles, tile_width
from ejkernel.kernels.quantized_matmul.common import LONGEST_INT8, QuantizedMatmulCall
from ejkernel.kernels.quantized_matmul.grouped.common import QuantizedGroupedMatmulCall
from ejkernel.ops.config.spaces.space import ConfigSpace
from ejkernel.ops.implementation import Implementation, OperationCall
from ejkernel.ops.utils.values.signature import is_known

from . import launch
from .few_rows_plan import FewRowsPlan, few_rows_plan
from .plan import (
    FEW_ROWS,
    MOST_SUMS,
    STEP,
    MosaicGpuParams,
    QuantizedPlan,
    grouped_plan,
    quantized_plan,
    split_plan,
)
from .splits import SPLITS, estimated, fastest, is_promising

_OUT_DTYPES = (*hopper.DTYPES, "float32")
_LARGEST = 2**31 - 2**16  # rows and tiles are counted in int32
_BLOCKS = (((1, STEP), (STEP, STEP)), ((1, STEP), (1, STEP)))
_WIDTHS = (64, 128, 192, 256)
_STAGES = {64: 8, 128: 6, 192: 4, 256: 4}  # by columns of a tile: the most, if they fit
# Bytes that few rows have in flight per multiprocessor, by whether they are wide.
_IN_FLIGHT = {False: 160 * 1024, True: 200 * 1024}
# Bytes of the matrices among these, without groups: with more, 8 to 32 rows took up to 4 % longer on one H200.
_MATRIX_IN_FLIGHT = 144 * 1024
# Microseconds of a step of 128 rows, by whether no scale varies along `k`, and by columns; of a step of few rows.
_STEP_US = {True: {64: 0.22, 128: 0.4, 192: 0.54, 256: 0.68}, False: {64: 0.31, 128: 0.48, 192: 0.66}}
_FEW_ROWS_STEP = 0.15
_MOST_SUMS = 1 << 30  # bytes of the sums of splits
_FEW_ROUNDS = 8  # of tiles: in more, the last one takes little of the time
_MOST_GROUPS = 4096  # the tile scheduler of every thread walks over all groups
_Call = TypeVar("_Call", bound=OperationCall)


class QuantizedProduct(Implementation[_Call], Generic[_Call]):
    """The base of the dense and the grouped product, and of its activation."""

    name = "mosaic_gpu"
    params = MosaicGpuParams
    names = ("x", "w", "transpose_w")  # of both operands and of the option in messages

    def dense(self, call: _Call) -> QuantizedMatmulCall:
        """Return the product of all rows with one matrix."""
        raise NotImplementedError

    def plan(self, call: _Call, params: MosaicGpuParams) -> QuantizedPlan:
        """Return the plan of a launch."""
        raise NotImplementedError

    def few_rows(self, call: _Call) -> bool:
        """Return whether the kernel for few rows may run a supported call."""
        return self.is_wide(call)

    def is_wide(self, call: _Call) -> bool:
        """Return whether few rows of 16 bits meet 8-bit matrices."""
        dense = self.dense(call)
        return dense.x_dtype in hopper.DTYPES and dense.w_block is not None and self.has_few_rows(call)

    def has_few_rows(self, call: _Call) -> bool:
        """Return whether there are at most 64 rows for each matrix, on average, and no scale varies along `k`."""
        dense, groups = self.dense(call), getattr(call, "groups", 1)
        return dense.scales_outside and is_known(dense.rows, groups) and dense.rows <= FEW_ROWS * groups

    def unsupported(self, call: _Call) -> str | None:
        """Return why the kernel does not run the call, and an alternative; `None` if it does."""
        dense = self.dense(call)
        if self.is_wide(call):
            # Apart from the dtype of its rows, a call with few rows of 16 bits is supported like one with 8-bit rows.
            dense = dataclasses.replace(dense, x_dtype=dense.w_dtype, x_block=(1, None))
        if not is_known(dense.rows, dense.inner, dense.columns):
            return "it needs static shapes, and this program is exported with symbolic ones; use 'xla'."
        return (
            hopper.unavailable(call, "both operands", "'xla'")
            or _operands_reason(dense, *self.names)
            or _shape_reason(dense, *self.names[:2])
        )

    def params_fault(self, call: _Call, params: MosaicGpuParams) -> str | None:
        """Return why the call cannot run with these parameters; `None` if it can."""
        if params.block_m != FEW_ROWS:
            wide = f"block_m must be {FEW_ROWS} for rows of 16 bits, got {params.block_m}."
            return wide if self.is_wide(call) else self.tile_fault(call, params) or self.splits_fault(call, params)
        if not self.few_rows(call):
            rows = self.dense(call).rows
            return f"block_m={FEW_ROWS} is for at most {FEW_ROWS} rows with a scale each, got {rows}."
        return self.splits_fault(call, params) or _few_rows_fault(few_rows_plan(call, params))

    def splits_fault(self, call: _Call, params: MosaicGpuParams) -> str | None:
        """Return why blocks of threads cannot share tiles as the parameters say; `None` if they can."""
        dense, splits = self.dense(call), params.splits
        if splits == 1:
            return None
        if dense != call or self.is_wide(call):
            return f"splits must be 1 for groups, activations and rows of 16 bits, got {splits}."
        if params.block_m == FEW_ROWS:
            found, rows, fault = few_rows_plan(call, params).splits, dense.rows, None
        else:
            plan = self.plan(call, params)
            if plan.whole_rows >= plan.rows:
                return f"splits must be 1 where tiles fill rounds of {plan.programs} blocks of threads, got {splits}."
            split = split_plan(plan, splits)
            found, rows, fault = split.splits, split.own_rows, _memory_fault(split)
        if (needed := 4 * found * rows * dense.columns) > _MOST_SUMS:
            return f"splits={splits} needs {needed} bytes for sums, and may have {_MOST_SUMS}; use fewer."
        if 2 * found <= splits:
            return f"splits must leave each part some of the steps of k, which suffice for {found}, got {splits}."
        return fault

    def tile_fault(self, call: _Call, params: MosaicGpuParams) -> str | None:
        """Return why a launch with tiles of 128 or 256 rows cannot have these parameters; `None` if it can."""
        if params.block_n not in _WIDTHS:
            return f"block_m, block_n must be 128 or 256 and a multiple of 64, got {params.block_m, params.block_n}."
        plan = self.plan(call, params)
        if fault := _memory_fault(plan):
            return fault
        # Each tile starts at the first slot: with a remainder, a slot would be overwritten while it is copied.
        if plan.pieces % plan.out_slots:
            return f"out_slots must divide {plan.pieces}, the pieces in which a tile is stored, got {plan.out_slots}."
        if fault := register_fault(plan):
            return fault
        if plan.blocks and (params.block_m, plan.parts) != (128, 1):
            return f"blocks' scales need block_m=128 and block_n of at most 192, got {params.block_m, params.block_n}."
        # While sums are promoted, the stages of a chunk are held together.
        if plan.promoted > params.stages:
            return f"stages must be at least {plan.promoted}, got {params.stages}."
        return None

    def heuristic(self, call: _Call) -> MosaicGpuParams:
        """Return good parameters; for few rows, the width that costs a multiprocessor the least time."""
        if not self.few_rows(call):
            return self.tile_heuristic(call)
        plans = [(params, few_rows_plan(call, params)) for params in _few_rows_params(call)]
        # The last of each width has the most stages.
        deepest = {params.block_n: params for params, plan in plans if _has_useful_stages(plan)}

        def cost(params: MosaicGpuParams) -> tuple[float, int]:
            plan = few_rows_plan(call, params)
            return (plan.cost() if plan.wide else plan.columns_per_program), -params.block_n

        found = min(deepest.values(), key=cost)
        return self._with_splits(call, found)

    def space(self, call: _Call) -> Collection[MosaicGpuParams]:
        """Return the search space."""
        few = list(_few_rows_params(call)) if self.few_rows(call) else []
        few = [each for params in few for each in self._splits(call, params)]
        return few if self.is_wide(call) else [*few, *self.tile_space(call)] if few else self.tile_space(call)

    def tile_heuristic(self, call: _Call) -> MosaicGpuParams:
        """Return good parameters for tiles of 128 rows, with the most stages that fit."""
        dense, groups = self.dense(call), getattr(call, "groups", 1)
        # Two parts with blocks' scales spill registers.
        widths = _WIDTHS if dense.scales_outside else _WIDTHS[:-1]
        rows = row_tiles(getattr(call, "own_rows", dense.rows), groups, MosaicGpuParams().block_m)
        block_n = tile_width(dense.columns, widths, rows)
        pieces = self.plan(call, MosaicGpuParams(block_n=block_n)).pieces
        out_slots = next(slots for slots in (2, 3, 1) if pieces % slots == 0)
        deepest = [
            MosaicGpuParams(block_n=block_n, stages=stages, out_slots=out_slots)
            for stages in range(_STAGES[block_n], 1, -1)
        ]
        found = next(params for params in deepest if self.plan(call, params).shared_bytes() <= hopper.SHARED_MEMORY)
        return self._with_splits(call, found)

    def _splits(self, call: _Call, params: MosaicGpuParams) -> list[MosaicGpuParams]:
        """Return the parameters with each number of splits that they may have and that may gain time."""
        each = [dataclasses.replace(params, splits=splits) for splits in SPLITS]
        return [params for params in each if params.splits == 1 or self._may_split(call, params)]

    def _may_split(self, call: _Call, params: MosaicGpuParams) -> bool:
        """Return whether a call can have these splits, and may be faster with them."""
        if self.params_fault(call, params):
            return False
        if params.block_m != FEW_ROWS and (plan := self.plan(call, params)).tiles > _FEW_ROUNDS * plan.programs:
            return False
        return is_promising(*(self._estimated(call, dataclasses.replace(params, splits=n)) for n in (params.splits, 1)))

    def _with_splits(self, call: _Call, params: MosaicGpuParams) -> MosaicGpuParams:
        """Return the parameters, with splits if these seem clearly faster."""
        found = self._splits(call, params)
        return found[fastest([self._estimated(call, each) for each in found])] if len(found) > 1 else params

    def _estimated(self, call: _Call, params: MosaicGpuParams) -> float:
        """Return the estimated time of a product with one matrix, in microseconds."""
        dense = self.dense(call)
        if params.block_m == FEW_ROWS:
            of_rows = few_rows_plan(call, params)
            rounds = of_rows.tiles * of_rows.splits / MULTIPROCESSORS
            return estimated(of_rows.steps * _FEW_ROWS_STEP, rounds, of_rows.splits, dense.rows * dense.columns)
        plan = self.plan(call, params)
        step_us = _STEP_US[dense.scales_outside][params.block_n] * plan.tile_rows / 128
        if params.splits == 1:
            return estimated(plan.steps * step_us, plan.tiles / plan.programs)
        split = split_plan(plan, params.splits)
        whole = estimated(plan.steps * step_us, plan.tiles // plan.programs) if plan.whole_rows else 0.0
        rounds = split.tiles * split.splits / split.programs
        return whole + estimated(split.steps * step_us, rounds, split.splits, split.own_rows * dense.columns)

    def tile_space(self, call: _Call) -> Collection[MosaicGpuParams]:
        """Return the search space of tiles of 128 or 256 rows."""

        def fits(block_m: int, block_n: int, stages: int, out_slots: int) -> bool:
            params = MosaicGpuParams(block_m=block_m, block_n=block_n, stages=stages, out_slots=out_slots)
            return self.tile_fault(call, params) is None

        def may_split(block_m: int, block_n: int, stages: int, out_slots: int, splits: int) -> bool:
            params = MosaicGpuParams(block_m=block_m, block_n=block_n, stages=stages, out_slots=out_slots)
            return splits == 1 or self._may_split(call, dataclasses.replace(params, splits=splits))

        axes: dict[str, tuple[int, ...]] = {
            "block_m": (128, 256),
            "block_n": tuple(size for size in _WIDTHS if size < self.dense(call).columns + 64),
            "stages": (3, 4, 5, 6, 8, 10),
            "panel": (2, 4, 8, 16, 32),
            "out_slots": (1, 2, 3, 4),
        }
        if not any(may_split(128, width, 3, 1, 2) for width in axes["block_n"]):
            return ConfigSpace(axes, constraints=fits, build=MosaicGpuParams)
        return ConfigSpace(axes | {"splits": SPLITS}, constraints=[fits, may_split], build=MosaicGpuParams)


class MosaicGpu(QuantizedProduct[QuantizedMatmulCall]):
    """The product of two 8-bit operands with scales of rows and columns, or of blocks, on Hopper GPUs.

    At most 64 rows, as in decoding, have their own kernel; these rows may have 16 bits.
    """

    def few_rows(self, call: QuantizedMatmulCall) -> bool:
        """See `QuantizedProduct`; the rows may have 8 bits, too."""
        return self.has_few_rows(call)

    def dense(self, call: QuantizedMatmulCall) -> QuantizedMatmulCall:
        """See `QuantizedProduct`."""
        return call

    def plan(self, call: QuantizedMatmulCall, params: MosaicGpuParams) -> QuantizedPlan:
        """See `QuantizedProduct`."""
        return quantized_plan(call, params)

    def forward(self, call: QuantizedMatmulCall, /, *args: Any, params: MosaicGpuParams) -> tuple[jax.Array, Any]:
        """Return the product, without residuals."""
        return launch.product(call, args, params), ()


class MosaicGpuGrouped(QuantizedProduct[QuantizedGroupedMatmulCall]):
    """The Hopper kernel for `quantized_grouped_matmul`: groups of rows, each multiplied with a separate matrix."""

    features = frozenset({"row_scale", "first_group"})
    names = ("lhs", "rhs", "transpose_rhs")

    def dense(self, call: QuantizedGroupedMatmulCall) -> QuantizedMatmulCall:
        """See `QuantizedProduct`."""
        return call.as_dense

    def plan(self, call: QuantizedGroupedMatmulCall, params: MosaicGpuParams) -> QuantizedPlan:
        """See `QuantizedProduct`."""
        return grouped_plan(call, params)

    def unsupported(self, call: QuantizedGroupedMatmulCall) -> str | None:
        """See `QuantizedProduct`."""
        return super().unsupported(call) or groups_reason(call)

    def forward(
        self, call: QuantizedGroupedMatmulCall, /, *args: Any, params: MosaicGpuParams
    ) -> tuple[jax.Array, Any]:
        """Return the product, without residuals."""
        return launch.grouped_product(call, args, params), ()


def groups_reason(call: QuantizedGroupedMatmulCall) -> str | None:
    """Return why the kernels do not run a call with these groups; `None` if they do."""
    if not 1 <= call.groups <= _MOST_GROUPS:
        return f"it supports 1 to {_MOST_GROUPS} groups, got {call.groups}; use 'xla'."
    if not call.as_dense.scales_outside and call.rhs_block is not None and call.rhs_block[0] != 1:
        return f"its blocks of rhs belong to one group, got {call.rhs_block}; use 'xla'."
    return None


def _few_rows_params(call: Any) -> Iterator[MosaicGpuParams]:
    """Yield all parameters for few rows, by width and stages."""
    for block_n in range(32, 257, 32):
        for stages in range(2, 13):
            params = MosaicGpuParams(block_m=FEW_ROWS, block_n=block_n, stages=stages)
            if _few_rows_fault(few_rows_plan(call, params)) is None:
                yield params


def _has_useful_stages(plan: FewRowsPlan) -> bool:
    """Return whether the stages hold few enough bytes: with more in flight, calls take longer."""
    of_matrices, all_bytes = (plan.stages * each for each in (plan.matrix_bytes, plan.stage_bytes))
    return all_bytes <= _IN_FLIGHT[plan.wide] and (plan.group_tiles > 0 or of_matrices <= _MATRIX_IN_FLIGHT)


def _memory_fault(plan: QuantizedPlan | FewRowsPlan) -> str | None:
    if plan.shared_bytes() <= hopper.SHARED_MEMORY:
        return None
    return f"it needs {plan.shared_bytes()} of {hopper.SHARED_MEMORY} bytes of shared memory."


def _few_rows_fault(plan: FewRowsPlan) -> str | None:
    if fault := _memory_fault(plan):
        return fault
    if plan.wide and plan.tile_columns % FEW_ROWS:
        return f"block_n must be a multiple of {FEW_ROWS} for rows of 16 bits, got {plan.tile_columns}."
    if plan.gated and plan.tile_columns > 2 * FEW_ROWS:
        return f"block_n must be {FEW_ROWS} or {2 * FEW_ROWS} with a gate, got {plan.tile_columns}."
    if plan.stages < plan.promoted:
        return f"stages must be at least {plan.promoted}, got {plan.stages}."
    if plan.splits > 1 and plan.programs < plan.tiles * plan.splits:
        return f"splits of {plan.tiles} tiles must take at most {plan.programs} blocks of threads, got {plan.splits}."
    return None


def register_fault(plan: QuantizedPlan) -> str | None:
    """Return why a plan's sums do not fit in registers; `None` if they do."""
    sums = plan.sums_per_thread()
    if sums > MOST_SUMS:
        return f"it needs {sums} of {REGISTERS.consumer} registers per thread for sums; {MOST_SUMS} leave enough."
    if not plan.promoted and sums > 128:
        return f"one accumulator has at most 128 registers per thread, got {sums}; use smaller tiles."
    return None


def _operands_reason(call: QuantizedMatmulCall, x: str, w: str, transpose: str) -> str | None:
    if not call.is_narrow or (call.x_dtype == "int8") != (call.w_dtype == "int8"):
        return (
            f"{x} is {call.x_dtype} and {w} is {call.w_dtype}; 'mosaic_gpu' multiplies two float8 or two int8 "
            f"operands, or up to {FEW_ROWS} rows of 16 bits for each matrix by columns with a scale each; quantise "
            "both, or use 'xla'."
        )
    if not call.scales_outside and ((call.x_block, call.w_block) not in _BLOCKS or call.is_integer):
        return (
            f"scales vary along k in blocks {call.x_block} of {call.x_dtype} and {call.w_block}; 'mosaic_gpu' has "
            "float8 blocks of 1x128 by 128x128 or 1x128; quantise whole rows, or use 'xla'."
        )
    if not call.transpose_w:
        return (
            f"{w} is [k, n]; 'mosaic_gpu' reads 8-bit numbers along k: pass [n, k] with {transpose}=True, or use 'xla'."
        )
    if call.out_dtype not in _OUT_DTYPES:
        return f"preferred_element_type is {call.out_dtype}; 'mosaic_gpu' supports {', '.join(_OUT_DTYPES)}; use 'xla'."
    return None


def _shape_reason(call: QuantizedMatmulCall, x: str, w: str) -> str | None:
    if 0 in (call.rows, call.inner, call.columns):
        return f"{x} or {w} is empty; use 'xla'."
    if max(call.rows, call.inner, call.columns) > _LARGEST:
        return f"it supports at most {_LARGEST} rows and columns; use 'xla'."
    if call.is_integer and call.inner > LONGEST_INT8:
        return f"sums of int8 products are int32, which may overflow where k exceeds {LONGEST_INT8}; use 'xla'."
    return None
