# SPDX-License-Identifier: Apache-2.0
"""The backward kernels: blocks of keys against all queries, and in the split form blocks of queries against all keys.

Scores are recomputed in powers of two, minus the log-sum-exp. In the first kernel a tile is `[keys, queries]`, so that
the values of each query lie along a vector register's row.

Source: Dao, FlashAttention-2, arXiv:2307.08691.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel import compat
from ejkernel.kernels._vector_memory import LANES
from ejkernel.kernels.flash_attention.common import Rules

from .forward import compiler_params, id_specs, specs, when_first, when_last
from .numbers import LOG2E, NT, TN, column, dot, floor, least, most, wide
from .walk import Hide, Plan, Sight, Update, visible_chunks, walk


class Shapes(NamedTuple):
    """The sizes of one call of the first kernel, and its form."""

    batch: int
    groups: int
    repeats: int
    queries: int
    keys: int
    dims: tuple[int, int]
    fused: bool

    @property
    def keeps_all(self) -> bool:
        """Whether the sums of all keys stay in memory while the heads of a group follow each other."""
        return self.fused and self.repeats > 1


def backward_of_keys(
    arrays: tuple[Any, ...],
    ids: tuple[Any, Any] | None,
    rules: Rules,
    sight: Sight,
    plan: Plan,
    *,
    fused: bool,
    transpose: bool,
    memory: compat.launches.KernelMemory,
) -> tuple[Any, ...]:
    """Return the gradients of key and value, and before them that of the query if `fused`.

    Args:
        arrays: Query, key, value and the output's cotangent, `[batch, heads, length, dim]`. Then `[batch, heads, 1,
            queries]`: log-sum-exp in powers of two, and the row sums of output times cotangent, less the cotangent of
            log-sum-exp if it has one. All are padded.
        ids: The segment ids of keys and of queries, `[batch, 1, length]`; `None` without segments.
        rules: The rules.
        sight: The queries that see each key.
        plan: The sizes.
        fused: Whether to compute the query's gradient.
        transpose: See `BackwardParams`.
        memory: The limit on vector memory, and where the arrays are.
    """
    query, key, value = arrays[:3]
    (batch, heads, length, head_dim), groups = query.shape, key.shape[1]
    shapes = Shapes(batch, groups, heads // groups, length, key.shape[2], (head_dim, value.shape[3]), fused)
    grid = (batch, groups, *((shapes.repeats, plan.blocks) if fused else (plan.blocks, shapes.repeats, plan.parts)))
    in_specs, out_specs = _fused_specs(shapes, plan) if fused else _split_specs(shapes, sight, plan)
    scratch = [pltpu.VMEM((plan.block, head_dim), key.dtype)]
    kept = shapes.keys if shapes.keeps_all else plan.block
    scratch += [pltpu.VMEM((kept, dim), jnp.float32) for dim in shapes.dims]
    if fused:
        scratch.append(pltpu.VMEM((head_dim, length) if transpose else (length, head_dim), jnp.float32))
    static: dict[str, Any] = {"rules": rules, "sight": sight, "plan": plan, "shapes": shapes, "transpose": transpose}
    run = pl.pallas_call(
        functools.partial(_keys_kernel, segmented=ids is not None, **static),
        name="attention_backward" if fused else "attention_backward_keys",
        grid=grid,
        in_specs=in_specs if ids is not None else in_specs[:6],
        out_specs=out_specs,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (arrays[:3] if fused else arrays[1:3])],
        scratch_shapes=scratch,
        compiler_params=compiler_params(len(grid)),
    )
    return tuple(compat.launches.launched(run, (*arrays, *(ids or ())), memory))


def _fused_specs(shapes: Shapes, plan: Plan) -> tuple[list[Any], list[Any]]:
    """Return the specifications for a grid of batch, groups, heads of a group, and blocks of keys."""
    repeats, (dim, value_dim) = shapes.repeats, shapes.dims

    def rows(size: int) -> Any:
        return pl.BlockSpec((None, None, shapes.queries, size), lambda b, g, r, j: (b, g * repeats + r, 0, 0))

    def block(size: int) -> Any:
        return pl.BlockSpec((None, None, plan.block, size), lambda b, g, r, j: (b, g, j, 0))

    def written(size: int) -> Any:
        # a block is copied to the result whenever its index changes: it changes only with the last head
        return pl.BlockSpec(
            (None, None, plan.block, size), lambda b, g, r, j: (b, g, jnp.where(r == repeats - 1, j, 0), 0)
        )

    line = pl.BlockSpec((None, None, 1, shapes.queries), lambda b, g, r, j: (b, g * repeats + r, 0, 0))
    given = [rows(dim), block(dim), block(value_dim), rows(value_dim), line, line]
    given.append(pl.BlockSpec((None, 1, plan.block), lambda b, g, r, j: (b, 0, j)))
    given.append(pl.BlockSpec((None, 1, shapes.queries), lambda b, g, r, j: (b, 0, 0)))
    return given, [rows(dim), written(dim), written(value_dim)]


def _split_specs(shapes: Shapes, sight: Sight, plan: Plan) -> tuple[list[Any], list[Any]]:
    """Return the specifications for a grid of batch, groups, blocks of keys, heads of a group, and parts of queries."""
    repeats, (dim, value_dim) = shapes.repeats, shapes.dims

    def part(j: Any, i: Any) -> Any:
        if plan.parts == 1 or sight.everything:
            return i
        lo, _, _, hi = visible_chunks(sight, j * plan.block + sight.offset, plan)
        per_part = plan.part // plan.chunk
        # a block that no query sees has an empty range, maybe behind the last part
        return least(most(least(i, floor(hi - 1, per_part)), floor(lo, per_part)), plan.parts - 1)

    def rows(size: int) -> Any:
        return pl.BlockSpec((None, None, plan.part, size), lambda b, g, j, r, i: (b, g * repeats + r, part(j, i), 0))

    def block(size: int) -> Any:
        return pl.BlockSpec((None, None, plan.block, size), lambda b, g, j, r, i: (b, g, j, 0))

    line = pl.BlockSpec((None, None, 1, plan.part), lambda b, g, j, r, i: (b, g * repeats + r, 0, part(j, i)))
    given = [rows(dim), block(dim), block(value_dim), rows(value_dim), line, line]
    given.append(pl.BlockSpec((None, 1, plan.block), lambda b, g, j, r, i: (b, 0, j)))
    given.append(pl.BlockSpec((None, 1, plan.part), lambda b, g, j, r, i: (b, 0, part(j, i))))
    return given, [block(dim), block(value_dim)]


class _Inputs(NamedTuple):
    """References to the arrays of one grid step; `scaled` is the key times the scale."""

    query: Any
    key: Any
    value: Any
    dout: Any
    lse: Any
    delta: Any
    scaled: Any


class _Sums(NamedTuple):
    """References to the float32 sums; `dquery` is `None` in the split form."""

    dkey: Any
    dvalue: Any
    dquery: Any


def _keys_kernel(
    *refs: Any, rules: Rules, sight: Sight, plan: Plan, shapes: Shapes, transpose: bool, segmented: bool
) -> None:
    query, key, value, dout, lse, delta, *rest = refs
    ids = (rest[0], rest[1]) if segmented else None
    rest = rest[2 * segmented :]
    dquery_out: Any = rest.pop(0) if shapes.fused else None
    dkey_out, dvalue_out, scaled, *sums = rest
    inputs, total = (
        _Inputs(query, key, value, dout, lse, delta, scaled),
        _Sums(*sums, *([] if shapes.fused else [None])),
    )
    first, second = pl.program_id(2), pl.program_id(3)
    (head, block), part = ((first, second), 0) if shapes.fused else ((second, first), pl.program_id(4))
    here = pl.multiple_of(block * plan.block, plan.block) if shapes.keeps_all else 0
    own = pl.ds(here, plan.block)

    def start() -> None:
        for ref in total[:2]:
            ref[own, :] = jnp.zeros((plan.block, ref.shape[1]), jnp.float32)

    def start_query() -> None:
        total.dquery[...] = jnp.zeros(total.dquery.shape, jnp.float32)

    def finish() -> None:
        dkey_out[...] = (total.dkey[own, :] * rules.scale).astype(dkey_out.dtype)
        dvalue_out[...] = total.dvalue[own, :].astype(dvalue_out.dtype)

    def finish_query() -> None:
        found = jnp.transpose(total.dquery[...]) if transpose else total.dquery[...]
        dquery_out[...] = (found * rules.scale).astype(dquery_out.dtype)

    if shapes.fused:
        pl.when(block == 0)(start_query)
    _when(shapes.repeats == 1 or head == 0, plan.parts == 1 or part == 0, start)
    scaled[...] = (inputs.key[...].astype(jnp.float32) * (rules.scale * LOG2E)).astype(scaled.dtype)
    walk(sight, plan, (block, part), _update_of_keys(inputs, total, here, rules, transpose), ids)
    if shapes.fused:
        pl.when(block == plan.blocks - 1)(finish_query)
    _when(shapes.repeats == 1 or head == shapes.repeats - 1, plan.parts == 1 or part == plan.parts - 1, finish)


def _update_of_keys(inputs: _Inputs, total: _Sums, here: Any, rules: Rules, transpose: bool) -> Update:
    """Return what adds one tile of keys and queries to the sums; the block's sums start at `here`."""

    def update(keys: Any, queries: Any, hide: Hide | None) -> None:
        rows, cotangent = inputs.query[queries, :], inputs.dout[queries, :]
        scores, slope = _capped(dot(inputs.scaled[keys, :], rows, NT), rules)
        if hide is not None:
            scores = hide(scores)
        weights = jnp.exp2(scores - inputs.lse[:, queries])
        own = pl.ds(pl.multiple_of(here + keys.start, LANES), keys.size)
        total.dvalue[own, :] += dot(weights.astype(cotangent.dtype), cotangent)
        dscores = weights * (dot(inputs.value[keys, :], cotangent, NT) - inputs.delta[:, queries])
        dscores = (dscores if slope is None else dscores * slope).astype(rows.dtype)
        total.dkey[own, :] += dot(dscores, rows)
        if total.dquery is not None and transpose:
            total.dquery[:, queries] += dot(inputs.key[keys, :], dscores, TN)
        elif total.dquery is not None:
            total.dquery[queries, :] += dot(dscores, inputs.key[keys, :], TN)

    return update


def _when(one: Any, other: Any, do: Any) -> None:
    """Call `do` if both conditions hold, each of them `True` or traced."""
    conditions = [condition for condition in (one, other) if condition is not True]
    if not conditions:
        do()
    else:
        pl.when(conditions[0] & conditions[-1])(do)


def _capped(scores: Any, rules: Rules) -> tuple[Any, Any]:
    """Return scores after the soft cap, and the derivative of the cap; `None` without one."""
    if rules.soft_cap is None:
        return scores, None
    cap = rules.soft_cap * LOG2E
    share = jnp.tanh(scores * (1 / cap))
    return share * cap, 1 - share * share


def backward_of_queries(
    arrays: tuple[Any, ...],
    ids: tuple[Any, Any] | None,
    rules: Rules,
    sight: Sight,
    plan: Plan,
    *,
    memory: compat.launches.KernelMemory,
) -> Any:
    """Return the gradient of the query; arguments as for `backward_of_keys`, with `sight` and `plan` of the forward."""
    query, key, value = arrays[:3]
    (batch, heads, length, head_dim), value_dim = query.shape, value.shape[3]
    queries, keys, line = specs(heads // key.shape[1], sight, plan)
    in_specs = [queries(head_dim), keys(head_dim), keys(value_dim), queries(value_dim), line, line]
    if ids is not None:
        in_specs += id_specs(sight, plan)
    lines = pltpu.VMEM((plan.block, LANES), jnp.float32)
    scratch = [pltpu.VMEM((plan.block, head_dim), query.dtype), lines, lines]
    run = pl.pallas_call(
        functools.partial(_queries_kernel, rules=rules, sight=sight, plan=plan, segmented=ids is not None),
        name="attention_backward_queries",
        grid=(batch, heads, length // plan.block, plan.parts),
        in_specs=in_specs,
        out_specs=queries(head_dim),
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        scratch_shapes=[*scratch, pltpu.VMEM((plan.block, head_dim), jnp.float32)],
        compiler_params=compiler_params(4),
    )
    return compat.launches.launched(run, (*arrays, *(ids or ())), memory)


def _queries_kernel(*refs: Any, rules: Rules, sight: Sight, plan: Plan, segmented: bool) -> None:
    query, key, value, dout, lse, delta, *rest = refs
    ids = (rest[0], rest[1]) if segmented else None
    out, scaled, lse_column, delta_column, acc = rest[2 * segmented :]
    part = pl.program_id(3) if plan.parts > 1 else 0

    def start() -> None:
        scaled[...] = (query[...].astype(jnp.float32) * (rules.scale * LOG2E)).astype(scaled.dtype)
        lse_column[...] = column(lse[...])
        delta_column[...] = column(delta[...])
        acc[...] = jnp.zeros(acc.shape, jnp.float32)

    def update(rows: Any, columns: Any, hide: Hide | None) -> None:
        keys = key[columns, :]
        scores, slope = _capped(dot(scaled[rows, :], keys, NT), rules)
        if hide is not None:
            scores = hide(scores)
        weights = jnp.exp2(scores - wide(lse_column[rows, :], scores.shape[1]))
        pull = dot(dout[rows, :], value[columns, :], NT)
        dscores = weights * (pull - wide(delta_column[rows, :], scores.shape[1]))
        dscores = (dscores if slope is None else dscores * slope).astype(keys.dtype)
        acc[rows, :] += dot(dscores, keys)

    def finish() -> None:
        out[...] = (acc[...] * rules.scale).astype(out.dtype)

    when_first(part, plan, start)
    walk(sight, plan, (pl.program_id(2), part), update, ids)
    when_last(part, plan, finish)
