# SPDX-License-Identifier: Apache-2.0
"""The implementations `mosaic_gpu` of grouped products: supported calls, heuristics and search spaces."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax

from ejkernel.kernels import _hopper as hopper
from ejkernel.kernels._hopper.tile_shapes import row_tiles, tile_width
from ejkernel.kernels.grouped_matmul.common import PREACTIVATIONS, GroupedMatmulCall
from ejkernel.ops.config.spaces.space import ConfigSpace
from ejkernel.ops.implementation import Implementation
from ejkernel.ops.utils.values.signature import is_known

from . import launch
from .plan import GroupedPlan, ProductParams, WgradParams, product_plan, wgrad_plan

_OUT_DTYPES = (*hopper.DTYPES, "float32")
_MOST_SUMS = 128  # accumulator registers per thread
_MOST_GROUPS = 4096  # the tile schedulers walk over all groups
_LARGEST = 2**31 - 2**16  # rows and tiles are counted in int32
_STAGES = {64: 8, 128: 6, 192: 4, 256: 4}  # by columns of all products: as many as shared memory holds
# On one H200, 24,576 tiles of uneven groups took 2,410 us with the largest groups first, and 2,754 us without; 8,192
# tiles took longer with the largest first.
MANY_TILES = 16384


class _Grouped(Implementation[GroupedMatmulCall]):
    """The common part of the product and the weight gradient."""

    name = "mosaic_gpu"
    most_waste = math.inf  # of tiles of 256 columns, where those of 192 waste nothing

    def plan(self, call: GroupedMatmulCall, params: Any) -> GroupedPlan:
        """Return the plan of a launch."""
        raise NotImplementedError

    def row_tiles(self, call: GroupedMatmulCall) -> int:
        """Return the number of tiles in a column of tiles of the result, if all groups have the same size."""
        raise NotImplementedError

    def unsupported(self, call: GroupedMatmulCall) -> str | None:
        """Return why the kernel does not run the call, and an alternative; `None` if it does."""
        if not is_known(call.rows, call.groups, call.inner, call.columns):
            return "it needs static shapes, and this program is exported with symbolic ones; use 'xla'."
        return hopper.unavailable(call, "both operands", "'xla'") or _arguments_reason(call)

    def params_fault(self, call: GroupedMatmulCall, params: Any) -> str | None:
        """Return why the call cannot run with these parameters; `None` if it can."""
        plan = self.plan(call, params)
        needed, sums = plan.shared_bytes(), plan.sums_per_thread()
        if needed > hopper.SHARED_MEMORY:
            return f"it needs {needed} bytes of shared memory; a block of threads has at most {hopper.SHARED_MEMORY}."
        # Each tile starts at the first slot: with a remainder, a slot would be overwritten while it is copied.
        if plan.pieces % plan.out_slots:
            return f"out_slots must divide {plan.pieces}, the pieces in which a tile is stored, got {plan.out_slots}."
        if sums > _MOST_SUMS:
            return f"it needs {sums} accumulator registers per thread; {_MOST_SUMS} are available."
        return None

    def heuristic(self, call: GroupedMatmulCall) -> Any:
        """Return good parameters."""
        block_n = tile_width(call.columns, _widths(call), self.row_tiles(call))
        wide, narrow = (-(-call.columns // size) * size for size in (256, 192))
        if block_n == 256 and wide > self.most_waste * narrow:
            block_n = 192
        pieces = self.plan(call, self.params(block_n=block_n)).pieces
        out_slots = next(slots for slots in (2, 3, 1) if pieces % slots == 0)
        return self.params(block_n=block_n, stages=_STAGES[block_n * call.products], out_slots=out_slots)

    def _space(
        self, call: GroupedMatmulCall, rows: str, fits: Callable[..., bool], **axes: tuple[bool, ...]
    ) -> ConfigSpace[Any]:
        common = {
            rows: (128, 256),
            "block_n": tuple(size for size in _widths(call) if size < call.columns + 64),
            "stages": (3, 4, 5, 6, 8),
            "panel": (2, 4, 8, 16, 32),
            "out_slots": (1, 2, 3, 4),
        }
        return ConfigSpace({**common, **axes}, constraints=fits, build=self.params)


class _Product(_Grouped):
    """The product, with or without an epilogue."""

    params = ProductParams
    most_waste = 1.05  # 2,880 columns took 412 us in tiles of 256, and 404 in those of 192

    def plan(self, call: GroupedMatmulCall, params: ProductParams) -> GroupedPlan:
        """See `_Grouped`."""
        return product_plan(call, params)

    def row_tiles(self, call: GroupedMatmulCall) -> int:
        """See `_Grouped`."""
        return row_tiles(call.own_rows, call.groups, self.params().block_m)

    def space(self, call: GroupedMatmulCall) -> ConfigSpace[ProductParams]:
        """Return the search space."""

        def fits(block_m: int, block_n: int, stages: int, out_slots: int) -> bool:
            params = ProductParams(block_m=block_m, block_n=block_n, stages=stages, out_slots=out_slots)
            return self.params_fault(call, params) is None

        return self._space(call, "block_m", fits)


class MosaicGpu(_Product):
    """The product on Hopper GPUs."""

    features = frozenset({"row_scale", "first_group"})

    def forward(self, call: GroupedMatmulCall, /, *args: Any, params: ProductParams) -> tuple[jax.Array, Any]:
        """Return the product, without residuals."""
        return launch.product(call, args, params), ()


class MosaicGpuActivation(_Product):
    """Products and their epilogue on Hopper GPUs, in one kernel."""

    residuals = PREACTIVATIONS
    features = frozenset({"activation", "gate", "row_scale", "first_group"})

    def forward(self, call: GroupedMatmulCall, /, *args: Any, params: ProductParams) -> tuple[jax.Array, Any]:
        """Return the output, and the products as residuals."""
        # The kernel writes output and products in one dtype.
        keeping = dataclasses.replace(call, out_dtype=call.kept_dtype)
        out, *products = launch.product_keeping(keeping, _given(args), params)
        return out.astype(call.out_dtype), tuple(products)

    def output(self, call: GroupedMatmulCall, /, *args: Any, params: ProductParams) -> jax.Array:
        """Return the output alone; the kernel writes no products."""
        return launch.product(call, _given(args), params)


class MosaicGpuWgrad(_Grouped):
    """The weight gradient on Hopper GPUs."""

    params = WgradParams
    features = frozenset({"first_group"})

    def plan(self, call: GroupedMatmulCall, params: WgradParams) -> GroupedPlan:
        """See `_Grouped`."""
        return wgrad_plan(call, params)

    def row_tiles(self, call: GroupedMatmulCall) -> int:
        """See `_Grouped`."""
        return call.groups * -(-call.inner // self.params().block_k)

    def heuristic(self, call: GroupedMatmulCall) -> WgradParams:
        """Return good parameters; with many tiles, the largest groups come first."""
        params: WgradParams = super().heuristic(call)
        many = wgrad_plan(call, params).tiles > MANY_TILES
        return dataclasses.replace(params, largest_first=many, snake=many)

    def space(self, call: GroupedMatmulCall) -> ConfigSpace[WgradParams]:
        """Return the search space."""

        def fits(block_k: int, block_n: int, stages: int, out_slots: int) -> bool:
            params = WgradParams(block_k=block_k, block_n=block_n, stages=stages, out_slots=out_slots)
            return self.params_fault(call, params) is None

        either = (False, True)
        return self._space(call, "block_k", fits, largest_first=either, snake=either)

    def forward(self, call: GroupedMatmulCall, /, *args: Any, params: WgradParams) -> tuple[jax.Array, Any]:
        """Return the weight gradient, without residuals."""
        lhs, rhs, groups = args
        return launch.weights_gradient(call, (lhs, rhs, groups), params), ()


def _arguments_reason(call: GroupedMatmulCall) -> str | None:
    if call.dtype not in hopper.DTYPES:
        return f"lhs has dtype {call.dtype}; 'mosaic_gpu' supports bfloat16 and float16; cast it, or use 'xla'."
    if call.out_dtype not in _OUT_DTYPES:
        return f"preferred_element_type is {call.out_dtype}; 'mosaic_gpu' supports {', '.join(_OUT_DTYPES)}; use 'xla'."
    if 0 in (call.rows, call.groups, call.inner, call.columns):
        return "lhs or rhs is empty; use 'xla'."
    if call.groups > _MOST_GROUPS:
        return f"it supports at most {_MOST_GROUPS} groups, got {call.groups}; use 'xla'."
    if max(call.rows, call.inner, call.columns) > _LARGEST:
        return f"it supports at most {_LARGEST} rows and columns; use 'xla'."
    return None


def _widths(call: GroupedMatmulCall) -> tuple[int, ...]:
    return (64, 128) if call.gated else (64, 128, 192, 256)  # two products share the registers


def _given(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(arg for arg in args if arg is not None)
