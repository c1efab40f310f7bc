# SPDX-License-Identifier: Apache-2.0
"""cuDNN's fused attention, through the primitives that `jax.nn` binds."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import jax.numpy as jnp

from ejkernel.compat.programs import is_partitioned


class CudnnLengths(NamedTuple):
    """Lengths of queries and keys, as int32 arrays.

    Attributes:
        queries: `[batch]`; with offsets `[batch, segments]`, padded with -1.
        keys: The same for keys.
        offsets: `[batch, segments + 1]`, the start of each segment in both queries and keys, padded with -1.
    """

    queries: Any
    keys: Any
    offsets: Any = None


def cudnn_attention_forward(
    query: Any,
    key: Any,
    value: Any,
    bias: Any | None,
    *,
    scale: float,
    causal: bool,
    window: int,
    lengths: CudnnLengths | None = None,
    with_lse: bool = True,
) -> tuple[Any, ...]:
    """Run cuDNN's fused attention and return its output and the float32 log-sum-exp `[batch, heads, queries]`.

    This binds the primitives below `jax.nn.dot_product_attention`, which rounds the log-sum-exp to the output's dtype
    and cannot pass it to a custom backward.

    Args:
        query, key, value: `[batch, length, heads, head_dim]`.
        bias: `[batch or 1, heads or 1, queries, keys]`, of the query's dtype.
        scale: Factor on the product of query and key.
        causal: Mask later keys; the first query is aligned with the first key.
        window: The number of keys that a query sees, itself included; 0 means all. Requires `causal`.
        lengths: Positions past the lengths are not computed, and their results are uninitialised. With offsets, the
            log-sum-exp is `[batch * segments, heads, queries]`, each segment starting at its own first query.
        with_lse: Whether to return the log-sum-exp; without it cuDNN uses a kernel that does not write it.
    """
    static = _cudnn_parameters(scale, causal, window, (bias is not None, False), lengths) | {"is_training": with_lse}
    return tuple(_call_cudnn_attention("fwd", _cudnn_operands(query, key, value, bias, lengths), static))


def cudnn_attention_backward(
    operands: tuple[Any, Any, Any, Any | None],
    residuals: tuple[Any, Any],
    dout: Any,
    *,
    scale: float,
    causal: bool,
    window: int,
    bias_gradient: bool,
    lengths: CudnnLengths | None = None,
) -> tuple[Any, ...]:
    """Return cuDNN's gradients of query, key, value and, with `bias_gradient`, bias.

    Args:
        operands: Query, key, value and bias, as `cudnn_attention_forward` takes them.
        residuals: The output and log-sum-exp of the forward.
        dout: The cotangent of the output.
        scale, causal, window, lengths: As in the forward.
        bias_gradient: Whether to return the gradient of the bias, summed over its broadcast axes.
    """
    static = _cudnn_parameters(scale, causal, window, (operands[3] is not None, bias_gradient), lengths)
    out, stats = residuals
    return tuple(_call_cudnn_attention("bwd", (*_cudnn_operands(*operands, lengths), stats, out, dout), static))


def _cudnn_operands(
    query: Any, key: Any, value: Any, bias: Any | None, lengths: CudnnLengths | None
) -> tuple[Any, ...]:
    optional = [
        bias,
        *([None] * 4 if lengths is None else [*lengths[:2], lengths.offsets, lengths.offsets]),
        None,
        None,
    ]
    absent = jnp.zeros(0, query.dtype)  # in place of each omitted operand of the seven optional ones
    return (query, key, value, *(absent if x is None else x for x in optional))


def _cudnn_parameters(
    scale: float, causal: bool, window: int, biases: tuple[bool, bool], lengths: CudnnLengths | None
) -> dict[str, Any]:
    from jax._src.cudnn import fused_attention_stablehlo as module

    masks = ("NO_MASK", "CAUSAL") if lengths is None else ("PADDING", "PADDING_CAUSAL")
    return {
        "scale": scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": biases,
        "mask_type": module.MaskType[masks[causal]],
        "layout": module.AttentionLayout.BTNH.value,
        "sliding_window_length": window or None,
    }


def _call_cudnn_attention(direction: str, arrays: tuple[Any, ...], static: dict[str, Any]) -> Any:
    from jax._src.cudnn import fused_attention_stablehlo as module

    function = getattr(module, f"_dot_product_attention_{direction}_impl")
    has_score_mod = "score_mod" in inspect.signature(function).parameters  # since JAX 0.12
    if is_partitioned():  # this form tells XLA's partitioner how to shard it
        primitive = getattr(module, f"_dot_product_attention_{direction}_p_wrapper")
        return primitive.bind(*arrays, **static, **({"score_mod": None} if has_score_mod else {}))
    return function(*arrays, **static, **({"score_mod": None, "score_mod_args": ()} if has_score_mod else {}))
