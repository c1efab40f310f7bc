# SPDX-License-Identifier: Apache-2.0
"""Which calls the backward runs, with which parameters: all of it told from shapes, before anything is compiled."""

from __future__ import annotations

import dataclasses

from ejkernel.kernels._hopper import MULTIPROCESSORS
from ejkernel.kernels.flash_attention.common import AttentionCall

from .availability import SHARED_MEMORY, unavailable
from .backward_buffers import dquery_columns, key_block_buffers, query_block_buffers, shared_bytes
from .backward_params import BackwardParams
from .backward_problem import Problem, padded_dim, problem_of

_LARGEST_DIM = 256
# Wider heads have room in registers only as division='products', which computes no gradient of a bias.
_LARGEST_DIM_WITH_BIAS = 128
_LEAST_KEYS = MULTIPROCESSORS * 128  # of all heads together: a block of threads for each multiprocessor
_LEAST_BLOCKS = 250  # nearly two for each, of which one may be long and the other short
# Of a thread that computes, by how many warpgroups do, less what addresses and a tile's numbers take at least.
# That is 32 of what it has: with 16, parameters passed that spilled.
_SUM_REGISTERS = {1: 208, 2: 208, 3: 128}


def unsupported_reason(call: AttentionCall) -> str | None:
    """Return why the backward does not run `call`, and what would; `None` if it does."""
    return unavailable(call) or _arguments_reason(call)


def params_fault(call: AttentionCall, params: BackwardParams) -> str | None:
    """Return why `call`, which is supported, cannot run with `params`; `None` if it can.

    No parameters make warpgroups wait for each other in a circle: the loader fills both rings in the order in which all
    others empty them, and what one computing warpgroup waits for the other has computed a step before.
    """
    problem = problem_of(call)
    return (
        _parts_fault(problem, params)
        or _division_fault(problem, params)
        or _shared_fault(problem, params)
        or _register_fault(problem, params)
    )


def is_deterministic(call: AttentionCall, params: BackwardParams) -> bool:
    """Return whether gradients repeat bit by bit: nothing is added up in memory, where the order is left to chance."""
    return params.form == "split" and not _shares_bias(call)


def heuristic(call: AttentionCall) -> BackwardParams:
    """Return the parameters to begin with, which were best, or nearly, on the shapes that were measured."""
    head_dim, value_dim = padded_dim(call.query[3]), padded_dim(call.value[3])
    wide = max(head_dim, value_dim)
    if wide <= 64:
        choices = [BackwardParams(q_block=64)]
        if not call.rules.dropout_rate:  # which takes registers
            choices.insert(0, BackwardParams(q_block=128))
    elif wide <= 128:
        choices = [BackwardParams(), BackwardParams(dout_stages=1)]
    elif head_dim + value_dim <= 320:
        choices = [dataclasses.replace(_split(2, 2), kv_stages=2), BackwardParams(division="products"), _split(2, 1)]
    else:
        choices = [_split(2, 2), _split(2, 1), _split(1, 1)]
    # The fused form adds dQ up in memory, in an order that is left to chance.
    if call.deterministic:
        choices = [_split(2, 2), _split(2, 1), _split(1, 1)]
        choices[:0] = [
            dataclasses.replace(params, division="keys", kv_stages=2) for params in choices[:2] if wide <= 128
        ]
    fitting = [params for params in choices if params_fault(call, params) is None]
    params = fitting[0] if fitting else space(call)[0]
    problem = problem_of(call)
    enough = (parts for parts in _parts(problem) if parts * _key_blocks(problem, params) >= _LEAST_BLOCKS)
    return dataclasses.replace(params, head_parts=next(enough, problem.heads_per_group))


def is_preferred(call: AttentionCall) -> bool:
    """Return whether it was faster than cuDNN on one H200, which `benchmarks/attention.py` compares it with."""
    problem, dim = problem_of(call), min(call.query[3], call.value[3])
    if problem.bias is not None:
        # One with an element for every score took 646 us with its gradient, where cuDNN took 1,685 us.
        return problem.bias_whole
    # A block of threads owns keys of one head at least: where those are few, most of the chip is idle.
    if call.query[1] < 512 or problem.batch * problem.heads * problem.keys < _LEAST_KEYS:
        return False
    masks = call.attention_mask is not None or call.query_lengths or call.key_lengths
    hides = masks or call.rules.right is not None
    # At head_dim 128, and nothing hidden, the two were within 1 % of each other.
    return dim > 128 or (dim >= 64 and (hides or (dim < 128 and call.query[1] >= 1024)))


def space(call: AttentionCall) -> tuple[BackwardParams, ...]:
    """Return all parameters worth measuring for `call`."""
    wide = max(padded_dim(call.query[3]), padded_dim(call.value[3]))
    by_products = ("products", 2, 64)
    divisions = [("keys", 2, 128), ("keys", 2, 64), ("keys", 1, 64)] if wide <= 64 else [("keys", 2, 64), by_products]
    found = []
    # Wider ones do not fit in the registers of warpgroups that have both dK and dV of their keys.
    for division, warpgroups, q_block in divisions if wide <= 128 else [by_products]:
        first = BackwardParams(division=division, warpgroups=warpgroups, q_block=q_block)
        fused = [dataclasses.replace(first, q_stages=a, dout_stages=b) for a, b in ((2, 2), (2, 1), (1, 1), (3, 3))]
        found += fused
        found += [
            dataclasses.replace(params, form="split", kv_block=keys, kv_stages=stages, q_warpgroups=2)
            for params in fused[:2]
            for keys, stages in ((64, 2), (128, 2), (64, 1))
        ]
    found = [dataclasses.replace(params, head_parts=parts) for params in found for parts in _tried_parts(call, params)]
    return tuple(params for params in found if params_fault(call, params) is None)


def _tried_parts(call: AttentionCall, params: BackwardParams) -> tuple[int, ...]:
    """Return numbers of parts that are worth measuring: one alone where blocks are enough without."""
    problem = problem_of(call)
    blocks = _key_blocks(problem, params)
    return tuple(parts for parts in _parts(problem) if parts == 1 or (parts - 1) * blocks < 2 * _LEAST_BLOCKS)


def _parts(problem: Problem) -> tuple[int, ...]:
    """Return into how many parts the heads of a group may be divided."""
    heads = problem.heads_per_group
    return tuple(parts for parts in range(1, heads + 1) if heads % parts == 0)


def _key_blocks(problem: Problem, params: BackwardParams) -> int:
    return problem.batch * problem.groups * -(-problem.keys // params.keys)


def _arguments_reason(call: AttentionCall) -> str | None:
    for name, dim in (("query", call.query[3]), ("value", call.value[3])):
        if dim % 8 or dim > _LARGEST_DIM:
            return (
                f"{name} has head_dim {dim}, and 'mosaic_gpu' takes multiples of 8 up to {_LARGEST_DIM}; "
                "pad head_dim with zeros, or use 'xla'."
            )
    if not all((*call.query, *call.key, *call.value)):
        return f"query has shape {call.query} and key {call.key}, and 'mosaic_gpu' needs sizes above 0; use 'xla'."
    if call.rules.scale == 0:
        return "softmax_scale is 0, which 'mosaic_gpu' divides by; use 'xla'."
    if call.bias is not None and max(call.query[3], call.value[3]) > _LARGEST_DIM_WITH_BIAS:
        return (
            f"bias is available with the gradient of 'mosaic_gpu' up to head_dim {_LARGEST_DIM_WITH_BIAS}, and query "
            f"has {call.query[3]} and value {call.value[3]}; use 'cudnn' or 'xla'."
        )
    if call.deterministic and _shares_bias(call):
        return (
            f"bias has shape {call.bias}, and 'mosaic_gpu' adds up the gradient of a bias that examples or heads share "
            "in an order that is left to chance, which deterministic rules out; broadcast the bias, or use 'xla'."
        )
    return None


def _shares_bias(call: AttentionCall) -> bool:
    """Return whether examples or heads share a bias, so that its gradient is a sum over them."""
    return call.bias is not None and call.bias[:2] != (call.query[0], call.query[2])


def _parts_fault(problem: Problem, params: BackwardParams) -> str | None:
    if problem.heads_per_group % params.head_parts:
        return f"head_parts must divide the {problem.heads_per_group} heads of a group, got {params.head_parts}."
    return None


def _division_fault(problem: Problem, params: BackwardParams) -> str | None:
    columns = dquery_columns(problem, params)
    if problem.bias is not None and params.division == "products":
        return "division='products' does not compute the gradient of a bias; take division='keys'."
    if params.form == "split" or (params.q_block == 64 * params.warpgroups and params.division == "keys"):
        return None
    if params.division == "keys" and params.q_block != 64:
        return f"q_block must be 64 or {64 * params.warpgroups}, as warpgroups divide dQ's rows; got {params.q_block}."
    if params.q_block != 64:
        return f"q_block must be 64 with division='products' and form='fused', got {params.q_block}."
    if sum(columns) != problem.head_dim or any(width % 32 for width in columns):
        return f"{params.warpgroups} warpgroups cannot divide the {problem.head_dim} columns of dQ."
    return None


def _shared_fault(problem: Problem, params: BackwardParams) -> str | None:
    blocks = [key_block_buffers(problem, params)]
    if params.form == "split":
        blocks.append(query_block_buffers(problem, params))
    largest = max(map(shared_bytes, blocks))
    if largest > SHARED_MEMORY:
        return f"{params} takes {largest} bytes of shared memory, and a block has {SHARED_MEMORY}; take fewer stages."
    return None


def _register_fault(problem: Problem, params: BackwardParams) -> str | None:
    fused, tile = params.form == "fused", params.q_block
    widths = [columns if fused else 0 for columns in dquery_columns(problem, params)]
    if params.division == "products":
        sums = [tile + problem.value_dim + widths[0], tile + problem.head_dim + widths[1]]
    else:  # dQ takes the place of the scores
        sums = [max(2 * tile, widths[0]) + problem.head_dim + problem.value_dim]
    needed = [(max(sums), params.warpgroups)]
    if params.form == "split":
        needed.append((2 * params.kv_block + problem.head_dim, params.q_warpgroups))
    # 64 rows over 128 threads: of two columns a thread has one number.
    for columns, warpgroups in needed:
        if columns // 2 > _SUM_REGISTERS[warpgroups]:
            return (
                f"{params} keeps {columns // 2} sums in a thread, and with {warpgroups} warpgroups there is room for "
                f"{_SUM_REGISTERS[warpgroups]}."
            )
    return None


def _split(q_stages: int, dout_stages: int) -> BackwardParams:
    return BackwardParams(
        form="split",
        division="products",
        q_stages=q_stages,
        dout_stages=dout_stages,
        kv_block=64,
        kv_stages=1,
        q_warpgroups=2,
    )
