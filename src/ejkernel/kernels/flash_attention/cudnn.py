# SPDX-License-Identifier: Apache-2.0
"""Attention by cuDNN's fused kernels, on NVIDIA GPUs."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from ejkernel import compat, settings
from ejkernel.kernels._varying import unify_varying
from ejkernel.ops.utils.values.signature import is_known

from .common import EMPTY_ROW_LSE, AttentionCall, AttentionImplementation, Operands, Rules, operands_of, scale_reason

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

    def attend(self, operands: Operands, rules: Rules, params: object = None) -> tuple[jax.Array, jax.Array]:
        """See `forward`."""
        return forward(operands, rules)

    def output(self, call: AttentionCall, /, *args: Any, params: Any) -> Any:
        """See `Implementation`; computes the log-sum-exp only if needed."""
        operands = operands_of(args)
        # A mask or a bias may leave empty rows, and `forward` recognises them by their log-sum-exp.
        if call.return_lse or any(array is not None for array in operands[3:]):
            return super().output(call, *args, params=params)
        return _attended(operands, call.rules, None, (None, None), with_lse=False)[0]

    def differentiate(
        self,
        operands: Operands,
        residuals: tuple[jax.Array, jax.Array],
        dout: jax.Array,
        rules: Rules,
        params: object = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """See `backward`."""
        return backward(operands, residuals, dout, rules)


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
        where = f"this call is for {device or call.platform}"
        return f"implementation={name!r} needs an NVIDIA GPU, {wanted}, and {where}; use 'xla'."
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


def forward(operands: Operands, rules: Rules) -> tuple[jax.Array, jax.Array]:
    """Return the output `[batch, queries, heads, head_dim]` and the log-sum-exp `[batch, heads, queries]`."""
    operands = unify_varying(operands)
    total, lengths = _total_bias(operands.bias, operands), _both_lengths(operands)
    out, lse = _attended(operands, rules, total, lengths)
    if lengths[0] is not None:
        counts, _ = _counting(operands)
        out = jnp.where(counts[:, :, None, None], out, 0)
        return out, jnp.where(counts[:, None], lse, EMPTY_ROW_LSE)
    if total is None:  # every query sees a key
        return out, lse
    # `<=` would count a row with NaN as not empty.
    empty = ~(lse > _HIDDEN[str(out.dtype)] / 2)
    out = jnp.where(empty.transpose(0, 2, 1)[..., None], 0, out)
    return out, jnp.where(empty, EMPTY_ROW_LSE, lse)


def _attended(
    operands: Operands, rules: Rules, total: jax.Array | None, lengths: tuple[Any, Any], *, with_lse: bool = True
) -> tuple[jax.Array, ...]:
    """Return cuDNN's output for the sum of bias and mask, and with `with_lse` the log-sum-exp."""
    operands = unify_varying(operands)
    static = _static(operands, rules) | {"with_lse": with_lse}

    @custom_vmap
    def attend(*arrays: Any) -> tuple[jax.Array, ...]:
        query, key, value, bias, *lengths = arrays
        return compat.cudnn_attention_forward(query, key, value, bias, **static, **_lengths(*lengths))

    @attend.def_vmap
    def _folded(size: int, batched: Any, *arrays: Any) -> Any:
        folded = [fold(x, size, b) for x, b in zip(arrays, batched, strict=True)]
        folded[3] = _fold_bias(arrays[3], size, batched[3], arrays[0].shape[-4])
        found = tuple(unfold(x, size) for x in attend(*folded))
        return found, (True,) * len(found)

    attended: tuple[jax.Array, ...] = attend(*operands[:3], total, *lengths)
    return attended


def backward(
    operands: Operands, residuals: tuple[jax.Array, jax.Array], dout: jax.Array, rules: Rules
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Return the gradients of query, key, value and bias; see `forward`."""
    operands, residuals, dout = unify_varying((operands, residuals, dout))
    static = _static(operands, rules) | {"bias_gradient": operands.bias is not None}

    @custom_vmap
    def pull(*arrays: Any) -> tuple[jax.Array, ...]:
        query, key, value, bias, out, lse, dout, *lengths = arrays
        given = (query, key, value, bias)
        return compat.cudnn_attention_backward(given, (out, lse), dout, **static, **_lengths(*lengths))

    @pull.def_vmap
    def _folded(size: int, batched: Any, *arrays: Any) -> Any:
        folded = [fold(x, size, b) for x, b in zip(arrays, batched, strict=True)]
        batch, bias = arrays[0].shape[-4], arrays[3]
        shared = bias is not None and bias.shape[-4] < batch
        if bias is not None:  # each example has a separate gradient, so broadcast the bias to all of them
            spread = jnp.broadcast_to(bias, (*bias.shape[:-4], batch, *bias.shape[-3:]))
            folded[3] = fold(spread, size, batched[3])
        found = [unfold(x, size) for x in pull(*folded)]
        if shared and len(found) == 4:
            found[3] = found[3].sum(axis=1, keepdims=True)
        return tuple(found), (True,) * len(found)

    # JAX differentiates the cast, mask and broadcast of the bias before cuDNN.
    total, to_bias = jax.vjp(lambda bias: _total_bias(bias, operands), operands.bias)
    lengths = _both_lengths(operands)
    found = pull(*operands[:3], total, *residuals, dout.astype(operands.query.dtype), *lengths)
    if lengths[0] is not None:
        counts = _counting(operands)
        sides = zip(found, (counts[0], counts[1], counts[1]), strict=True)
        dquery, dkey, dvalue = (jnp.where(side[:, :, None, None], x, 0) for x, side in sides)
        return dquery, dkey, dvalue, None
    return (*found[:3], to_bias(found[3])[0] if operands.bias is not None else None)


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


def _both_lengths(operands: Operands) -> tuple[jax.Array | None, jax.Array | None]:
    """Return the lengths of queries and keys for cuDNN, both or none, clipped to 1 and the full length."""
    given = (operands.query_lengths, operands.key_lengths)
    if given[0] is None and given[1] is None:
        return None, None
    batch, sizes = operands.query.shape[0], (operands.query.shape[1], operands.key.shape[1])
    full = (jnp.full(batch, size, jnp.int32) for size in sizes)
    queries, keys = (
        every if own is None else jnp.clip(own, 1, size) for own, every, size in zip(given, full, sizes, strict=True)
    )
    return queries, keys


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


def _lengths(queries: Any = None, keys: Any = None) -> dict[str, Any]:
    return {} if queries is None else {"lengths": compat.CudnnLengths(queries, keys)}


def fold(x: Any, size: int, batched: Any) -> Any:
    """Merge the axis of a `vmap` into the batch axis; `None` stays."""
    if x is None:
        return None
    x = x if batched else jnp.broadcast_to(x, (size, *x.shape))
    return x.reshape(size * x.shape[1], *x.shape[2:])


def _fold_bias(bias: jax.Array | None, size: int, batched: Any, batch: int) -> jax.Array | None:
    """Apply `fold` to a bias; one shared by all examples and the whole batch stays as it is."""
    if bias is None or (not batched and bias.shape[0] == 1):
        return bias
    spread = jnp.broadcast_to(bias, (*bias.shape[:-4], batch, *bias.shape[-3:]))
    folded: jax.Array = fold(spread, size, batched)
    return folded


def unfold(x: jax.Array, size: int) -> jax.Array:
    """Undo `fold`."""
    return x.reshape(size, -1, *x.shape[1:])
