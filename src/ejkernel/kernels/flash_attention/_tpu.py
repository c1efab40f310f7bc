# SPDX-License-Identifier: Apache-2.0
"""Arrays of the attention kernels for TPUs, ours and JAX's, and calls and parameters that none of them takes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._varying import unify_varying
from ejkernel.kernels._vector_memory import LANES
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.utils.values.signature import is_known

from .common import HIDDEN_KEY, HIDDEN_QUERY, AttentionCall, Operands, Rules, hidden_past

_DTYPES = ("bfloat16", "float32")


def unsupported_reason(call: AttentionCall, name: str) -> str | None:
    """Return why the kernels of implementation `name` do not take `call`, and an alternative; `None` if they may."""
    if call.platform not in (None, "tpu"):
        return f"implementation={name!r} needs a TPU, and this call is for {call.place}; use 'xla'."
    sizes = (*call.query, *call.key, *call.value)
    if not is_known(*sizes) or 0 in sizes:
        return f"{name!r} needs lengths and heads that are known and not 0; use 'xla'."
    if call.dtype not in _DTYPES:
        return f"query has dtype {call.dtype}, and {name} takes bfloat16 and float32; cast it, or use 'xla'."
    for argument, given in (("bias", call.bias), ("attention_mask", call.attention_mask)):
        if given is not None:
            return f"{argument} is not available with implementation={name!r}; use 'xla'."
    if call.partitioned:
        return f"{name!r} in a program that XLA partitions would gather query, key and value; use 'xla'."
    return None


def check_blocks(params: Any, *names: str, optional: tuple[str, ...] = ()) -> None:
    """Check that blocks are multiples of 128; those in `optional` may be `None`.

    Raises:
        ConfigError: A block is not.
    """
    for name in (*names, *optional):
        value = getattr(params, name)
        if value is None and name in optional:
            continue
        if type(value) is not int or value < LANES or value % LANES:
            raise ConfigError(f"{name} must be a multiple of {LANES}, got {value!r}; try 512.")


def segment_ids(operands: Operands, rules: Rules, padded: tuple[int, int]) -> tuple[jax.Array, jax.Array] | None:
    """Return ids of padded queries and keys that hide other segments, positions behind lengths, and the padding."""
    queries, keys = operands.query.shape[1], operands.key.shape[1]
    padding = padded[1] > keys and rules.right != 0  # causal attention does not reach it
    query_ids, key_ids, query_lengths, key_lengths = given = operands[5:9]
    if not padding and all(x is None for x in given):
        return None

    def hidden_behind(ids: Any, lengths: Any, count: int, size: int, hidden: int) -> jax.Array:
        found = hidden_past(ids, lengths, (operands.query.shape[0], count), hidden)
        found = jnp.pad(found, ((0, 0), (0, size - count)), constant_values=hidden)
        return unify_varying((found, operands.query))[0]

    return (
        hidden_behind(query_ids, query_lengths, queries, padded[0], HIDDEN_QUERY),
        hidden_behind(key_ids, key_lengths, keys, padded[1], HIDDEN_KEY),
    )


def without_rest(x: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """Return an array with zeros behind the lengths: a weight of zero does not cancel a NaN."""
    if lengths is None:
        return x
    inside = jnp.arange(x.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
    return jnp.where(inside[:, :, None, None], x, 0)


def heads_first(x: jax.Array, length: int) -> jax.Array:
    """Pad the sequence to this length, and return the array with heads before it."""
    return jnp.swapaxes(jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, 0))), 1, 2)


def heads_last(x: jax.Array, length: int) -> jax.Array:
    """Crop the sequence to this length, and return the array with heads after it."""
    return jnp.swapaxes(x[:, :, :length], 1, 2)
