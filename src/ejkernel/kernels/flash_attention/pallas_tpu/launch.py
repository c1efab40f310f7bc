# SPDX-License-Identifier: Apache-2.0
"""Around the kernels: blocks that divide the padded lengths, ids that hide padding, and the layout of arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel import compat
from ejkernel.kernels._varying import unify_varying
from ejkernel.kernels._vector_memory import Parts, memory_to_pass, up
from ejkernel.kernels.flash_attention._tpu import heads_first, heads_last, segment_ids, without_rest
from ejkernel.kernels.flash_attention.common import (
    EMPTY_ROW_LSE,
    Gradients,
    Operands,
    Residuals,
    Rules,
)

from . import backward as backward_kernels
from . import forward as forward_kernel
from . import memory
from .numbers import LOG2E, balanced, divisor
from .params import BackwardParams, ForwardParams
from .walk import Plan, Sight


class Lengths(NamedTuple):
    """The lengths of queries and keys."""

    queries: int
    keys: int


def forward_plan(lengths: Lengths, rules: Rules, params: ForwardParams) -> tuple[Sight, Plan]:
    """Return the keys that queries see, and the sizes of a kernel that owns queries."""
    sight = Sight(offset=lengths.keys - lengths.queries, before=rules.left, after=rules.right)
    sizes = (params.block_q, params.chunk, params.unroll, params.rows, params.strip, params.resident)
    return sight, _plan(lengths.queries, lengths.keys, sight, sizes)


def backward_plan(lengths: Lengths, rules: Rules, params: BackwardParams) -> tuple[Sight, Plan]:
    """Return which queries each key sees, and the sizes of the kernel that owns keys."""
    sight = Sight(offset=lengths.queries - lengths.keys, before=rules.right, after=rules.left)
    sizes = (params.block_kv, params.chunk, params.unroll, params.block_kv, params.strip, params.resident)
    return sight, _plan(lengths.keys, lengths.queries, sight, sizes)


def _plan(rows: int, columns: int, sight: Sight, sizes: tuple[int, int, int, int, int, int | None]) -> Plan:
    block, chunk, unroll, height, strip, resident = sizes
    block = balanced(rows, block)
    chunk = balanced(columns, chunk) if sight.everything else divisor(block, min(chunk, up(columns)))
    part = up(columns, chunk) if resident is None else min(up(resident, chunk), up(columns, chunk))
    return Plan(
        block=block,
        blocks=-(-rows // block),
        columns=up(columns, part),
        part=part,
        chunk=chunk,
        unroll=unroll,
        rows=divisor(block, height),
        strip=divisor(block, strip),
    )


def forward(
    operands: Operands, rules: Rules, params: ForwardParams, *, with_lse: bool = True
) -> tuple[jax.Array, jax.Array | None]:
    """Return the output, and the log-sum-exp `[batch, heads, queries]`."""
    operands = unify_varying(operands)
    lengths = _lengths(operands)
    sight, plan = forward_plan(lengths, rules, params)
    padded = Lengths(plan.block * plan.blocks, plan.columns)
    arrays, ids = _arrays(operands, padded), _ids(operands, rules, padded)
    own = {"segmented": ids is not None, "sum_by_product": params.sum_by_product}
    size = memory.of_forward(_dims(operands), (sight, plan), rules, **own)

    def run() -> Any:
        return forward_kernel.forward(
            arrays,
            ids,
            rules,
            sight,
            plan,
            sum_by_product=params.sum_by_product,
            with_lse=with_lse,
            memory=_memory(operands, size),
        )

    out, *lse = compat.launches.unchecked(run, operands.query)
    out = heads_last(out, lengths.queries)
    return out, lse[0][:, :, 0, : lengths.queries] if lse else None


def backward(
    operands: Operands,
    residuals: Residuals,
    dout: jax.Array,
    rules: Rules,
    params: BackwardParams,
    dlse: jax.Array | None = None,
) -> Gradients:
    """Return the gradients of query, key and value."""
    operands, (out, lse), dout, dlse = unify_varying((operands, residuals, dout, dlse))
    delta = jnp.einsum("bqhd,bqhd->bhq", out, dout, preferred_element_type=jnp.float32)
    rows = (lse, dout.astype(operands.query.dtype), delta if dlse is None else delta - dlse)
    lengths = _lengths(operands)
    sight, plan = backward_plan(lengths, rules, params)
    padded = Lengths(plan.columns, plan.block * plan.blocks)
    arrays, ids = (*_arrays(operands, padded), *_rows(rows, padded)), _ids(operands, rules, padded)
    own = {"fused": params.query is None, "segmented": ids is not None, "transpose": params.transpose}
    size = memory.of_keys(_dims(operands), (sight, plan), rules, **own)

    def run() -> Any:
        return backward_kernels.backward_of_keys(
            arrays,
            None if ids is None else ids[::-1],
            rules,
            sight,
            plan,
            fused=params.query is None,
            transpose=params.transpose,
            memory=_memory(operands, size),
        )

    *dquery, dkey, dvalue = compat.launches.unchecked(run, operands.query)
    found = dquery[0] if params.query is None else _gradient_of_query(operands, rows, rules, params.query)
    dkey, dvalue = (heads_last(x, lengths.keys) for x in (dkey, dvalue))
    return heads_last(found, lengths.queries), dkey, dvalue, None


def _gradient_of_query(operands: Operands, rows: tuple[Any, ...], rules: Rules, params: ForwardParams) -> Any:
    sight, plan = forward_plan(_lengths(operands), rules, params)
    padded = Lengths(plan.block * plan.blocks, plan.columns)
    arrays, ids = (*_arrays(operands, padded), *_rows(rows, padded)), _ids(operands, rules, padded)
    size = memory.of_queries(_dims(operands), (sight, plan), rules, segmented=ids is not None)

    def run() -> Any:
        return backward_kernels.backward_of_queries(arrays, ids, rules, sight, plan, memory=_memory(operands, size))

    return compat.launches.unchecked(run, operands.query)


def _memory(operands: Operands, parts: Parts) -> compat.launches.KernelMemory:
    """Return the memory of the launch; the chip is unknown here."""
    return memory_to_pass(memory.need_of(parts), operands[:3])


def _lengths(operands: Operands) -> Lengths:
    return Lengths(operands.query.shape[1], operands.key.shape[1])


def _dims(operands: Operands) -> memory.Dims:
    query, key, value = operands[:3]
    return memory.Dims(query.shape[3], value.shape[3], query.shape[2] // key.shape[2], query.dtype.itemsize)


def _arrays(operands: Operands, padded: Lengths) -> tuple[Any, ...]:
    key, value = (without_rest(x, operands.key_lengths) for x in (operands.key, operands.value))
    return (
        heads_first(operands.query, padded.queries),
        heads_first(key, padded.keys),
        heads_first(value, padded.keys),
    )


def _rows(rows: tuple[Any, ...], padded: Lengths) -> tuple[Any, ...]:
    """Return the output's cotangent, the log-sum-exp in powers of two, and the product of output and cotangent."""
    lse, dout, delta = rows
    more = ((0, 0), (0, 0), (0, padded.queries - lse.shape[2]))
    lse = jnp.pad(lse * LOG2E, more, constant_values=EMPTY_ROW_LSE)
    return heads_first(dout, padded.queries), lse[:, :, None], jnp.pad(delta, more)[:, :, None]


def _ids(operands: Operands, rules: Rules, padded: Lengths) -> tuple[jax.Array, jax.Array] | None:
    """Return `segment_ids` as the kernels take them: as rows."""
    found: tuple[jax.Array, jax.Array] | None = jax.tree.map(
        lambda ids: ids[:, None], segment_ids(operands, rules, padded)
    )
    return found
