# SPDX-License-Identifier: Apache-2.0
"""The forward: arrays are brought into the form that the kernel reads."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._varying import unify_varying
from ejkernel.kernels.flash_attention.common import EMPTY_ROW_LSE, Operands, Rules, describe

from ._forward_plan import ForwardPlan, plan_of, swizzle, whole_dim
from .params import ForwardParams
from .visibility import block_table, dropout_words, lengths_as_segments, packed


def forward(
    operands: Operands, rules: Rules, params: ForwardParams, *, interpret: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Return the output `[batch, queries, heads, value_dim]` and the log-sum-exp `[batch, heads, queries]`.

    Args:
        operands: Of float16 or bfloat16.
        rules: The static part of the call.
        params: How to run it; what `params_fault` has nothing against.
        interpret: How to simulate it on a CPU (`InterpretGPUParams`); `None`: run it on a GPU.
    """
    from ._forward_kernel import launch  # needs what not every environment has
    from ._forward_types import Inputs, Outputs

    operands, by_row = _without_row_terms(lengths_as_segments(unify_varying(operands)), rules)
    plan = plan_of(describe(operands, rules), params)
    # Copies move whole tiles; `whole_dim(1)` is what all widths that the kernel has are multiples of.
    query, key, value = (_padded(_padded(x, 1, _TILE_ROWS), 3, whole_dim(1)) for x in operands[:3])
    types = Outputs(
        jax.ShapeDtypeStruct((*query.shape[:3], plan.value_dim), query.dtype),
        # Copies of one axis are not cut off where the array ends, so that this one has room for whole tiles.
        jax.ShapeDtypeStruct((plan.batch, plan.heads, plan.row_tiles * plan.tile_rows), jnp.float32),
    )
    out, lse = launch(plan, Inputs(query, key, value, **_extras(operands, plan)), types, interpret)
    return _with_row_terms(out[:, : plan.queries, :, : operands.value.shape[3]], lse[..., : plan.queries], *by_row)


_TILE_ROWS = 8  # of the tiles of shared memory, whole ones of which a copy moves
_RowTerms = tuple[jax.Array | None, jax.Array | None]


def _without_row_terms(operands: Operands, rules: Rules) -> tuple[Operands, _RowTerms]:
    """Return the operands without a bias and a mask that are the same for all keys, and these.

    Such a bias shifts the log-sum-exp and nothing else, and such a mask empties rows: neither needs the kernel. A bias
    that the soft cap is applied to does more, and is one of all keys.
    """
    bias, mask, keys = operands.bias, operands.attention_mask, operands.key.shape[1]
    # Where there is one key, a bias or mask of axis 1 is one of keys.
    if keys == 1:
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
    """Return all inputs but query, key and value, by name."""
    block = plan.params.kv_block
    bias, mask, lengths = operands.bias, operands.attention_mask, operands.key_lengths
    extras: dict[str, Any] = {}
    if lengths is not None:
        extras["key_lengths"] = jnp.clip(lengths, 0, plan.keys).astype(jnp.int32)
    if plan.mask:
        sizes = (plan.row_tiles * plan.tile_rows, -(-plan.keys // block) * block)
        extras["mask"] = packed(mask, sizes, 3)
    if plan.table:
        extras["table"] = block_table(operands, plan.rules, plan.tile_rows, block, extras.get("mask"))
    if operands.query_segments is not None and operands.key_segments is not None:
        # To whole tiles and blocks, as with the log-sum-exp: copies of one axis go on where the array ends.
        extras["query_segments"] = _padded(operands.query_segments.astype(jnp.int32), 1, plan.tile_rows)[:, None]
        extras["key_segments"] = _padded(operands.key_segments.astype(jnp.int32), 1, block)[:, None]
    if bias is not None and plan.bias:
        extras["bias"] = _in_tiles(bias.astype(_copied(bias.dtype)), block)
    words = dropout_words(operands)
    if words is not None:
        extras["dropout"] = _padded(words, 2, plan.tile_rows)
    if plan.key_bias or plan.key_mask:
        terms = [] if bias is None or not plan.key_bias else [bias.astype(jnp.float32)]
        if mask is not None and plan.key_mask:
            terms.append(jnp.where(mask, 0.0, -jnp.inf).astype(jnp.float32))
        extras["key_bias"] = _padded(sum(terms[1:], terms[0])[:, :, 0], 2, block)
    return extras


def _copied(dtype: Any) -> Any:
    """Return the dtype in which a bias is copied."""
    return jnp.dtype(dtype if dtype in (jnp.bfloat16, jnp.float16) else jnp.float32)


def _in_tiles(x: jax.Array, kv_block: int) -> jax.Array:
    """Return `x` with rows and keys in whole tiles of shared memory."""
    return _padded(_padded(x, 2, _TILE_ROWS), 3, swizzle(kv_block * x.dtype.itemsize) // x.dtype.itemsize)


def _padded(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    """Return `x` with zeros at the end of an axis, until its length is a multiple."""
    missing = -x.shape[axis] % multiple
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)]) if missing else x
