# SPDX-License-Identifier: Apache-2.0
"""Supported calls, heuristic and search space of the backward, from shapes alone."""

from __future__ import annotations

import dataclasses
import math

from ejkernel.kernels._hopper import MULTIPROCESSORS, SHARED_MEMORY
from ejkernel.kernels.flash_attention.common import AttentionCall

from .backward_order import FEW_BLOCKS, SUMMED, full_time, hidden_time, key_blocks, order_of, window_time
from .backward_plan import (
    BackwardProblem,
    backward_problem,
    dquery_columns,
    key_block_buffers,
    padded_dim,
    query_block_buffers,
    shared_bytes,
)
from .params import BackwardParams
from .parts import in_key_parts, in_query_parts, key_parts, parts_fault, query_parts
from .plan import unavailable

_LARGEST_DIM = 256
# Wider heads fit in registers only with division='products', which computes no gradient of a bias.
_LARGEST_DIM_WITH_BIAS = 128
_SHORT_WINDOW = 64  # keys; the backward at head_dim 64 took 91 us instead of 117
# Keys, up to head_dim 64: with 128 queries in a step instead of 64, six of seven backwards took 7 to 16 % longer.
_NARROW_WINDOW = 512
_SPLIT_WINDOW = 256  # keys, up to head_dim 128: in the fused form, four backwards took 1 to 15 % longer
_SHORT_SEQUENCE = 512
# The time of a step of 64 keys, of one of 128. Where lengths or segments hide steps, small blocks gain less.
_SMALL_BLOCK, _SMALL_BLOCK_HIDDEN, _SMALL_BLOCK_OF_NARROW = 0.72, 0.9, 0.88
_LEAST_OF_PART = 512  # keys
_COPIED = 5  # steps: the time to copy keys for parts of the queries, and to start their sum
_MOST_UNEVEN = 16  # parts that need not divide the heads
_UNEVEN_GAIN = 0.03  # least estimated one of causal calls; below it, uneven parts took up to 3 % longer on one H200
# Registers for accumulators per consumer thread, by consumer warpgroups: all but 32, which addresses and a tile's
# numbers need. With 16 instead of 32, parameters passed that spilled.
_SUM_REGISTERS = {1: 208, 2: 208, 3: 128}


def unsupported_reason(call: AttentionCall) -> str | None:
    """Return why the backward does not run `call`, and an alternative; `None` if it runs."""
    return unavailable(call) or _arguments_reason(call)


def params_fault(call: AttentionCall, params: BackwardParams) -> str | None:
    """Return why `call`, which is supported, cannot run with `params`; `None` if it can.

    No parameters cause a deadlock: the producer fills the stages in the order in which consumers wait for them, and a
    consumer waits only for results that the other computed one step earlier.
    """
    if params.form == "unfused":
        return "form='unfused' is for heads of more than 256 columns; use form='fused' or 'split'."
    divided = next((name for name in ("query_parts", "key_parts") if getattr(params, name) > 1), None)
    fault = None if divided is None else parts_fault(call, divided)
    problem = backward_problem(in_key_parts(in_query_parts(call, params.query_parts), params.key_parts))
    return (
        fault
        or _head_parts_fault(problem, params)
        or _division_fault(problem, params)
        or _shared_fault(problem, params)
        or _register_fault(problem, params)
    )


def is_deterministic(call: AttentionCall, params: BackwardParams) -> bool:
    """Return whether gradients repeat bit by bit: they contain no sum in memory of nondeterministic order."""
    return params.form != "fused" and not _shares_bias(call)


def heuristic(call: AttentionCall) -> BackwardParams:
    """Return good parameters for `call`: the best, or nearly the best, on the measured shapes."""
    params, problem = _heuristic(call), backward_problem(call)
    parts = _parts_of_keys(problem, params, call)
    if parts > 1:
        return dataclasses.replace(_heuristic(in_key_parts(call, parts)), key_parts=parts)
    if key_blocks(problem, params) * params.head_parts >= MULTIPROCESSORS:
        return params
    found = [(params, _time_of_size(problem, params))]
    for parts in query_parts(call):
        part = in_query_parts(call, parts)
        params, problem = _heuristic(part), backward_problem(part)
        summed = _COPIED + SUMMED * key_blocks(problem, params) * params.keys
        found.append((dataclasses.replace(params, query_parts=parts), _time_of_size(problem, params) + summed))
    return min(found, key=lambda one: one[1])[0]


def _parts_of_keys(problem: BackwardProblem, params: BackwardParams, call: AttentionCall) -> int:
    """Return the largest number of key parts with which the second kernel's tiles fit on the chip at once."""
    # 2 heads of 32 rows and 16,384 keys at D256: 390 us in one part, 126 in 4, 63 in 16 and 54 in 32.
    tiles = problem.batch * problem.heads * -(-problem.queries // 64)
    if params.form != "split" or 4 * tiles > MULTIPROCESSORS:
        return 1
    most = min(MULTIPROCESSORS // tiles, problem.keys // _LEAST_OF_PART)
    return max((parts for parts in key_parts(call) if parts <= most), default=1)


def _heuristic(call: AttentionCall) -> BackwardParams:
    """Return good parameters with all queries in one part."""
    wide = max(padded_dim(call.query[3]), padded_dim(call.value[3]))
    if call.deterministic:  # the fused form adds up dQ in memory, in nondeterministic order
        choices = [_split(2, 2), _split(2, 1)]
        choices[:0] = [dataclasses.replace(params, division="keys") for params in choices if wide <= 128]
    else:
        choices = _narrow(call) if wide <= 64 else _medium(call) if wide <= 128 else _wide(call)
    fitting = [params for params in choices if params_fault(call, params) is None]
    params = _in_parts(call, fitting[0] if fitting else _space(call)[0])
    return _with_small_blocks(call, params)


def _in_parts(call: AttentionCall, params: BackwardParams) -> BackwardParams:
    return dataclasses.replace(params, head_parts=_heuristic_parts(backward_problem(call), params))


def _with_small_blocks(call: AttentionCall, params: BackwardParams) -> BackwardParams:
    """Return the parameters, with half as many keys or queries in a block of threads if large blocks are too few."""
    problem = backward_problem(call)
    if params.form == "split":
        return dataclasses.replace(params, q_warpgroups=_query_warpgroups(problem)[0])
    if params.keys == 64 or key_blocks(problem, params) * params.head_parts > 2 * MULTIPROCESSORS:
        return params
    small = BackwardParams(warpgroups=1) if _is_narrow(problem) else BackwardParams(division="products")
    if params_fault(call, small) is not None:
        return params
    small = _in_parts(call, small)
    hides = problem.key_lengths or problem.segments
    blocks = key_blocks(problem, small) * small.head_parts
    if hides and blocks <= MULTIPROCESSORS and small.head_parts == params.head_parts:
        return small
    # Of 33 gradients on one H200, 20 were faster with small blocks, by up to 38 %. This takes the faster size of all
    # but one, which loses 1 %, or 9 % in another run.
    return small if _time_of_size(problem, small) < _time_of_size(problem, params) else params


def _time_of_size(problem: BackwardProblem, params: BackwardParams) -> float:
    """Return the estimated time of the first kernel, in steps of 128 keys."""
    hides = problem.key_lengths or problem.segments
    step = _SMALL_BLOCK_OF_NARROW if _is_narrow(problem) else _SMALL_BLOCK_HIDDEN if hides else _SMALL_BLOCK
    return _time(problem, params) * (step if params.keys == 64 and params.form == "fused" else 1)


def _is_narrow(problem: BackwardProblem) -> bool:
    return max(problem.head_dim, problem.value_dim) <= 64


def _query_warpgroups(problem: BackwardProblem) -> tuple[int, ...]:
    """Return the values of `q_warpgroups` to measure, the best first."""
    # With a multiprocessor for each block of 64 queries, 91 us instead of 108 at D192, and 108 instead of 128 at D256.
    return (1, 2) if _fit_at_once(problem.batch * problem.heads, problem.queries) else (2,)


def _fit_at_once(heads: int, rows: int) -> bool:
    """Return whether each block of 64 of the rows of each head has its own multiprocessor."""
    return heads * -(-rows // 64) <= MULTIPROCESSORS


def _narrow(call: AttentionCall) -> list[BackwardParams]:
    """Return parameters for up to 64 columns, the best first; the first that fit are chosen."""
    window = math.inf if call.rules.left is None else call.rules.left
    choices = [BackwardParams(q_block=64)]
    if window <= _SHORT_WINDOW:  # 128 keys see three blocks of 64 queries, or two of 128
        choices.append(BackwardParams(q_block=64, warpgroups=1))
    if call.rules.dropout_rate:  # it takes registers
        return choices
    large = BackwardParams(q_block=128)
    # A soft cap takes its time for scores that the causal mask hides, too: at D64, 260 us instead of 310 with 512
    # queries, and 391 instead of 395 with 1,024; but without a cap 245 instead of 226.
    if call.rules.soft_cap is not None and call.rules.right == 0 and call.query[1] <= _SHORT_SEQUENCE:
        return [*choices, large]
    if window >= _NARROW_WINDOW:
        return [large, *choices]
    # Three stages: 95 us instead of 101 at D8, 122 instead of 128 at D32, where 64 queries do not fit.
    return [*choices, dataclasses.replace(large, q_stages=3, dout_stages=3), large]


def _medium(call: AttentionCall) -> list[BackwardParams]:
    """Return parameters for 65 to 128 columns, the best first."""
    choices = [BackwardParams(), BackwardParams(dout_stages=1)]
    window = math.inf if call.rules.left is None else call.rules.left
    if window < _SPLIT_WINDOW and not _is_fused_in_window(call):
        # With 4 or 8 heads for each key head, by products: 120 us instead of 132 and 146 instead of 162 at D128, 107
        # instead of 114 at D120, 76 instead of 87 at D72 in a window of 64; but at D112 in one of 256, 234 instead of
        # 224. With one head: 115 instead of 115, 217 instead of 207.
        shared = call.query[2] >= 4 * call.key[2] and (call.query[3] > 112 or window < 2 * _SHORT_WINDOW - 1)
        return [dataclasses.replace(_split(2, 2), division="products" if shared else "keys"), *choices]
    if _is_short_and_causal(call):
        return [dataclasses.replace(_split(2, 2), division="keys", kv_block=128), *choices]
    return choices


def _wide(call: AttentionCall) -> list[BackwardParams]:
    """Return parameters for more than 128 columns, the best first."""
    head_dim, value_dim = padded_dim(call.query[3]), padded_dim(call.value[3])
    choices = [_split(2, 2), _split(2, 1)]
    if head_dim + value_dim <= 320:
        choices.insert(1, BackwardParams(division="products"))
    if value_dim <= head_dim:
        return choices
    # Fused: 1,187 us instead of 1,741 at D64/184, 1,164 instead of 1,762 at D40/136, and by products 1,470 instead of
    # 1,808 at D64/256, 473 instead of 531 at D128/192. But wider queries: 1,382 instead of 1,016 at D184/64.
    choices.insert(0, BackwardParams(division="products"))
    if head_dim <= 64 or (head_dim <= 96 and call.rules.right is None):  # causal, D96/160: 941 us instead of 1,096
        choices.insert(0, BackwardParams())
    return choices


def _is_short_and_causal(call: AttentionCall) -> bool:
    """Return whether the split form is faster for heads of 72 to 128 columns, as few queries see each block of keys.

    Causal, 256 queries: 342 us instead of 421 at D128. 512: 442 instead of 458, 385 instead of 501 at D96, and 369
    instead of 483 with 4 heads for each key head. But 768: 313 instead of 304, and without a mask 550 instead of 537;
    and with 64 blocks of 64 keys 29 instead of 21.
    """
    short = call.rules.right == 0 and call.bias is None and call.query[1] <= _SHORT_SEQUENCE
    return short and not _fit_at_once(call.query[0] * call.query[2], call.key[1])


def _is_fused_in_window(call: AttentionCall) -> bool:
    """Return whether the fused form is faster in a window of 128 or more, where heads of padded columns share no keys.

    At D88, 57 us instead of 61; at D104, 64 instead of 66; at D112, 118 instead of 126. At D120, 119 instead of 112.
    """
    dim, left = call.query[3], call.rules.left
    wide = left is not None and left >= 2 * _SHORT_WINDOW - 1
    return wide and dim <= 112 and padded_dim(dim) != dim and call.query[2] == call.key[2]


def space(call: AttentionCall) -> tuple[BackwardParams, ...]:
    """Return the search space of `call`."""
    usual, found = heuristic(call), _space(call)
    of_queries, of_keys = usual.query_parts, usual.key_parts
    if max(of_queries, of_keys) == 1:
        return found
    divided = _space(in_key_parts(in_query_parts(call, of_queries), of_keys))
    fitting = (params for params in divided if params.form == "split" or of_keys == 1)
    return *found, *(dataclasses.replace(params, query_parts=of_queries, key_parts=of_keys) for params in fitting)


def _space(call: AttentionCall) -> tuple[BackwardParams, ...]:
    """Return the part of the search space without parts of queries or keys."""
    wide = max(padded_dim(call.query[3]), padded_dim(call.value[3]))
    by_products, problem = ("products", 2, 64), backward_problem(call)
    divisions = [("keys", 2, 128), ("keys", 2, 64), ("keys", 1, 64)] if wide <= 64 else [("keys", 2, 64), by_products]
    found = []
    for division, warpgroups, q_block in divisions:
        first = BackwardParams(division=division, warpgroups=warpgroups, q_block=q_block)
        fused = [dataclasses.replace(first, q_stages=a, dout_stages=b) for a, b in ((2, 2), (2, 1), (1, 1), (3, 3))]
        found += fused
        found += [
            dataclasses.replace(params, form="split", kv_block=keys, kv_stages=stages, q_warpgroups=count)
            for params in fused[:2]
            for keys, stages in ((64, 2), (128, 2), (64, 1))
            for count in _query_warpgroups(problem)
        ]
    found = [dataclasses.replace(params, head_parts=parts) for params in found for parts in _tried_parts(call, params)]
    return tuple(params for params in found if params_fault(call, params) is None)


def _tried_parts(call: AttentionCall, params: BackwardParams) -> tuple[int, ...]:
    """Return the values of `head_parts` to measure: the heuristic's, and others that give few blocks."""
    problem = backward_problem(call)
    blocks, usual = key_blocks(problem, params), _heuristic_parts(problem, params)
    even = _parts(problem, uneven=False)
    return tuple(sorted({usual, *(parts for parts in even if parts == 1 or parts * blocks <= FEW_BLOCKS)}))


def _parts(problem: BackwardProblem, *, uneven: bool) -> tuple[int, ...]:
    """Return values of `head_parts`: all that divide the heads of a group, and with `uneven` all others up to 16."""
    heads = problem.heads_per_group
    return tuple(parts for parts in range(1, heads + 1) if heads % parts == 0 or (uneven and parts <= _MOST_UNEVEN))


def _heuristic_parts(problem: BackwardProblem, params: BackwardParams) -> int:
    """Return the parts with the shortest estimated time."""
    uneven = not (problem.key_lengths or problem.segments) and problem.rules.left is None
    return min(
        _parts(problem, uneven=uneven), key=lambda parts: _time(problem, dataclasses.replace(params, head_parts=parts))
    )


def _time(problem: BackwardProblem, params: BackwardParams) -> float:
    """Return the estimated time of the first kernel, in steps of one block of keys."""
    if problem.key_lengths or problem.segments:
        return hidden_time(problem, params)
    if problem.rules.left is not None:
        return window_time(problem, params)
    if problem.rules.right is None:
        return full_time(problem, params)
    time = order_of(problem, params).time
    return time if problem.heads_per_group % params.head_parts == 0 else (1 + _UNEVEN_GAIN) * time


def _arguments_reason(call: AttentionCall) -> str | None:
    for name, dim in (("query", call.query[3]), ("value", call.value[3])):
        if dim % 8 or dim > _LARGEST_DIM:
            return (
                f"{name} has head_dim {dim}; 'mosaic_gpu' supports multiples of 8 up to {_LARGEST_DIM}; "
                "pad head_dim with zeros, or use 'xla'."
            )
    if not all((*call.query, *call.key, *call.value)):
        return f"query has shape {call.query} and key {call.key}; 'mosaic_gpu' needs sizes above 0; use 'xla'."
    if call.rules.scale == 0:
        return "softmax_scale is 0; 'mosaic_gpu' divides by it; use 'xla'."
    if call.bias is not None and max(call.query[3], call.value[3]) > _LARGEST_DIM_WITH_BIAS:
        return (
            f"bias has a gradient in 'mosaic_gpu' up to head_dim {_LARGEST_DIM_WITH_BIAS}; query has {call.query[3]} "
            f"and value {call.value[3]}; use 'cudnn' or 'xla'."
        )
    if call.deterministic and _shares_bias(call):
        return (
            f"bias has shape {call.bias}; 'mosaic_gpu' adds up the gradient of a bias that examples or heads share in "
            "nondeterministic order, and deterministic=True excludes that; broadcast the bias, or use 'xla'."
        )
    return None


def _shares_bias(call: AttentionCall) -> bool:
    """Return whether examples or heads share a bias, so that its gradient is a sum over them."""
    return call.bias is not None and call.bias[:2] != (call.query[0], call.query[2])


def _head_parts_fault(problem: BackwardProblem, params: BackwardParams) -> str | None:
    if params.head_parts > problem.heads_per_group:
        return f"head_parts must be at most {problem.heads_per_group}, the heads of a group, got {params.head_parts}."
    return None


def _division_fault(problem: BackwardProblem, params: BackwardParams) -> str | None:
    columns = dquery_columns(problem, params)
    if problem.bias is not None and params.division == "products":
        return "division='products' does not compute the gradient of a bias; use division='keys'."
    if params.form == "split" or (params.q_block == 64 * params.warpgroups and params.division == "keys"):
        return None
    if params.division == "keys" and params.q_block != 64:
        return f"q_block must be 64 or {64 * params.warpgroups}, as warpgroups divide dQ's rows; got {params.q_block}."
    if params.q_block != 64:
        return f"q_block must be 64 with division='products' and form='fused', got {params.q_block}."
    if sum(columns) != problem.head_dim or any(width % 32 for width in columns):
        return f"{params.warpgroups} warpgroups cannot divide the {problem.head_dim} columns of dQ."
    return None


def _shared_fault(problem: BackwardProblem, params: BackwardParams) -> str | None:
    blocks = [key_block_buffers(problem, params)]
    if params.form == "split":
        blocks.append(query_block_buffers(problem, params))
    largest = max(map(shared_bytes, blocks))
    if largest > SHARED_MEMORY:
        return f"{params} needs {largest} bytes of shared memory; a block has {SHARED_MEMORY}; use fewer stages."
    return None


def _register_fault(problem: BackwardProblem, params: BackwardParams) -> str | None:
    fused, tile = params.form == "fused", params.q_block
    widths = [columns if fused else 0 for columns in dquery_columns(problem, params)]
    if params.division == "products":
        sums = [tile + problem.value_dim + widths[0], tile + problem.head_dim + widths[1]]
    else:  # dQ takes the place of the scores
        sums = [max(2 * tile, widths[0]) + problem.head_dim + problem.value_dim]
    needed = [(max(sums), params.warpgroups)]
    if params.form == "split":
        needed.append((2 * params.kv_block + problem.head_dim, params.q_warpgroups))
    # 128 threads share 64 rows: a thread has one number for two columns.
    for columns, warpgroups in needed:
        if columns // 2 > _SUM_REGISTERS[warpgroups]:
            return (
                f"{params} needs {columns // 2} accumulator registers per thread; with {warpgroups} warpgroups "
                f"{_SUM_REGISTERS[warpgroups]} are available."
            )
    return None


def _split(q_stages: int, dout_stages: int) -> BackwardParams:
    # Two stages of keys: 27 gradients at D136 to D256 took 8 to 24 % less time than with one.
    return BackwardParams(
        form="split",
        division="products",
        q_stages=q_stages,
        dout_stages=dout_stages,
        kv_block=64,
        kv_stages=2,
        q_warpgroups=2,
    )
