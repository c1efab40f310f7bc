# SPDX-License-Identifier: Apache-2.0
"""Float32 operands as float16, which has as many bits of mantissa as TF32, the default precision of products on GPUs.

Powers of two keep all numbers in the range of float16: one per example, so that `vmap` and batches give equal results.
Query and key share a factor that cancels in their product. The output is linear in the values, and all gradients are
linear in the cotangent of the output, so that their factors are undone in float32 afterwards.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels._numbers import power_of_two
from ejkernel.kernels.flash_attention.common import AttentionCall, Gradients, Operands, Residuals, Rules, describe

from .alone_support import alone_plan
from .launch import backward, forward
from .params import BackwardParams, ForwardParams
from .ranges import exponents_of

_LARGEST = 65504.0  # of float16
_ROOM = 2.0**15
# If a cotangent's sums over all rows fit in float16, one row's weights and gradients of scores have few digits left.
_RAISED = 8
_FEW = 1024  # rows that share keys, or keys
_SHORT = 1 << 22  # numbers of all arrays
LEAST_SCALE = 2.0**-12  # of the logits: the kernels store the gradients of query and key times it


class _Half(NamedTuple):
    """Operands in float16.

    Attributes:
        operands: The operands.
        query, value: The factors that they were multiplied with.
        largest_key: An upper bound of the magnitudes of the key.
        others: The exponents of other arrays.
    """

    operands: Operands
    query: jax.Array
    value: jax.Array
    largest_key: jax.Array
    others: list[jax.Array]


def digits_reason(call: AttentionCall) -> str | None:
    """Return why the gradients of float32 operands would have few digits; `None` if they have those of float16."""
    # Of 128 queries and keys: an error of 6e-4 at 2**-12, 1e-3 at 1e-4, and 1e-2 at 1e-5.
    if call.rules.scale >= LEAST_SCALE:
        return None
    return (
        f"softmax_scale is {call.rules.scale:g}, and below {LEAST_SCALE:.2g} the float32 gradients of 'mosaic_gpu', "
        "computed in float16, have few digits; use 'xla', or multiply query by a part of the scale."
    )


def forward_of_single(operands: Operands, rules: Rules, params: ForwardParams, *, interpret: Any = None) -> Residuals:
    """Return the output in float32 and the log-sum-exp, as `launch.forward`."""
    if params.alone and alone_plan(describe(operands, rules), params).single:
        return forward(operands, rules, params, interpret=interpret)  # the kernel converts its operands
    half = _half(operands)
    out, lse = forward(half.operands, rules, params, interpret=interpret)
    return out.astype(jnp.float32) / half.value, lse


def backward_of_single(
    operands: Operands, residuals: Residuals, dout: jax.Array, rules: Rules, params: BackwardParams, **options: Any
) -> Gradients:
    """Return the gradients in the operands' dtypes, as `launch.backward`, with its `options`."""
    if params.form == "alone" and alone_plan(describe(operands, rules), params).single:
        return backward(operands, residuals, dout, rules, params, **options)
    out, lse = residuals
    dout = _only(_counted(operands.query_lengths, dout.shape[1]), dout)
    half = _half(operands, dout, out if rules.partial else None)
    scaled = out * half.value, lse
    factor = _cotangent_factor(half, scaled[0], dout, rules)
    found = backward(half.operands, scaled, dout * factor, rules, params, raised=_RAISED, **options)
    dquery, dkey, dvalue, dbias = jax.tree.map(lambda x: x.astype(jnp.float32) / factor, found)
    if dbias is not None and operands.bias is not None:
        dbias = (dbias / half.value).astype(operands.bias.dtype)
    # One factor after the other: their products may be out of range of float32.
    return dquery / half.value * half.query, dkey / half.value / half.query, dvalue, dbias


def _half(operands: Operands, dout: jax.Array | None = None, out: jax.Array | None = None) -> _Half:
    """Return the operands in float16, and the exponents of a cotangent.

    `out` is the output of rows that also see other values, if these may be larger: the gradient of the scores is as
    large as these. With a factor of its values alone, the cotangent would need a factor with which the gradient of the
    values has no digits left.
    """
    axes, (query, key, value) = _axes(operands), _without_padding(operands)
    own, others = (query, key, value), [x for x in (dout, out) if x is not None]
    # In a program with the forward, the exponents of its operands are computed once.
    shares = sum(x.size for x in (*own, *others)) > _SHORT
    reads = [own, others] if shares else [(*own, *others)]
    of_query, of_key, of_value, *of_others = [of_array for read in reads for of_array in exponents_of(read, axes)]
    shift = (of_key - of_query) // 2
    at_query = power_of_two(shift)
    at_value = power_of_two(-(of_value if out is None else jnp.maximum(of_value, of_others[-1])))
    scaled = (query * at_query, key / at_query, value * at_value)
    halves = dict(zip(Operands._fields, map(_rounded, scaled), strict=False))
    largest_key = jnp.minimum(power_of_two(of_key - shift), _LARGEST)
    return _Half(operands._replace(**halves), at_query, at_value, largest_key, of_others)


def _without_padding(operands: Operands) -> tuple[jax.Array, ...]:
    """Return query, key and value with zeros past the lengths, and where a mask hides keys from all rows.

    The factors must not depend on them.
    """
    (query, key, value), mask = operands[:3], operands.attention_mask
    keys = key.shape[1]
    of_keys = _counted(operands.key_lengths, keys)
    if mask is not None and mask.shape[1:] == (1, 1, keys):
        of_keys = mask[:, 0, 0] if of_keys is None else of_keys & mask[:, 0, 0]
    return _only(_counted(operands.query_lengths, query.shape[1]), query), *(_only(of_keys, x) for x in (key, value))


def _counted(lengths: jax.Array | None, size: int) -> jax.Array | None:
    """Return whether each position is within the lengths, `[batch, size]`; `None` without lengths."""
    return None if lengths is None else jnp.arange(size, dtype=jnp.int32)[None] < lengths[:, None]


def _only(counted: jax.Array | None, x: jax.Array) -> jax.Array:
    return x if counted is None else jnp.where(counted[:, :, None, None], x, 0)


def _axes(operands: Operands) -> tuple[int, ...]:
    """Return the axes that share a factor: those of an example, or all, as a bias's gradient may be a sum over them."""
    return (1, 2, 3) if operands.bias is None else (0, 1, 2, 3)


def _rounded(x: jax.Array) -> jax.Array:
    """Return float16; only if query and key are both huge can a number be out of range, and is then the largest."""
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -_LARGEST, _LARGEST), x).astype(jnp.float16)


def _cotangent_factor(half: _Half, out: jax.Array, dout: jax.Array, rules: Rules) -> jax.Array:
    """Return the power of two for the cotangent with which no gradient can be out of range.

    The weights of a row add up to 1. Those of a column may add up to the number of queries, if all of them see only
    this key, so that its gradients are sums over all rows of the heads that share it.
    """
    first = power_of_two(-half.others[0])  # before its squares are summed
    norms = _norms(half, out, dout * first, rules)
    kept = 1 - rules.dropout_rate
    slope = 2 * norms.value / kept  # times the norm of a row's cotangent, it limits the gradient of the row's scores
    limits = (
        slope * norms.row * 2**_RAISED,
        slope * norms.row * rules.scale * half.largest_key,
        slope * norms.queries * rules.scale,
        norms.rows / kept,
    )
    bound: Any = functools.reduce(jnp.maximum, limits)
    return first * power_of_two(-jnp.frexp(bound / _ROOM)[1])


class _Norms(NamedTuple):
    """Upper bounds: of the norms of values and of rows of the cotangent, and of sums over the rows that share a key."""

    value: Any
    row: Any
    rows: Any  # the sum of the norms
    queries: Any  # the sum of the norms times those of the queries


def _norms(half: _Half, out: jax.Array, dout: jax.Array, rules: Rules) -> _Norms:
    """Return bounds for operands, an output and a cotangent; the largest magnitude of value and cotangent is below 1.

    For few rows and keys, the cotangent is not read: its bound is about four times as large, and three kernels fewer
    start. Bounds instead of the norms of query and value, too, would cost rows of small cotangents their digits.
    """
    (query, key, value), (queries, heads) = half.operands[:3], dout.shape[1:3]
    shares = heads // key.shape[2]
    is_small = max(queries * shares, key.shape[1]) <= _FEW

    def norms(x: jax.Array) -> jax.Array:
        # NaN in one example must not decide the factor of others.
        finite = jnp.where(jnp.isfinite(x), x, 0).astype(jnp.float32)
        return jnp.sqrt(jnp.square(finite).sum(axis=3))

    def largest(x: jax.Array) -> jax.Array:
        most = x.max(axis=(0, 1, 2) if 0 in _axes(half.operands) else (1, 2), initial=0)
        return most.reshape(-1, 1, 1, 1)

    def largest_sum(x: jax.Array) -> jax.Array:  # over the rows of the heads of a group
        return largest(x.reshape(*x.shape[:2], -1, shares).sum(axis=(1, 3))[:, None])

    most = largest(norms(value))
    rows = jnp.full(dout.shape[:3], math.sqrt(dout.shape[3]), jnp.float32) if is_small else norms(dout)
    if rules.partial:  # otherwise the output is a mean of these values
        most = jnp.maximum(most, largest(norms(out)))
    return _Norms(most, largest(rows), largest_sum(rows), largest_sum(rows * norms(query)))
