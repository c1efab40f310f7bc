# SPDX-License-Identifier: Apache-2.0
"""The gradients of attention by our own kernels for Hopper, under any transformation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from ejkernel.kernels._varying import unify_varying
from ejkernel.kernels.flash_attention.common import Operands, Rules

from .backward_params import BackwardParams
from .visibility import dropout_words

Gradients = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]


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
        params: How to compute them; what `params_fault` has nothing against.
        interpret: How to simulate the kernels on a CPU (`InterpretGPUParams`); `None`: run them on a GPU.
    """
    # Words of rows in the place of the key: they have a batch axis, as all else has, to fold others into.
    operands = operands._replace(dropout_key=dropout_words(operands))
    operands, residuals, dout = unify_varying((operands, residuals, dout))

    @custom_vmap
    def pull(operands: Operands, residuals: Any, dout: jax.Array) -> tuple[jax.Array, ...]:
        from .backward_launch import gradients  # what it imports is not there in every environment

        with jax.enable_x64(False):  # the kernels count in int32
            found = gradients(operands, residuals, dout, rules, params, interpret)
        return tuple(x for x in found if x is not None)

    @pull.def_vmap
    def _folded(size: int, batched: Any, *args: Any) -> Any:
        operands: Operands = args[0]
        batch, bias = operands.query.shape[1 if batched[0].query else 0], operands.bias
        leaves, structure = jax.tree.flatten(args)
        mapped = jax.tree.leaves(batched)
        folded = [_fold(x, size, batch, is_mapped) for x, is_mapped in zip(leaves, mapped, strict=True)]
        found = [x.reshape(size, -1, *x.shape[1:]) for x in pull(*jax.tree.unflatten(structure, folded))]
        if bias is not None and bias.shape[1 if batched[0].bias else 0] < batch:
            # Folded, every example has a bias of its own; the gradient of the one that they shared is the sum.
            found[3] = found[3].sum(axis=1, keepdims=True)
        return tuple(found), (True,) * len(found)

    found = pull(operands, residuals, dout)
    dquery, dkey, dvalue = found[:3]
    return dquery, dkey, dvalue, None if operands.bias is None else found[3]


def _fold(x: jax.Array, size: int, batch: int, mapped: bool) -> jax.Array:
    """Merge the mapped axis into that of the batch; every example has its own of what all had in common."""
    x = x if mapped else jnp.broadcast_to(x, (size, *x.shape))
    x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
    return x.reshape(size * batch, *x.shape[2:])
