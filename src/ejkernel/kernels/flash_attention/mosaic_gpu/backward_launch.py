# SPDX-License-Identifier: Apache-2.0
"""The backward's launches: arrays are brought into the form that the kernels read, and back."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.kernels.flash_attention.common import Operands, Rules, describe

from .backward_by_keys import KeysKernel
from .backward_by_products import ProductsKernel
from .backward_by_queries import QueriesKernel
from .backward_key_blocks import Sums
from .backward_params import BackwardParams
from .backward_problem import Inputs, Problem, pad_axis, problem_of, row_inputs
from .backward_visibility import Blocks, Visibility, ranges_of_keys, ranges_of_queries
from .machine import Hopper, Interpreter, Machine
from .visibility import packed

Gradients = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]
_BY_KEY_BLOCKS = {"keys": KeysKernel, "products": ProductsKernel}


def gradients(
    operands: Operands,
    residuals: tuple[jax.Array, jax.Array],
    dout: jax.Array,
    rules: Rules,
    params: BackwardParams,
    interpret: Any,
) -> Gradients:
    """See `backward`; no axis is mapped over an array, and the dropout's key has become `dropout_words`."""
    problem = problem_of(describe(operands, rules))
    machine = Hopper() if interpret is None else Interpreter(interpret)
    inputs = _inputs(operands, residuals, dout.astype(problem.dtype), problem, _padded_lengths(params))
    found, dbias = _run(inputs, operands, problem, params, machine)
    dquery, dkey, dvalue = (
        x[:, : like.shape[1], :, : like.shape[3]] for x, like in zip(found, operands[:3], strict=True)
    )
    if dbias is not None and not problem.bias_whole:
        dbias = dbias.swapaxes(2, 3)
    return dquery, dkey, dvalue, _bias_gradient(dbias, operands)


def _run(
    inputs: Inputs, operands: Operands, problem: Problem, params: BackwardParams, machine: Machine
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array | None]:
    """Return the gradients of query, key and value, and the bias's sum, all of padded sizes."""
    lengths = zip((problem.queries, problem.keys), _padded_lengths(params), strict=True)
    queries, keys = (-(-length // size) * size for length, size in lengths)
    shape, sizes = (problem.batch, queries, problem.heads, problem.head_dim), (queries, keys)
    fused = params.form == "fused"
    empty = Sums(
        # Of 850 microseconds of one gradient, to fill this takes 40, and to round it 50, both at the memory's speed.
        dquery=jnp.zeros(shape, jnp.float32) if fused else None,
        dbias=None if problem.bias is None else _empty_bias(problem, operands, sizes),
    )
    kernel = _BY_KEY_BLOCKS[params.division](problem, params, machine)
    # Words lie along a tile's rows, which are keys here: a word is of 32 queries.
    mask = packed(operands.attention_mask, sizes, 2)
    visibility = _visibility(operands, problem, mask)
    ranges = ranges_of_queries(visibility, Blocks(queries=params.q_block, keys=params.keys))
    by_keys = inputs._replace(ranges=jnp.asarray(ranges), mask=mask)

    def add_up(state: Any) -> None:
        places, gradients = state
        for place, gradient in zip(gradients, kernel.run(by_keys, places), strict=True):
            place[...] = gradient

    # References that end here: under `custom_jvp` JAX lowers no program that makes some for itself.
    initial = (empty, [jnp.zeros(like.shape, like.dtype) for like in kernel.out_types(inputs)])
    sums, (dkey, dvalue) = pl.run_state(add_up)(initial)
    dkey, dvalue = (_sum_of_parts(x, params.head_parts) for x in (dkey, dvalue))
    if fused:
        # Scaled once, with the rounding: no block knows when a sum is complete.
        dquery = (sums.dquery * problem.gradient_scale).astype(problem.dtype)
    else:
        ranges = ranges_of_keys(visibility, Blocks(queries=64 * params.q_warpgroups, keys=params.kv_block))
        # Here a tile's rows are queries: a word is of 32 keys.
        mask = packed(operands.attention_mask, sizes, 3)
        by_queries = inputs._replace(ranges=jnp.asarray(ranges), mask=mask)
        dquery = QueriesKernel(problem, params, machine).run(by_queries)
    return (dquery, dkey, dvalue), sums.dbias


def _sum_of_parts(x: jax.Array, parts: int) -> jax.Array:
    """Return `[batch, keys, groups * parts, dim]` with the parts of each group added up."""
    if parts == 1:
        return x
    split = x.reshape(*x.shape[:2], -1, parts, x.shape[3])
    # In float32, so that each part is rounded once and their sum once.
    return split.astype(jnp.float32).sum(axis=3).astype(x.dtype)


def _empty_bias(problem: Problem, operands: Operands, sizes: tuple[int, int]) -> jax.Array:
    """Return what the gradient of the bias is added to, or stored over: zeros, unless every tile is stored over."""
    assert problem.bias is not None  # who asks has one
    if not problem.bias_whole:
        return jnp.zeros((*problem.bias, *sizes[::-1]), problem.bias_gradient_dtype)
    # Tiles that are skipped are not stored over.
    rules, hides = problem.rules, (operands.attention_mask, operands.query_segments, operands.query_lengths)
    skips = any(x is not None for x in (*hides, operands.key_lengths, rules.left, rules.right))
    make = jnp.zeros if skips else jax.lax.empty
    return make((*problem.bias, *sizes), problem.bias_gradient_dtype)


def _padded_lengths(params: BackwardParams) -> tuple[int, int]:
    """Return what the lengths of queries and of keys are padded to: whole blocks, of both kernels of the split form."""
    return math.lcm(params.q_block, 64 * params.q_warpgroups or 1), math.lcm(params.keys, params.kv_block or 1)


def _inputs(
    operands: Operands,
    residuals: tuple[jax.Array, jax.Array],
    dout: jax.Array,
    problem: Problem,
    padded: tuple[int, int],
) -> Inputs:
    """Return the inputs of both kernels, but for the ranges and the mask."""
    arrays = (operands.query, operands.key, operands.value, dout)
    dims = (problem.head_dim, problem.head_dim, problem.value_dim, problem.value_dim)
    segments = zip((operands.query_segments, operands.key_segments), padded, strict=True)
    bias, lengths, dropout = operands.bias, operands.key_lengths, operands.dropout_key
    if bias is not None:
        # Examples and heads may share a bias; queries and keys may not, for copies move tiles.
        bias = jnp.broadcast_to(bias.astype(problem.bias_dtype), (*bias.shape[:2], problem.queries, problem.keys))
    fields = [
        *(pad_axis(pad_axis(x, 1, 8), 3, dim) for x, dim in zip(arrays, dims, strict=True)),
        *row_inputs(residuals, dout, problem, padded[0]),
        jnp.zeros((1, 1, 4), jnp.int32),
        *(None if x is None else pad_axis(x.astype(jnp.int32), 1, size) for x, size in segments),
        None if lengths is None else lengths.astype(jnp.int32),
        None if bias is None else pad_axis(pad_axis(bias, 2, padded[0]), 3, padded[1]),
        None,
        None if dropout is None else pad_axis(dropout, 2, padded[0]),
    ]
    return Inputs._make(fields)


def _bias_gradient(total: jax.Array | None, operands: Operands) -> jax.Array | None:
    """Return the sum, of padded size, as the gradient of a bias of any broadcast shape."""
    if total is None or operands.bias is None:
        return None
    bias = operands.bias
    total = total[:, :, : operands.query.shape[1], : operands.key.shape[1]]
    axes = tuple(axis for axis in (2, 3) if bias.shape[axis] == 1 < total.shape[axis])
    return total.sum(axis=axes, keepdims=True).astype(bias.dtype)


def _visibility(operands: Operands, problem: Problem, mask: jax.Array | None) -> Visibility:
    return Visibility(
        queries=problem.queries,
        keys=problem.keys,
        rules=problem.rules,
        query_segments=operands.query_segments,
        key_segments=operands.key_segments,
        query_lengths=operands.query_lengths,
        key_lengths=operands.key_lengths,
        mask=mask,
    )
