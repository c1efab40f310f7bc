# SPDX-License-Identifier: Apache-2.0
"""Entry points: they pack masks and biases for the kernels, launch these, and unpack the results."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.kernels._numbers import LOG2_E, LOWEST
from ejkernel.kernels._varying import unify_varying
from ejkernel.kernels.flash_attention._batches import fold_examples
from ejkernel.kernels.flash_attention.common import (
    EMPTY_ROW_LSE,
    Gradients,
    Operands,
    Residuals,
    Rules,
    describe,
    with_sinks,
)

from .backward_plan import BackwardProblem, backward_problem, bias_in_tiles
from .params import BackwardParams, ForwardParams
from .parts import backward_in_key_parts, backward_in_query_parts, forward_in_parts, sum_of_heads
from .plan import ForwardPlan, forward_plan
from .ranges import within_range
from .schedule import order_by_length, schedule
from .visibility import (
    Blocks,
    block_table,
    dropout_words,
    lengths_as_segments,
    packed,
    ranges_of_keys,
    ranges_of_queries,
)
from .wide_support import is_wide

_FEW_SCORES = 1 << 24  # of a call: its backward visits all tiles, also those that a mask hides

# Forward.


def forward(operands: Operands, rules: Rules, params: ForwardParams, *, interpret: Any = None) -> Residuals:
    """Return the output and the log-sum-exp.

    Args:
        operands: In float16 or bfloat16.
        rules: The static part of the call.
        params: Launch parameters that `params_fault` accepts.
        interpret: `InterpretGPUParams` to simulate the kernel on a CPU; `None` runs it on a GPU.
    """
    # Imported here, as below: Mosaic GPU is not available in every environment.
    if is_wide(describe(operands, rules)):
        from .wide import forward_of_wide

        out, lse = forward_of_wide(operands._replace(sinks=None), rules, params, interpret=interpret)
        return (out, lse) if operands.sinks is None else with_sinks(out, lse, operands.sinks)
    if params.alone:
        from .alone_launch import forward_alone

        return forward_alone(operands, rules, params, interpret=interpret)
    if params.key_parts > 1:
        whole = dataclasses.replace(params, key_parts=1)
        found = forward_in_parts(
            operands._replace(sinks=None),
            params.key_parts,
            lambda own: forward(own, rules, whole, interpret=interpret),
        )
        return found if operands.sinks is None else with_sinks(*found, operands.sinks)
    from .forward import launch
    from .forward_memory import ForwardInputs, ForwardOutputs

    operands, row_terms = _without_row_terms(lengths_as_segments(unify_varying(operands)), rules)
    plan = forward_plan(describe(operands, rules), params)
    # Rows of 16 bytes: a copy cannot move less.
    query, key, value = (_pad_axis(x, 3, 8) for x in operands[:3])
    types = ForwardOutputs(
        jax.ShapeDtypeStruct((*query.shape[:3], value.shape[3]), query.dtype),
        # In whole tiles: a copy with one axis is not clipped at the end of the array.
        jax.ShapeDtypeStruct((plan.batch, plan.heads, plan.row_tiles * plan.tile_rows), jnp.float32),
    )
    # A bias of rows shifts the log-sum-exp after the kernel, and only then can sinks be added.
    late = operands.sinks if any(x is not None for x in row_terms) else None
    if params.align_keys:
        key, value = _pad_axis(key, 3, 16), _pad_axis(value, 3, 16)
    extras = _extras(operands if late is None else operands._replace(sinks=None), plan)
    dealt: dict[str, Any]
    if plan.deals_by_length:
        dealt = {"order": order_by_length(plan, extras.get("table"), extras.get("key_lengths"))}
    else:
        dealt = {"schedule": schedule(plan)}
    inputs = ForwardInputs(query, key, value, **dealt, **extras)
    (out, lse), _ = unify_varying((launch(plan, inputs, types, interpret), operands))
    out, lse = _with_row_terms(out[..., : operands.value.shape[3]], lse[..., : plan.queries], *row_terms)
    return (out, lse) if late is None else with_sinks(out, lse, late)


_RowTerms = tuple[jax.Array | None, jax.Array | None]


def _without_row_terms(operands: Operands, rules: Rules) -> tuple[Operands, _RowTerms]:
    """Return the operands without bias and mask if these are constant along a row, and the removed bias and mask.

    Such a bias only shifts the log-sum-exp, and such a mask only empties rows: neither needs the kernel. Under a soft
    cap a bias does more, and is broadcast to all keys instead.
    """
    bias, mask, keys = operands.bias, operands.attention_mask, operands.key.shape[1]
    if keys == 1:  # an axis of 1 is then the axis of keys
        return operands, (None, None)
    if bias is not None and rules.soft_cap is not None and rules.cap_after_bias:
        bias = jnp.broadcast_to(bias, (*bias.shape[:3], keys))
    row_bias = bias if bias is not None and bias.shape[3] == 1 else None
    row_mask = mask if mask is not None and mask.shape[3] == 1 else None
    operands = operands._replace(
        bias=bias if row_bias is None else None, attention_mask=mask if row_mask is None else None
    )
    return operands, (row_bias, row_mask)


def _with_row_terms(
    out: jax.Array, lse: jax.Array, row_bias: jax.Array | None, row_mask: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    if row_bias is None and row_mask is None:
        return out, lse
    empty = lse == EMPTY_ROW_LSE
    if row_bias is not None:
        added = row_bias[..., 0].astype(jnp.float32)
        empty, lse = empty | (added == -jnp.inf), lse + added
    if row_mask is not None:
        empty = empty | ~row_mask[..., 0]
    return jnp.where(empty.transpose(0, 2, 1)[..., None], 0, out), jnp.where(empty, EMPTY_ROW_LSE, lse)


def _extras(operands: Operands, plan: ForwardPlan) -> dict[str, jax.Array]:
    """Return all `ForwardInputs` except query, key, value, schedule and order, by name."""
    block = plan.params.kv_block
    bias, mask, lengths = operands.bias, operands.attention_mask, operands.key_lengths
    extras: dict[str, Any] = {}
    if operands.sinks is not None:
        extras["sinks"] = operands.sinks.astype(jnp.float32)
    if lengths is not None:
        extras["key_lengths"] = jnp.clip(lengths, 0, plan.keys).astype(jnp.int32)
    if plan.mask:
        sizes = (plan.row_tiles * plan.tile_rows, -(-plan.keys // block) * block)
        extras["mask"] = packed(mask, sizes, 3)
    if plan.table:
        extras["table"] = block_table(operands, plan.rules, plan.tile_rows, block, extras.get("mask"))
    if operands.query_segments is not None and operands.key_segments is not None:
        # In whole tiles and blocks: a copy with one axis is not clipped at the end of the array.
        extras["query_segments"] = _pad_axis(operands.query_segments.astype(jnp.int32), 1, plan.tile_rows)[:, None]
        extras["key_segments"] = _pad_axis(operands.key_segments.astype(jnp.int32), 1, block)[:, None]
    if bias is not None and plan.bias:
        bias16 = bias.astype(bias.dtype if bias.dtype in (jnp.bfloat16, jnp.float16) else jnp.float32)
        extras["bias"] = _pad_axis(bias16, 3, 16 // bias16.dtype.itemsize)
    words = dropout_words(operands)
    if words is not None:
        extras["dropout"] = _pad_axis(words, 2, plan.tile_rows)
    if plan.key_bias or plan.key_mask:
        terms = [] if bias is None or not plan.key_bias else [bias.astype(jnp.float32)]
        if mask is not None and plan.key_mask:
            terms.append(
                jnp.where(mask, 0.0, -jnp.inf).astype(extras["bias"].dtype if plan.packs_mask else jnp.float32)
            )
        extras["key_bias"] = _pad_axis(sum(terms[1:], terms[0])[:, :, 0], 2, block, -jnp.inf)
    return extras


# Backward.


def backward(
    operands: Operands,
    residuals: Residuals,
    dout: jax.Array,
    rules: Rules,
    params: BackwardParams,
    *,
    raised: int | None = None,
    interpret: Any = None,
) -> Gradients:
    """Return the gradients of query, key, value and bias, in the operands' dtypes.

    Args:
        operands: The forward's.
        residuals: Output and log-sum-exp of any forward; rows that see no key have zero gradients.
        dout: Cotangent of the output.
        rules: The forward's.
        params: Launch parameters that `params_fault` accepts.
        raised: `BackwardProblem.raised`, if `dout` is so small that no gradient leaves the range of float16.
        interpret: `InterpretGPUParams` to simulate the kernels on a CPU; `None` runs them on a GPU.
    """
    if is_wide(describe(operands, rules)):
        from .wide import backward_of_wide

        return backward_of_wide(operands, residuals, dout, rules, params, interpret=interpret)
    if params.form == "alone":
        from .alone_launch import backward_alone

        return backward_alone(operands, dout, rules, params, raised=raised, interpret=interpret)
    if params.key_parts > 1 or params.query_parts > 1:
        whole, of_keys = dataclasses.replace(params, key_parts=1, query_parts=1), params.key_parts > 1
        own = dataclasses.replace(rules, partial=rules.partial or of_keys)

        def pull_part(operands: Operands, residuals: Residuals, dout: jax.Array) -> Gradients:
            return backward(operands, residuals, dout, own, whole, raised=raised, interpret=interpret)

        if of_keys:
            return backward_in_key_parts(operands, residuals, dout, params.key_parts, pull_part)
        return backward_in_query_parts(operands, residuals, dout, params.query_parts, pull_part)
    # Random words replace the key: they have a batch axis, like all other operands, into which `vmap` folds examples.
    operands = operands._replace(dropout_key=dropout_words(operands))
    operands, residuals, dout = unify_varying((operands, residuals, dout))

    def pull(operands: Operands, residuals: Residuals, dout: jax.Array) -> tuple[jax.Array, ...]:
        with jax.enable_x64(False):  # the kernels count in int32
            found = _gradients(operands, residuals, dout, rules, params, interpret, raised=raised)
        return tuple(x for x in found if x is not None)

    dquery, dkey, dvalue, *dbias = fold_examples(pull, lambda args: args[0].bias)(operands, residuals, dout)
    return dquery, dkey, dvalue, dbias[0] if dbias else None


def _gradients(
    operands: Operands,
    residuals: Residuals,
    dout: jax.Array,
    rules: Rules,
    params: BackwardParams,
    interpret: Any,
    *,
    raised: int | None,
) -> Gradients:
    """Return the gradients outside `vmap`; the operands have `dropout_words` in place of the dropout's key."""
    problem = dataclasses.replace(backward_problem(describe(operands, rules)), raised=raised or 0)
    dout, factor = within_range(operands, residuals[0], dout, rules, raised)
    inputs = _backward_inputs(operands, residuals, dout.astype(problem.dtype), problem, params)
    if factor is not None:
        # The kernels multiply their results: passes over these took up to a tenth of the backward.
        inputs = inputs._replace(factor=jnp.broadcast_to(factor.ravel(), problem.batch))
    found, dbias = _run_backward(inputs, operands, problem, params, interpret)
    if dbias is not None and not problem.bias_whole:
        dbias = dbias.swapaxes(2, 3)
    if dbias is not None and factor is not None:
        dbias = (dbias * factor).astype(dbias.dtype)
    dquery, dkey, dvalue = (
        x[:, : like.shape[1], :, : like.shape[3]] for x, like in zip(found, operands[:3], strict=True)
    )
    return dquery, dkey, dvalue, _bias_gradient(dbias, operands)


def _run_backward(
    inputs: Any, operands: Operands, problem: BackwardProblem, params: BackwardParams, interpret: Any
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array | None]:
    """Return the gradients of query, key and value, and the bias's sum, all of padded sizes."""
    from ejkernel.kernels._hopper.backend import backend_for
    from ejkernel.kernels._hopper.launch import unsliced

    from .backward_consumers import KeysKernel, ProductsKernel
    from .backward_keys import GradientSums
    from .backward_queries import QueriesKernel

    backend = backend_for(interpret)
    lengths = zip((problem.queries, problem.keys), _padded_lengths(params), strict=True)
    queries, keys = (-(-length // size) * size for length, size in lengths)
    shape, sizes = (problem.batch, queries, problem.heads, problem.head_dim), (queries, keys)
    fused = params.form == "fused"
    empty = GradientSums(
        # Of 850 microseconds of one gradient, filling this takes 40 and rounding it 50, both at the speed of memory.
        dquery=jnp.zeros(shape, jnp.float32) if fused else None,
        dbias=None if problem.bias is None else _empty_bias(problem, operands, params, sizes),
    )
    kernel = (KeysKernel if params.division == "keys" else ProductsKernel)(problem, params, backend)
    # Mask words lie along a tile's rows, which are keys here: a word holds 32 queries.
    mask = packed(operands.attention_mask, sizes, 2)
    hidden = mask if skips_hidden(problem) else None
    ranges = ranges_of_queries(operands, problem.rules, Blocks(queries=params.q_block, keys=params.keys), hidden)
    by_keys = unsliced(inputs._replace(ranges=jnp.asarray(ranges), mask=mask))

    def add_up(state: Any) -> None:
        places, gradients = state
        for place, gradient in zip(gradients, kernel.run(by_keys, places), strict=True):
            place[...] = gradient

    # `run_state` ends the references here: under `custom_jvp` JAX lowers no program that creates references.
    initial = (empty, [jnp.zeros(like.shape, like.dtype) for like in kernel.out_types(inputs)])
    sums, (dkey, dvalue) = unsliced(pl.run_state(add_up)(initial))
    dkey, dvalue = (sum_of_heads(x, params.head_parts) for x in (dkey, dvalue))
    if fused:
        # Scaled here, with the rounding: no block of threads knows when a sum is complete.
        scale = problem.gradient_scale
        if inputs.factor is not None:
            scale = scale * inputs.factor[:, None, None, None]
        dquery = (sums.dquery * scale).astype(problem.dtype)
    else:
        blocks = Blocks(queries=64 * params.q_warpgroups, keys=params.kv_block)
        ranges = ranges_of_keys(operands, problem.rules, blocks, hidden)
        # A tile's rows are queries here: a word holds 32 keys.
        mask = packed(operands.attention_mask, sizes, 3)
        by_queries = inputs._replace(ranges=jnp.asarray(ranges), mask=mask)
        dquery = QueriesKernel(problem, params, backend).run(by_queries)
    return (dquery, dkey, dvalue), sums.dbias


def skips_hidden(problem: BackwardProblem) -> bool:
    """Return whether tiles that a mask hides are found before the kernels, which takes several small kernels of XLA."""
    return problem.mask and problem.batch * problem.heads * problem.queries * problem.keys > _FEW_SCORES


def _empty_bias(
    problem: BackwardProblem, operands: Operands, params: BackwardParams, sizes: tuple[int, int]
) -> jax.Array:
    """Return the initial gradient of the bias: zeros, unless the kernel stores every tile."""
    assert problem.bias is not None  # the caller has checked
    if not problem.bias_whole:
        return jnp.zeros((*problem.bias, *sizes[::-1]), problem.bias_gradient_dtype)
    # The kernel does not store tiles that it skips.
    rules, hides = problem.rules, (operands.query_segments, operands.query_lengths, operands.key_lengths)
    skips = skips_hidden(problem) or any(x is not None for x in (*hides, rules.left, rules.right))
    make = jnp.zeros if skips else jax.lax.empty
    if not bias_in_tiles(problem, params):
        sizes = (problem.queries, -(-problem.keys // 8) * 8)
    return make((*problem.bias, *sizes), problem.bias_gradient_dtype)


def _padded_lengths(params: BackwardParams) -> tuple[int, int]:
    """Return the multiples for the padding of queries and keys: whole blocks of both kernels of the split form."""
    return math.lcm(params.q_block, 64 * params.q_warpgroups or 1), math.lcm(params.keys, params.kv_block or 1)


def _backward_inputs(
    operands: Operands,
    residuals: Residuals,
    dout: jax.Array,
    problem: BackwardProblem,
    params: BackwardParams,
) -> Any:
    """Return the `BackwardInputs` of both kernels, except for ranges and mask."""
    from .masks import BackwardInputs

    padded = _padded_lengths(params)
    arrays = (operands.query, operands.key, operands.value, dout)
    segments = zip((operands.query_segments, operands.key_segments), padded, strict=True)
    lengths, dropout = operands.key_lengths, operands.dropout_key
    fields = [
        *arrays,
        *_row_inputs(residuals, dout, problem, padded[0]),
        jnp.zeros((1, 1, 4), jnp.int32),
        *(None if x is None else _pad_axis(x.astype(jnp.int32), 1, size) for x, size in segments),
        None if lengths is None else lengths.astype(jnp.int32),
        _copied_bias(operands.bias, problem, params),
        None,
        None if dropout is None else _pad_axis(dropout, 2, padded[0]),
    ]
    return BackwardInputs._make([*fields, None])


def _copied_bias(bias: jax.Array | None, problem: BackwardProblem, params: BackwardParams) -> jax.Array | None:
    """Return a bias as the kernels copy it: in whole tiles, or in 16 bits, with rows of whole 16 bytes."""
    if bias is None:
        return None
    # Examples and heads may share a bias; queries and keys may not, because copies move tiles.
    bias = jnp.broadcast_to(bias.astype(problem.bias_dtype), (*bias.shape[:2], problem.queries, problem.keys))
    if not bias_in_tiles(problem, params):
        return _pad_axis(bias, 3, 8)
    queries, keys = _padded_lengths(params)
    return _pad_axis(_pad_axis(bias, 2, queries), 3, keys)


def _row_inputs(
    residuals: Residuals, dout: jax.Array, problem: BackwardProblem, q_block: int
) -> tuple[jax.Array, jax.Array]:
    """Return shift and delta of `BackwardInputs`; rows of the padding count as rows that see no key."""
    out, lse = residuals
    # Not an einsum: a program without a matrix product can be compiled on a machine without the device. It takes 40 of
    # 850 microseconds of one gradient, at the speed of memory.
    delta = (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(axis=3).transpose(0, 2, 1)
    shift = row_shift(_pad_axis(lse, 2, q_block, EMPTY_ROW_LSE), problem)
    return shift, _pad_axis(-delta * (1 - problem.rules.dropout_rate), 2, q_block)


def row_shift(lse: jax.Array, problem: BackwardProblem) -> jax.Array:
    """Return the number that turns a row's scores into exponents.

    Its unit is that of the products of query and key; with a soft cap, of logarithms to the base 2; with a bias, of the
    scores: if the lowest float hides a whole row, its log-sum-exp is that float, which any factor would make infinite.
    """
    # Below the logits of any finite padding: its rows have no other mask.
    unit = -1 / problem.rules.scale if problem.shift_in_scores else -LOG2_E if problem.bias is None else -1.0
    return jnp.where(lse == EMPTY_ROW_LSE, LOWEST, (lse - problem.raised / LOG2_E) * unit)


def _bias_gradient(total: jax.Array | None, operands: Operands) -> jax.Array | None:
    """Return the sum, of padded size, as the gradient of a bias of any broadcast shape."""
    if total is None or operands.bias is None:
        return None
    bias = operands.bias
    total = total[:, :, : operands.query.shape[1], : operands.key.shape[1]]
    axes = tuple(axis for axis in (2, 3) if bias.shape[axis] == 1 < total.shape[axis])
    return total.sum(axis=axes, keepdims=True).astype(bias.dtype)


def _pad_axis(x: jax.Array, axis: int, multiple: int, fill: float = 0) -> jax.Array:
    """Pad one axis to a multiple."""
    missing = -x.shape[axis] % multiple
    if not missing:
        return x
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)], constant_values=fill)
