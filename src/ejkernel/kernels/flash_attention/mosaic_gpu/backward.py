# SPDX-License-Identifier: Apache-2.0
"""The gradients of attention by our own kernels for Hopper."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._varying import unify_varying

from ..common import Operands, Rules
from .backward_by_keys import KeysKernel
from .backward_by_products import ProductsKernel
from .backward_by_queries import QueriesKernel
from .backward_params import BackwardParams
from .backward_problem import Inputs, Problem, pad_axis, problem_of, row_inputs
from .backward_visibility import Blocks, Visibility, ranges_of_keys, ranges_of_queries
from .machine import Hopper, Interpreter

Gradients = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]
_BY_KEY_BLOCKS = {"keys": KeysKernel, "products": ProductsKernel}


def backward(
    operands: Operands,
    residuals: tuple[jax.Array, jax.Array],
    dout: jax.Array,
    rules: Rules,
    params: BackwardParams,
    *,
    interpret: Any = None,
) -> Gradients:
    """Return the gradients of query, key, value and bias, in the operands' dtypes.

    Args:
        operands: As the forward had them.
        residuals: Output and log-sum-exp, of whichever forward computed them; rows that see no key have zero gradients.
        dout: Cotangent of the output.
        rules: As the forward had them.
        params: How to compute them; what `params_fault` refuses must not get here.
        interpret: How to simulate the kernels on a CPU (`InterpretGPUParams`); `None`: run them on a GPU.
    """
    operands, residuals, dout = unify_varying((operands, residuals, dout))
    dout = dout.astype(operands.query.dtype)
    problem = problem_of(operands, rules)
    machine = Hopper() if interpret is None else Interpreter(interpret)
    visibility = Visibility(
        queries=problem.queries,
        keys=problem.keys,
        rules=rules,
        query_segments=operands.query_segments,
        key_segments=operands.key_segments,
        mask=operands.attention_mask,
    )
    inputs = _inputs(operands, residuals, dout, problem, params)
    kernel = _BY_KEY_BLOCKS[params.division](problem, params, machine)
    ranges = ranges_of_queries(visibility, Blocks(queries=params.q_block, keys=params.keys))
    inputs = inputs._replace(ranges=jnp.asarray(ranges))
    if params.form == "fused":
        total = jax.new_ref(jnp.zeros(pad_axis(inputs.query, 1, params.q_block).shape, jnp.float32))
        dkey, dvalue = kernel.run(inputs, total)
        dquery = (total[...] * rules.scale).astype(problem.dtype)
    else:
        dkey, dvalue = kernel.run(inputs, None)
        ranges = ranges_of_keys(visibility, Blocks(queries=64 * params.q_warpgroups, keys=params.kv_block))
        dquery = QueriesKernel(problem, params, machine).run(inputs._replace(ranges=jnp.asarray(ranges)))
    found = zip((dquery, dkey, dvalue), operands[:3], strict=True)
    return (*(x[:, : like.shape[1], :, : like.shape[3]] for x, like in found), None)


def _inputs(
    operands: Operands,
    residuals: tuple[jax.Array, jax.Array],
    dout: jax.Array,
    problem: Problem,
    params: BackwardParams,
) -> Inputs:
    """Return the kernels' inputs but for the ranges, padded for both kernels of the split form."""
    arrays = (operands.query, operands.key, operands.value, dout)
    dims = (problem.head_dim, problem.head_dim, problem.value_dim, problem.value_dim)
    q_block, kv_block = (
        math.lcm(params.q_block, 64 * (params.q_warpgroups or 1)),
        math.lcm(params.keys, params.kv_block or 1),
    )
    segments = zip((operands.query_segments, operands.key_segments), (q_block, kv_block), strict=True)
    return Inputs(
        *(pad_axis(pad_axis(x, 1, 8), 3, dim) for x, dim in zip(arrays, dims, strict=True)),
        *row_inputs(residuals, dout, problem, q_block),
        jnp.zeros((1, 1, 4), jnp.int32),
        *(None if x is None else pad_axis(x, 1, size) for x, size in segments),
    )
