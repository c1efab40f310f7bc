# SPDX-License-Identifier: Apache-2.0
"""Supported calls, heuristics and search spaces, from shapes alone."""

from __future__ import annotations

from ejkernel.kernels import _hopper as hopper
from ejkernel.kernels.grouped_matmul.common import GroupedMatmulCall
from ejkernel.ops.config.spaces.space import ConfigSpace
from ejkernel.ops.utils.values.signature import is_known

from .params import ProductParams, WgradParams
from .plan import GroupedPlan, product_plan, wgrad_plan

_OUT_DTYPES = (*hopper.DTYPES, "float32")
_MOST_SUMS = 128  # accumulator registers per thread
_MOST_GROUPS = 4096  # the tile scheduler of every thread walks over all groups
_LARGEST = 2**31 - 2**16  # rows and tiles are counted in int32


def unsupported_reason(call: GroupedMatmulCall) -> str | None:
    """Return why the kernels do not run `call`, and an alternative; `None` if they do."""
    if not is_known(call.rows, call.groups, call.inner, call.columns):
        return "it needs static shapes, and this program is exported with symbolic ones; use 'xla'."
    return hopper.unavailable(call, "both operands", "'xla'") or _arguments_reason(call)


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


def product_fault(call: GroupedMatmulCall, params: ProductParams) -> str | None:
    """Return why a product cannot run with `params`; `None` if it can."""
    return _fault(product_plan(call, params))


def wgrad_fault(call: GroupedMatmulCall, params: WgradParams) -> str | None:
    """Return why a weight gradient cannot run with `params`; `None` if it can."""
    return _fault(wgrad_plan(call, params))


def _fault(plan: GroupedPlan) -> str | None:
    needed, sums = plan.shared_bytes(), plan.sums_per_thread()
    if needed > hopper.SHARED_MEMORY:
        return f"it needs {needed} bytes of shared memory; a block of threads has at most {hopper.SHARED_MEMORY}."
    # Each tile starts at the first slot: with a remainder, a slot would be overwritten while it is copied.
    if plan.pieces % plan.out_slots:
        return f"out_slots must divide {plan.pieces}, the pieces in which a tile is stored, got {plan.out_slots}."
    if sums > _MOST_SUMS:
        return f"it needs {sums} accumulator registers per thread; {_MOST_SUMS} are available."
    return None


def product_heuristic(call: GroupedMatmulCall) -> ProductParams:
    """Return good parameters for a product."""
    block_n = _block_n(call)
    stages, out_slots = _room(call, block_n)
    return ProductParams(block_n=block_n, stages=stages, out_slots=out_slots)


def wgrad_heuristic(call: GroupedMatmulCall) -> WgradParams:
    """Return good parameters for a weight gradient; with many tiles, the largest groups come first."""
    block_n = _block_n(call)
    many = wgrad_plan(call, WgradParams(block_n=block_n)).tiles > _MANY_TILES
    stages, out_slots = _room(call, block_n)
    return WgradParams(block_n=block_n, stages=stages, out_slots=out_slots, largest_first=many, snake=many)


_STAGES = {64: 8, 128: 6, 192: 4, 256: 4}  # by columns of all products: as many as shared memory holds
# On one H200, 24,576 tiles of uneven groups took 2,410 us with the largest groups first, and 2,754 us without; 8,192
# tiles took longer with the largest first.
_MANY_TILES = 16384


def _room(call: GroupedMatmulCall, block_n: int) -> tuple[int, int]:
    """Return the stages and output slots that fit for tiles of `block_n` columns."""
    pieces = product_plan(call, ProductParams(block_n=block_n)).pieces
    return _STAGES[block_n * call.products], next(slots for slots in (2, 3, 1) if pieces % slots == 0)


def _block_n(call: GroupedMatmulCall) -> int:
    """Return the widest tile that wastes few columns in the last one; two products share the registers."""
    waste = {size: -(-call.columns // size) * size for size in _widths(call)}
    return max(size for size, covered in waste.items() if covered <= 1.1 * min(waste.values()))


def _widths(call: GroupedMatmulCall) -> tuple[int, ...]:
    return (64, 128) if call.gated else (64, 128, 192, 256)


def product_space(call: GroupedMatmulCall) -> ConfigSpace[ProductParams]:
    """Return the search space of a product."""

    def fits(block_m: int, block_n: int, stages: int, out_slots: int) -> bool:
        params = ProductParams(block_m=block_m, block_n=block_n, stages=stages, out_slots=out_slots)
        return product_fault(call, params) is None

    return ConfigSpace(
        {"block_m": (128, 256), **_common_axes(call)},
        constraints=fits,
        build=ProductParams,
    )


def wgrad_space(call: GroupedMatmulCall) -> ConfigSpace[WgradParams]:
    """Return the search space of a weight gradient."""

    def fits(block_k: int, block_n: int, stages: int, out_slots: int) -> bool:
        params = WgradParams(block_k=block_k, block_n=block_n, stages=stages, out_slots=out_slots)
        return wgrad_fault(call, params) is None

    either = (False, True)
    return ConfigSpace(
        {"block_k": (128, 256), **_common_axes(call), "largest_first": either, "snake": either},
        constraints=fits,
        build=WgradParams,
    )


def _common_axes(call: GroupedMatmulCall) -> dict[str, tuple[int, ...]]:
    return {
        "block_n": tuple(size for size in _widths(call) if size < call.columns + 64),
        "stages": (3, 4, 5, 6, 8),
        "panel": (2, 4, 8, 16, 32),
        "out_slots": (1, 2, 3, 4),
    }
