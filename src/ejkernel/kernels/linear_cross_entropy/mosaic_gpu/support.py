# SPDX-License-Identifier: Apache-2.0
"""Supported calls, heuristics, search spaces and memory, from shapes alone."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ejkernel.kernels import _hopper as hopper
from ejkernel.kernels._hopper.tile_shapes import ALIGNED, ALIGNED_ROW, padded
from ejkernel.kernels.linear_cross_entropy._chunks import memory_limit, warn_of_limit
from ejkernel.kernels.linear_cross_entropy.common import LinearCrossEntropyCall
from ejkernel.ops.config.spaces.space import ConfigSpace
from ejkernel.ops.utils.values.signature import is_known

from .params import MosaicGpuParams
from .plan import STATISTICS, TILE_ROWS, has_gradients, head_plan, padded_sizes

_LARGEST = 2**31 - 2**16  # rows and columns are counted in int32
_ROW_CHUNKS = (16384, 8192, 4096, 2048, 1024)
_LOGITS_BYTES = 5 << 29  # of all rows, or of half of them, at once; shorter chunks have half as much
_PANELS = (16, 12, 8)
_PANEL_BYTES = 22 << 20  # of rows that stay in the L2 cache while the weight passes
_LONG_ROW = 4096  # columns
_COLUMN_CHUNKS = (32768, 16384, 8192, 4096, 2048, 1024, 512, 256)


def unsupported_reason(call: LinearCrossEntropyCall) -> str | None:
    """Return why the kernel does not run `call`, and an alternative; `None` if it does."""
    if not is_known(call.tokens, call.inner, call.columns):
        return "it needs static shapes, and this program is exported with symbolic ones; use 'xla'."
    return hopper.unavailable(call, "x and weight", "'xla'") or _arguments_reason(call)


def _arguments_reason(call: LinearCrossEntropyCall) -> str | None:
    if call.dtype == "float16":
        return (
            "x and weight have dtype float16, whose range is too small for gradients of logits; cast them to bfloat16, "
            "or use 'xla', which scales them."
        )
    if call.dtype != "bfloat16":
        return f"x and weight have dtype {call.dtype}; 'mosaic_gpu' supports bfloat16; cast them, or use 'xla'."
    if call.accumulation_dtype not in (None, "float32", "bfloat16"):
        return f"accumulation_dtype is {call.accumulation_dtype}; pass float32 or bfloat16, or use 'xla'."
    if 0 in (call.tokens, call.inner, call.columns):
        return "x or weight is empty; use 'xla'."
    if max(call.tokens, call.inner, call.columns) > _LARGEST:
        return f"it supports at most {_LARGEST} rows and columns; use 'xla'."
    return None


def params_fault(call: LinearCrossEntropyCall, params: MosaicGpuParams) -> str | None:
    """Return why the call cannot run with `params`; `None` if it can."""
    plan = head_plan(call, params, STATISTICS, rows=TILE_ROWS)
    needed = plan.shared_bytes()
    if needed > hopper.SHARED_MEMORY:
        return f"it needs {needed} bytes of shared memory; a block of threads has at most {hopper.SHARED_MEMORY}."
    if plan.pieces % params.out_slots:
        return f"out_slots must divide {plan.pieces}, the pieces in which a tile is stored, got {params.out_slots}."
    if params.lag >= params.stages:
        return f"lag must be less than stages, got {params.lag} with {params.stages} stages."
    if params.form == "rows" and call.gradients:
        return _three_products_fault(call)
    return None


def _three_products_fault(call: LinearCrossEntropyCall) -> str | None:
    """Return why the gradients cannot be computed from one factor per row; `None` if they can."""
    if call.logits_soft_cap is not None and "sum" in call.statistics:
        return "label_smoothing with logits_soft_cap needs form='vocabulary'."
    if "expected" in call.statistics:
        return "the statistic 'expected' needs form='vocabulary'."
    return None


def estimated_bytes(call: LinearCrossEntropyCall, params: MosaicGpuParams) -> int:
    """Return an estimate of the bytes of temporary arrays, besides arguments and results."""
    sizes = inner, columns = padded_sizes(call, params)
    # A padded copy of the weight, and of its gradient where that cannot be stored without padding.
    copies = 1 + (has_gradients(call) and not (call.transpose_weight and inner == call.inner))
    total = 2 * math.prod(sizes) * copies * (sizes != (call.inner, call.columns))
    total += 4 * 3 * call.tokens * -(-columns // params.block_n)
    if not has_gradients(call):
        return call.examples * total
    # A sum in the weight's dtype becomes the result.
    chunk, wide = params.chunk, 0 if _sum_dtype(call, params) == "bfloat16" else 4
    if params.form == "rows":
        rows = call.tokens if chunk is None else min(chunk, call.tokens)
        total += 2 * rows * columns + wide * inner * columns * (rows < call.tokens) + _split_bytes(rows, inner, columns)
    else:
        width = columns if chunk is None else min(chunk, columns)
        total += 4 * call.tokens * inner + 2 * width * (call.tokens + 2 * inner)
    return call.examples * total


def _split_bytes(rows: int, inner: int, columns: int) -> int:
    """Return the bytes of a weight that XLA pads, to split the sum over columns of a product with few tiles."""
    is_split = -(-rows // TILE_ROWS) * -(-inner // TILE_ROWS) < hopper.MULTIPROCESSORS
    return 2 * inner * columns if is_split and columns % ALIGNED else 0


def _sum_dtype(call: LinearCrossEntropyCall, params: MosaicGpuParams) -> str:
    return call.accumulation_dtype or params.accumulation_dtype or "float32"


def heuristic(call: LinearCrossEntropyCall) -> MosaicGpuParams:
    """Return good parameters: few chunks of rows, shorter ones if memory is scarce, then chunks of the vocabulary."""
    if not is_known(call.tokens, call.inner, call.columns):
        return MosaicGpuParams()
    if not has_gradients(call):
        return _overlapped(call, MosaicGpuParams())
    able = [choice for choice in _choices(call) if params_fault(call, choice) is None]
    choice = next((choice for choice in able if _fits_in_memory(call, choice)), None)
    if choice is None:
        choice = min(able, key=lambda choice: estimated_bytes(call, choice))
        warn_of_limit(call, estimated_bytes(call, choice))
    if call.gradients and choice.form == "rows":
        panel = next((n for n in _PANELS if 2 * n * TILE_ROWS * call.inner <= _PANEL_BYTES), _PANELS[-1])
        # A buffer for each piece of a tile, so that no store waits for an earlier one.
        return _overlapped(call, dataclasses.replace(choice, stages=3, out_slots=4, panel=panel))
    return choice


def _overlapped(call: LinearCrossEntropyCall, params: MosaicGpuParams) -> MosaicGpuParams:
    """Return parameters that overlap epilogues with products, with one more stage, where tiles have few steps."""
    if call.inner >= _LONG_ROW:
        return params
    return dataclasses.replace(params, stages=4, out_slots=2, lag=3, cluster=2)


def _choices(call: LinearCrossEntropyCall) -> list[MosaicGpuParams]:
    """Return the forms and sizes of chunks, the best first.

    Chunks of up to `2 * d` rows take no more memory than the sum of the weight's gradient in float32, so shorter ones
    save little.
    """
    best = _few_chunks(call)
    most = call.tokens if best.chunk is None else best.chunk
    rows = [MosaicGpuParams(chunk=n) for n in _ROW_CHUNKS if max(1024, call.inner) <= n < most]
    columns = [MosaicGpuParams(form="vocabulary", chunk=n) for n in _COLUMN_CHUNKS if n < call.columns]
    columns = columns or [MosaicGpuParams(form="vocabulary")]
    return [best, *rows, *columns]


def _few_chunks(call: LinearCrossEntropyCall) -> MosaicGpuParams:
    """Return the fewest chunks of rows with few logits each."""
    logits = 2 * call.tokens * padded(call.columns, ALIGNED_ROW)
    if logits <= _LOGITS_BYTES:
        return MosaicGpuParams()
    # A sum in bfloat16 takes no extra memory. Both products and their sum are rounded, which two chunks allow.
    halves = MosaicGpuParams(chunk=padded(-(-call.tokens // 2), TILE_ROWS), accumulation_dtype="bfloat16")
    if logits <= 2 * _LOGITS_BYTES and _sum_dtype(call, halves) == "bfloat16":
        return halves
    # A sum in float32 takes memory as well.
    count = -(-logits * 2 // _LOGITS_BYTES)
    return MosaicGpuParams(chunk=padded(-(-call.tokens // count), TILE_ROWS))


def _longer(call: LinearCrossEntropyCall) -> list[MosaicGpuParams]:
    """Return chunks for a search only: longer ones, and two with a sum that is rounded once more."""
    few = _few_chunks(call).chunk
    if few is None:
        return []
    half = padded(-(-call.tokens // 2), TILE_ROWS)
    longer = [MosaicGpuParams(chunk=n) for n in _ROW_CHUNKS if few < n < call.tokens]
    return [MosaicGpuParams(), *longer, MosaicGpuParams(chunk=half, accumulation_dtype="bfloat16")]


def space(call: LinearCrossEntropyCall) -> ConfigSpace[MosaicGpuParams] | list[MosaicGpuParams]:
    """Return the search space: tiles, and chunks with temporary arrays that fit within the memory limit."""
    if not is_known(call.tokens, call.inner, call.columns):
        return [heuristic(call)]
    first = heuristic(call)
    chunks = {_chunk_name(first): first}
    if has_gradients(call):
        fitting = [choice for choice in (*_choices(call), *_longer(call)) if _fits_in_memory(call, choice)]
        chunks |= {_chunk_name(choice): choice for choice in fitting}

    def build(values: dict[str, Any]) -> MosaicGpuParams:
        tile = {name: value for name, value in values.items() if name != "chunks"}
        return dataclasses.replace(chunks[values["chunks"]], **tile)

    def read(params: MosaicGpuParams) -> dict[str, Any]:
        tile = {name: getattr(params, name) for name in axes if name != "chunks"}
        return {"chunks": _chunk_name(params), **tile}

    known = chunks

    def fits_in_memory(chunks: str, block_n: int) -> bool:
        params = dataclasses.replace(known[chunks], block_n=block_n)
        return params == first or estimated_bytes(call, params) <= memory_limit(call)

    def fits(block_n: int, stages: int, out_slots: int, lag: int) -> bool:
        params = dataclasses.replace(first, block_n=block_n, stages=stages, out_slots=out_slots, lag=lag)
        return params_fault(call, params) is None

    axes: dict[str, tuple[Any, ...]] = {
        "chunks": tuple(chunks),
        "block_n": (128, 256),
        "stages": (3, 4, 6),
        "panel": (8, 12, 16, 32),
        "out_slots": (1, 2, 4),
        "lag": (0, 3),
        "cluster": (1, 2),
    }
    return ConfigSpace(axes, constraints=(fits, fits_in_memory), build=build, read=read)


def _chunk_name(params: MosaicGpuParams) -> str:
    suffix = "" if params.accumulation_dtype is None else f" {params.accumulation_dtype}"
    return f"{params.form} {params.chunk or 'all'}{suffix}"


def _fits_in_memory(call: LinearCrossEntropyCall, params: MosaicGpuParams) -> bool:
    return params_fault(call, params) is None and estimated_bytes(call, params) <= memory_limit(call)
