# SPDX-License-Identifier: Apache-2.0
"""Attention by cuDNN's fused kernels, on NVIDIA GPUs."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel import compat, settings
from ejkernel.kernels._varying import unify_varying
from ejkernel.ops.utils.values.signature import is_known

from ._batches import fold_examples
from .common import (
    EMPTY_ROW_LSE,
    AttentionCall,
    AttentionImplementation,
    Gradients,
    Operands,
    Residuals,
    Rules,
    operands_of,
    scale_reason,
)

_AMD = re.compile(r"amd|radeon|instinct|:gfx\d")
_TOO_OLD = re.compile(r"(v100|t4|p100|titan|rtx_20\d\d)(_|$)")
_HOPPER_OR_LATER = re.compile(r"(h20|h100|h200|h800|gh200|b100|b200|b300|gb200|gb300|gb10|rtx_50\d\d|rtx_pro_\w+)(_|$)")

# The logit of a hidden key: far below all others, yet cuDNN can subtract two of them in its own precision.
_HIDDEN = {"bfloat16": -float(2 << 40), "float16": -float(2 << 14)}


class Cudnn(AttentionImplementation):
    """cuDNN's fused kernels, which choose their tiles themselves."""

    name = "cudnn"
    # "precision": 16-bit products are exact in float32
    features = frozenset(("query_lengths", "key_lengths", "deterministic", "precision"))

    def unsupported(self, call: AttentionCall) -> str | None:
        """See `unsupported_reason`."""
        return unsupported_reason(call)

    def attend(self, operands: Operands, rules: Rules, params: object = None) -> Residuals:
        """See `AttentionImplementation`."""
        operands = unify_varying(operands)
        total, lengths = _total_bias(operands.bias, operands), _both_lengths(operands)
        out, lse = _attended(operands, rules, total, lengths)
        if lengths is not None:
            counts, _ = _counting(operands)
            out = jnp.where(counts[:, :, None, None], out, 0)
            return out, jnp.where(counts[:, None], lse, EMPTY_ROW_LSE)
        if total is None:  # every query sees a key
            return out, lse
        # `<=` would count a row with NaN as not empty.
        empty = ~(lse > _HIDDEN[str(out.dtype)] / 2)
        out = jnp.where(empty.transpose(0, 2, 1)[..., None], 0, out)
        return out, jnp.where(empty, EMPTY_ROW_LSE, lse)

    def output(self, call: AttentionCall, /, *args: Any, params: Any) -> Any:
        """See `Implementation`; computes the log-sum-exp only if needed."""
        operands = operands_of(args)
        # A mask or a bias may leave empty rows, and `attend` recognises them by their log-sum-exp.
        if call.return_lse or any(array is not None for array in operands[3:]):
            return super().output(call, *args, params=params)
        return _attended(operands, call.rules, None, None, with_lse=False)[0]

    def differentiate(
        self, operands: Operands, residuals: Residuals, dout: jax.Array, rules: Rules, params: object = None
    ) -> Gradients:
        """See `AttentionImplementation`."""
        operands, residuals, dout = unify_varying((operands, residuals, dout))
        static = _static(operands, rules) | {"bias_gradient": operands.bias is not None}

        def pull(given: Any, residuals: Residuals, dout: jax.Array, lengths: Any) -> tuple[jax.Array, ...]:
            return compat.kernels.cudnn_attention_backward(given, residuals, dout, **_with_lengths(static, lengths))

        # JAX differentiates the cast, mask and broadcast of the bias before cuDNN.
        total, to_bias = jax.vjp(lambda bias: _total_bias(bias, operands), operands.bias)
        lengths, given = _both_lengths(operands), (*operands[:3], total)
        # Each example has a separate gradient, so the bias is broadcast to all of them.
        found = fold_examples(pull, lambda args: args[0][3])(
            given, residuals, dout.astype(operands.query.dtype), lengths
        )
        if lengths is not None:
            counts = _counting(operands)
            sides = zip(found, (counts[0], counts[1], counts[1]), strict=True)
            dquery, dkey, dvalue = (jnp.where(side[:, :, None, None], x, 0) for x, side in sides)
            return dquery, dkey, dvalue, None
        dquery, dkey, dvalue = found[:3]
        return dquery, dkey, dvalue, None if operands.bias is None else to_bias(found[3])[0]


def unsupported_reason(call: AttentionCall) -> str | None:
    """Return why cuDNN does not support `call`, with an alternative; `None` if it does."""
    if not is_known(*call.query, *call.key, *call.value):
        return "it needs shapes that are numbers, and this program is exported for many; use 'xla'"
    # Check the platform first: on an unsupported one, changing the arguments would not help.
    return platform_reason(call) or _arguments_reason(call) or _masking_reason(call) or _length_reason(call)


def is_hopper_or_later(device_fingerprint: str) -> bool:
    """Return whether a device is an NVIDIA GPU of the Hopper generation or later."""
    return _HOPPER_OR_LATER.search(device_fingerprint) is not None


def platform_reason(call: AttentionCall, name: str = "cudnn", *, hopper: bool = False) -> str | None:
    """Return why cuDNN does not run on the platform of the call; `None` if it does.

    Args:
        call: The call.
        name: The name of the implementation.
        hopper: Whether it needs a GPU of the Hopper generation or later.
    """
    device = call.device_fingerprint
    too_old = _TOO_OLD.search(device) or (hopper and device and not is_hopper_or_later(device))
    if call.platform not in (None, "gpu") or _AMD.search(device) or too_old:
        wanted = "Hopper (H100) or later" if hopper else "Ampere (A100) or later"
        return f"implementation={name!r} needs an NVIDIA GPU, {wanted}, and this call is for {call.place}; use 'xla'."
    if call.backward and call.deterministic and not settings.deterministic_ops():
        return (
            "deterministic is available with cuDNN's gradient only for a whole process, with "
            "XLA_FLAGS=--xla_gpu_deterministic_ops=true; set it, or use 'xla'."
        )
    if call.partitioned:
        return (
            f"implementation={name!r} in a program that XLA partitions would gather query, key and value on every "
            "device; call it inside jax.shard_map, or use 'xla'."
        )
    return None


def _arguments_reason(call: AttentionCall) -> str | None:
    if call.dtype not in _HIDDEN:
        return f"query has dtype {call.dtype}, and cuDNN takes bfloat16 and float16; cast it, or use 'xla'."
    if reason := scale_reason(call, "cuDNN"):
        return reason
    head_dim, value_dim = call.query[3], call.value[3]
    if value_dim != head_dim:
        return f"value has head_dim {value_dim} and query {head_dim}, and cuDNN is used for equal ones; use 'xla'."
    known = call.device_fingerprint  # an unknown GPU may be of any generation
    largest = 256 if not known or _HOPPER_OR_LATER.search(known) else 128
    if head_dim % 8 or head_dim > largest:
        return (
            f"query has head_dim {head_dim}, and cuDNN takes multiples of 8 up to {largest} on {known or 'a GPU'}; "
            "pad head_dim with zeros, or use 'xla'."
        )
    return None


def _masking_reason(call: AttentionCall) -> str | None:
    rules = call.rules
    lengths = call.query_lengths or call.key_lengths
    if lengths and (call.bias is not None or call.attention_mask is not None or rules.left is not None):
        return "lengths are not available with cuDNN beside bias, attention_mask or sliding_window; use 'xla'."
    if call.segments:
        return "segment_ids are not available with implementation='cudnn'; use 'cudnn_packed', or 'xla'."
    if rules.soft_cap is not None:
        return "logits_soft_cap is not available with cuDNN; use 'xla'."
    if rules.left is None and rules.right is None:
        return None
    if rules.right != 0:
        return "sliding_window is available with cuDNN only as (left, 0), or with causal=True; use 'xla'."
    if rules.left is not None and (call.bias is not None or call.attention_mask is not None):
        return "sliding_window is not available with cuDNN beside bias or attention_mask; use 'xla'."
    queries, keys = call.query[1], call.key[1]
    if queries != keys and not (queries == 1 and rules.left is None):
        return (
            f"query has length {queries} and key {keys}, and cuDNN aligns the first query with the first key where "
            "causal attention needs the last with the last; use 'xla'."
        )
    return None


def _length_reason(call: AttentionCall) -> str | None:
    queries, keys = call.query[1], call.key[1]
    if queries % 2 == 0 and keys % 2 == 0:
        return None
    if call.bias is not None or call.attention_mask is not None:
        return f"lengths must be even for cuDNN with bias or attention_mask, got {queries} and {keys}; use 'xla'."
    if call.backward:
        return f"lengths must be even for cuDNN's gradient, got {queries} and {keys}; use 'xla'."
    return None


def _static(operands: Operands, rules: Rules) -> dict[str, Any]:
    # A single query is the last position: causal attention hides nothing from it.
    causal = rules.right == 0 and operands.query.shape[1] > 1
    # cuDNN counts the query's own position as well.
    window = rules.left + 1 if causal and rules.left is not None else 0
    return {"scale": rules.scale, "causal": causal, "window": window}


def _attended(
    operands: Operands, rules: Rules, total: jax.Array | None, lengths: Any, *, with_lse: bool = True
) -> tuple[jax.Array, ...]:
    """Return cuDNN's output for the sum of bias and mask, and with `with_lse` the log-sum-exp."""
    static: dict[str, Any] = _static(operands, rules) | {"with_lse": with_lse}

    def attend(given: Any, lengths: Any) -> tuple[jax.Array, ...]:
        return compat.kernels.cudnn_attention_forward(*given, **_with_lengths(static, lengths))

    given = unify_varying((*operands[:3], total))
    return fold_examples(attend, lambda args: args[0][3], shared=True)(given, lengths)


def _total_bias(bias: jax.Array | None, operands: Operands) -> jax.Array | None:
    """Return the sum of bias and mask for cuDNN to add to the logits, `[batch or 1, heads or 1, q, k]`."""
    mask, query = operands.attention_mask, operands.query
    if bias is None and mask is None:
        return None
    hidden = jnp.asarray(_HIDDEN[str(query.dtype)], query.dtype)
    # A bias of minus infinity also hides a key: cuDNN returns zeros for rows with nothing else, as required.
    total = jnp.zeros((), query.dtype) if bias is None else bias.astype(query.dtype)
    if mask is not None:
        total = jnp.where(mask, total, hidden)
    return jnp.broadcast_to(total, (*total.shape[:2], query.shape[1], operands.key.shape[1]))


def _both_lengths(operands: Operands) -> compat.kernels.CudnnLengths | None:
    """Return the lengths of queries and keys for cuDNN, both or none, clipped to 1 and the full length."""
    given, batch = (operands.query_lengths, operands.key_lengths), operands.query.shape[0]
    if given[0] is None and given[1] is None:
        return None
    sizes = (operands.query.shape[1], operands.key.shape[1])
    pairs = zip(given, sizes, strict=True)
    return compat.kernels.CudnnLengths(
        *(jnp.full(batch, size, jnp.int32) if own is None else jnp.clip(own, 1, size) for own, size in pairs)
    )


def _with_lengths(static: dict[str, Any], lengths: Any) -> dict[str, Any]:
    return static if lengths is None else static | {"lengths": lengths}


def _counting(operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Return masks `[batch, length]`: queries that see a key, and visible keys; cuDNN leaves the others undefined."""
    given = (operands.query_lengths, operands.key_lengths)
    sizes = (operands.query.shape[1], operands.key.shape[1])
    batch = operands.query.shape[0]
    queries, keys = (
        jnp.ones((batch, size), bool) if own is None else jnp.arange(size, dtype=jnp.int32)[None] < own[:, None]
        for own, size in zip(given, sizes, strict=True)
    )
    return queries & keys[:, :1], keys & queries[:, :1]
