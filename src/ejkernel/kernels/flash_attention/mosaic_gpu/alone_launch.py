# SPDX-License-Identifier: Apache-2.0
"""Entry points of the kernels of short sequences: they prepare the operands, and unpack the results."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._hopper.backend import backend_for
from ejkernel.kernels.flash_attention._batches import fold_examples
from ejkernel.kernels.flash_attention.common import Gradients, Operands, Residuals, Rules, describe

from .alone import BackwardKernel, ForwardKernel
from .alone_support import AlonePlan, alone_plan
from .alone_types import AloneInputs, in_base_2
from .params import BackwardParams, ForwardParams
from .parts import sum_of_heads
from .plan import ROWS
from .ranges import within_range

_ALIGNED = 8  # columns: a copy cannot move less than 16 bytes


def forward_alone(operands: Operands, rules: Rules, params: ForwardParams, *, interpret: Any = None) -> Residuals:
    """Return the output and the log-sum-exp; the arguments are those of `launch.forward`."""

    def attend(operands: Operands) -> tuple[jax.Array, ...]:
        plan = alone_plan(describe(operands, rules), params)
        with jax.enable_x64(False):  # the kernels count in int32
            out, lse = ForwardKernel(plan, backend_for(interpret)).run(_inputs(operands, None, plan))
        lse = lse.reshape(plan.batch, plan.heads, -1)[:, :, : plan.queries]
        return out[..., : operands.value.shape[3]], lse

    out, lse = fold_examples(attend, lambda args: args[0].bias, shared=True)(_by_example(operands))
    return out, lse


def backward_alone(
    operands: Operands,
    dout: jax.Array,
    rules: Rules,
    params: BackwardParams,
    *,
    raised: int | None = None,
    interpret: Any = None,
) -> Gradients:
    """Return the gradients of query, key, value and bias.

    The arguments are those of `launch.backward`, but the operands have the forward's sinks.
    """

    def pull(operands: Operands, dout: jax.Array) -> tuple[jax.Array, ...]:
        plan = alone_plan(describe(operands, rules), params, raised)
        with jax.enable_x64(False):
            factor = None
            if not plan.single:
                dout, factor = within_range(operands, None, dout, rules, raised)
            inputs = _inputs(operands, dout, plan)
            if factor is not None:
                inputs = inputs._replace(factor=jnp.broadcast_to(factor.ravel(), plan.batch))
            dquery, dkey, dvalue, *dbias = BackwardKernel(plan, backend_for(interpret)).run(inputs)
            found = [dquery, *(sum_of_heads(x, x.shape[2] // plan.groups) for x in (dkey, dvalue))]
        found = [x[..., : like.shape[3]] for x, like in zip(found, operands[:3], strict=True)]
        return *found, *(_gradient_of_bias(x, operands, plan) for x in dbias)

    dquery, dkey, dvalue, *dbias = fold_examples(pull, lambda args: args[0].bias)(_by_example(operands), dout)
    return dquery, dkey, dvalue, dbias[0] if dbias else None


def _by_example(operands: Operands) -> Operands:
    """Return the operands, all with a batch axis, into which `vmap` folds examples."""
    sinks = operands.sinks
    return operands._replace(sinks=None if sinks is None else sinks.astype(jnp.float32)[None], dropout_key=None)


def _inputs(operands: Operands, dout: jax.Array | None, plan: AlonePlan) -> AloneInputs:
    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(x if plan.single else x.astype(plan.dtype), [(0, 0)] * 3 + [(0, -x.shape[3] % _ALIGNED)])

    lengths = operands.key_lengths
    lengths = None if lengths is None else jnp.clip(lengths, 0, plan.keys).astype(jnp.int32)
    query, key, value = (padded(x) for x in operands[:3])
    given = {"key_lengths": lengths, "sinks": _sinks(operands, plan), "hidden": _hidden(operands, plan)}
    return AloneInputs(query, key, value, None if dout is None else padded(dout), bias=_bias(operands, plan), **given)


def _sinks(operands: Operands, plan: AlonePlan) -> jax.Array | None:
    """Return `AloneInputs.sinks`."""
    sinks = operands.sinks
    return None if sinks is None else jnp.repeat(sinks, plan.tokens, axis=1).reshape(len(sinks), -1, ROWS)


def _hidden(operands: Operands, plan: AlonePlan) -> jax.Array | None:
    """Return `AloneInputs.hidden`."""
    mask = operands.attention_mask
    return None if mask is None else _in_slabs(jnp.where(mask, jnp.float32(0), -jnp.inf), plan, mask.shape[2])


def _bias(operands: Operands, plan: AlonePlan) -> jax.Array | None:
    """Return `AloneInputs.bias`."""
    bias = operands.bias
    return None if bias is None else _in_slabs(in_base_2(bias.astype(jnp.float32)), plan, plan.queries)


def _in_slabs(x: jax.Array, plan: AlonePlan, rows: int) -> jax.Array:
    """Return terms of logits, `[batch or 1, heads or 1, rows, columns]`, as the kernel adds them to those of a bundle.

    If they have one row, it is that of all queries; a single query may have one for each head.
    """
    x = jnp.broadcast_to(x, (*x.shape[:2], rows, plan.keys))
    by_query = rows > 1 or (x.shape[1] > 1 and plan.sharing > 1)
    most = (plan.team * ROWS, plan.key_slabs * ROWS) if plan.together == 1 else (plan.tokens, plan.key_tokens)
    x = jnp.pad(x, [(0, 0), (0, 0), (0, most[0] - rows if by_query else 0), (0, most[1] - plan.keys)])
    if plan.together == 1:
        return x
    heads = plan.together if by_query else plan.key_heads
    x = jnp.repeat(x, heads, axis=1) if x.shape[1] == 1 else x
    x = x.reshape(len(x), -1, heads, *x.shape[2:])
    if by_query:
        own = jnp.asarray(_key_head_of(plan)[:, None] == np.arange(plan.key_heads))[:, None, :, None]
        x = jnp.where(own, x[:, :, :, :, None], 0).reshape(*x.shape[:2], ROWS, plan.key_rows)
    else:
        x = x.reshape(*x.shape[:2], 1, plan.key_rows)
    return jnp.pad(x, [(0, 0)] * 3 + [(0, ROWS - plan.key_rows)])


def _key_head_of(plan: AlonePlan) -> np.ndarray:
    """Return the key head of each head of a bundle."""
    return np.arange(plan.together) // plan.sharing


def _gradient_of_bias(terms: jax.Array, operands: Operands, plan: AlonePlan) -> jax.Array:
    """Return the sum of the kernel's terms, as the gradient of a bias of any broadcast shape."""
    bias: Any = operands.bias
    if plan.together > 1:
        terms = terms.reshape(*terms.shape[:2], plan.together, plan.tokens, plan.key_heads, plan.key_tokens)
        at = _key_head_of(plan)[:, None, None, None]
        terms = jnp.take_along_axis(terms, jnp.asarray(at)[None, None], axis=4)
        terms = terms.reshape(len(terms), plan.heads, plan.tokens, plan.key_tokens)
    terms = terms[:, :, : plan.queries, : plan.keys]
    axes = tuple(axis for axis, size in enumerate(bias.shape) if size == 1)
    return terms.sum(axis=axes, keepdims=True).astype(bias.dtype)
