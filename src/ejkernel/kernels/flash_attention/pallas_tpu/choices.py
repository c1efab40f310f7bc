# SPDX-License-Identifier: Apache-2.0
"""Heuristic and search space. The parameters come from simulated cycles: `benchmarks/results/attention_tpu.md`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import jax.numpy as jnp

from ejkernel.kernels._vector_memory import LANES, WIDE_UNITS, Need, Parts, beyond_fit, larger, memory_of, untuned_of
from ejkernel.kernels.flash_attention.common import AttentionCall

from . import memory
from .launch import Lengths, backward_plan, forward_plan
from .params import BackwardParams, ForwardParams

_RESIDENT = (8192, 4096, 2048)
_ON_V4 = 1.8

_FORWARD_BLOCKS = ((512, 512), (1024, 512), (1024, 1024), (2048, 1024), (2048, 2048))
_BACKWARD_BLOCKS = ((512, 512), (1024, 512), (1024, 1024), (1024, 2048), (2048, 1024))
_SMALL = ((256, 256), (128, 128))


def needed(call: AttentionCall, params: ForwardParams | BackwardParams) -> Need:
    """Return the bytes of vector memory of the larger kernel of one direction."""
    return larger(*map(memory.need_of, parts_of(call, params)))


def parts_of(call: AttentionCall, params: ForwardParams | BackwardParams) -> list[Parts]:
    """Return the vector memory of each kernel of one direction by its causes."""
    lengths = Lengths(call.query[1], call.key[1])
    repeats, size = call.query[2] // call.key[2], jnp.dtype(call.dtype).itemsize
    heads = call.query[0] * call.examples * call.key[2]
    dims = memory.Dims(call.query[3], call.value[3], repeats, size, call.device_fingerprint or "", heads)
    wider = beyond_fit(dims.head, dims.value)
    own: dict[str, Any]
    if isinstance(params, ForwardParams):
        walked = forward_plan(lengths, call.rules, params)
        own = {"segmented": _segmented(call, walked[1].columns), "sum_by_product": params.sum_by_product}
        return [memory.of_forward(dims, walked, call.rules, **own).times(wider)]
    walked = backward_plan(lengths, call.rules, params)
    own = {"segmented": _segmented(call, walked[1].block * walked[1].blocks), "transpose": params.transpose}
    found = memory.of_keys(dims, walked, call.rules, fused=params.query is None, **own)
    if params.query is None:
        return [found]
    walked = forward_plan(lengths, call.rules, params.query)
    segmented = _segmented(call, walked[1].columns)
    both = [found, memory.of_queries(dims, walked, call.rules, segmented=segmented)]
    # A v4 keeps more values, and the fit has no kernels compiled for it.
    return [parts.times(wider * (_ON_V4 if call.device_fingerprint == "tpu:tpu_v4" else 1)) for parts in both]


def _segmented(call: AttentionCall, padded_keys: int) -> bool:
    """Return whether a kernel reads ids: they also hide the padding, unless causal attention does not reach it."""
    given = call.segments or call.query_lengths or call.key_lengths
    return given or (padded_keys > call.key[1] and call.rules.right != 0)


def params_fault(call: AttentionCall, params: ForwardParams | BackwardParams) -> str | None:
    """See `Implementation`: `None` if the kernels may fit in the chip's vector memory."""
    return needed(call, params).fault(memory_of(call), call)


def doubt(call: AttentionCall, params: ForwardParams | BackwardParams) -> str | None:
    """See `Implementation`: `None` if the kernels surely fit in the chip's vector memory."""
    need = needed(call, params)
    # heads with arrays that fill more than three quarters are streamed, in larger blocks
    return need.fault(memory_of(call, surely=True) * 3 // 4, call) or need.doubt(untuned_of(call), call)


def heuristic(call: AttentionCall) -> Any:
    """Return the parameters with the fewest simulated cycles on this chip that surely fit in its vector memory."""
    preferred = _preferred(call) if call.dtype == "bfloat16" else _preferred_in_float32(call)
    candidates = [*preferred, *_fallbacks(call)]
    return next((params for params in candidates if doubt(call, params) is None), candidates[-1])


def space(call: AttentionCall) -> list[Any]:
    """Return the parameters to tune over: those that may fit in memory, and launch different kernels."""
    return [params for params in every(call) if params_fault(call, params) is None] or [heuristic(call)]


def every(call: AttentionCall) -> list[Any]:
    """Return the parameters that launch different kernels, also those that exceed the memory."""
    found: dict[Any, Any] = {}
    for params in _candidates(call):
        found.setdefault(_launched(call, params), params)
    return list(found.values())


def _preferred(call: AttentionCall) -> Iterator[Any]:
    """Yield the parameters found by simulating calls of 4,096 queries and keys."""
    rules, wide = call.rules, call.device_fingerprint in WIDE_UNITS
    two_edges = rules.left is not None and rules.right is not None
    if call.backward:
        if rules.left is None and rules.right is None:
            yield BackwardParams(block_kv=1024, chunk=2048, transpose=wide)
        elif not two_edges:
            strip, unroll = (512, 2) if wide else (256, 1)
            yield BackwardParams(block_kv=2048, chunk=1024, strip=strip, unroll=unroll, transpose=wide)
        yield BackwardParams(strip=256, transpose=wide)
        return
    sums = wide or call.value[3] % 128 != 0
    if two_edges:
        yield ForwardParams(strip=256, sum_by_product=sums)
    elif rules.left is None and rules.right is None:
        block = 2048 if wide else 1024
        yield ForwardParams(block_q=block, rows=block, unroll=4, sum_by_product=sums)
    elif wide:
        yield ForwardParams(block_q=2048, chunk=2048, rows=2048, unroll=1, sum_by_product=sums)
    else:
        if _takes_long_blocks(call):
            yield ForwardParams(block_q=4096, chunk=1024, rows=512, strip=256)
        yield ForwardParams(block_q=2048, chunk=1024, rows=512, strip=256, sum_by_product=sums)
    yield ForwardParams(strip=256, sum_by_product=sums)


def _preferred_in_float32(call: AttentionCall) -> Iterator[Any]:
    """Yield parameters for products that are several of the matrix unit's: large blocks of them are long programs."""
    wide = call.device_fingerprint in WIDE_UNITS
    if call.backward:
        # wider heads fill the matrix unit anyway
        yield BackwardParams(block_kv=1024, chunk=512, strip=256, transpose=wide and call.query[3] <= LANES)
    else:
        yield ForwardParams(block_q=1024, chunk=512, rows=1024 if wide else 256, strip=256, unroll=1)


def _takes_long_blocks(call: AttentionCall) -> bool:
    """Return whether blocks of 4,096 queries were compiled: with 64 dimensions, XLA ran out of memory beside them."""
    return call.query[3] == call.value[3] == LANES and max(call.query[1], call.key[1]) <= 4096


def _fallbacks(call: AttentionCall) -> Iterator[Any]:
    """Yield parameters that take less and less memory: smaller blocks, then parts of a head in memory."""
    blocks = ((1024, 512), (512, 512), *_SMALL)
    for resident, (rows, columns) in itertools.product((None, *_RESIDENT), blocks):
        yield from _simple(call, rows, columns, resident)


def _simple(call: AttentionCall, rows: int, columns: int, resident: int | None) -> Iterator[Any]:
    strip = min(rows, 256)
    own = ForwardParams(block_q=rows, chunk=columns, rows=rows, strip=strip, unroll=1, resident=resident)
    if not call.backward:
        yield own
        return
    if resident is None:
        yield BackwardParams(block_kv=rows, chunk=columns, strip=strip)
    yield BackwardParams(block_kv=rows, chunk=columns, strip=strip, resident=resident, query=own)


def _candidates(call: AttentionCall) -> Iterable[Any]:
    yield heuristic(call)
    is_narrow = call.dtype == "bfloat16"
    if is_narrow:
        yield from _large(call)
    residents = (None,) if doubt(call, next(_simple(call, 512, 512, None))) is None else (None, *_RESIDENT)
    blocks = _SMALL if call.query[1] <= 1024 else ((1024, 1024 if is_narrow else 512), (512, 512))
    for resident, (rows, columns) in itertools.product(residents, blocks):
        yield from _simple(call, rows, columns, resident)


def _large(call: AttentionCall) -> Iterator[Any]:
    """Yield large and unrolled tiles; in float32 the compiler takes more than four minutes for some of them."""
    everything = call.rules.left is None and call.rules.right is None
    strips, flags = (512,) if everything else (256, 512), (False, True)
    if call.backward:
        for (kv, chunk), strip, unroll, flag in itertools.product(_BACKWARD_BLOCKS, strips, (1, 2), flags):
            yield BackwardParams(block_kv=kv, chunk=chunk, strip=strip, unroll=unroll, transpose=flag)
        return
    for (q, chunk), strip, unroll, flag in itertools.product(_FORWARD_BLOCKS, strips, (2, 4), flags):
        yield ForwardParams(block_q=q, chunk=chunk, rows=q, strip=strip, unroll=unroll, sum_by_product=flag)
    for q in (2048, 4096) if _takes_long_blocks(call) else (2048,):
        yield ForwardParams(block_q=q, chunk=1024, rows=512, strip=256)


def _launched(call: AttentionCall, params: Any) -> Any:
    """Return the differences between the kernels that parameters launch, after blocks are fitted to the lengths."""
    lengths = Lengths(call.query[1], call.key[1])
    if isinstance(params, ForwardParams):
        return _own(forward_plan(lengths, call.rules, params)[1]), params.sum_by_product
    second = None if params.query is None else _own(forward_plan(lengths, call.rules, params.query)[1])
    return _own(backward_plan(lengths, call.rules, params)[1]), params.transpose, second


def _own(plan: Any) -> Any:
    """Return a plan without parts that have no effect: one chunk is not unrolled."""
    unroll = min(plan.unroll, plan.columns // plan.chunk)
    return dataclasses.replace(plan, unroll=unroll)
