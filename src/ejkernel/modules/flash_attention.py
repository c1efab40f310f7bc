# SPDX-License-Identifier: Apache-2.0
"""`flash_attention`: softmax attention, by whichever implementation is the fastest for the call."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Array, Bool, Float, Int

from ejkernel.kernels.flash_attention._arguments import SlidingWindow
from ejkernel.kernels.flash_attention.operation import FlashAttention as FlashAttention
from ejkernel.kernels.flash_attention.operation import FlashAttentionConfig as FlashAttentionConfig
from ejkernel.kernels.flash_attention.operation import bucketed_flash_attention as _bucketed_flash_attention
from ejkernel.kernels.flash_attention.operation import flash_attention as _flash_attention

SegmentIds = Int[Array, "batch length"] | tuple[Int[Array, "batch queries"], Int[Array, "batch keys"]]


def flash_attention(
    query: Float[Array, "batch queries heads head_dim"],
    key: Float[Array, "batch keys groups head_dim"],
    value: Float[Array, "batch keys groups value_dim"],
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    bias: Float[Array, "*broadcastable"] | None = None,
    attention_mask: Bool[Array, "*broadcastable"] | None = None,
    segment_ids: SegmentIds | None = None,
    sliding_window: SlidingWindow | None = None,
    logits_soft_cap: float | None = None,
    implementation: str | Sequence[str] | None = None,
    bucket_lengths: bool = False,
    cfg: FlashAttentionConfig | None = None,
) -> Float[Array, "batch queries heads value_dim"]:
    """Softmax attention, with grouped key/value heads and every usual mask, without the matrix of scores in memory.

    A query that sees no key at all gives zeros, and has zero gradients.

    Args:
        query: Queries. `heads` must be a multiple of `groups`; head `i` reads key head `i // (heads // groups)`.
        key, value: Keys and values, of query's dtype.
        causal: Hide keys after the query; the last query is aligned with the last key.
        softmax_scale: Factor on the products of query and key; `None` means `head_dim ** -0.5`.
        bias: Added to the logits; broadcastable to `[batch, heads, queries, keys]`. It has a gradient.
        attention_mask: True where a key is visible; `[batch, keys]`, or four axes, broadcastable like `bias`.
        segment_ids: A query sees the keys of its own segment alone; one array for both, or a pair.
        sliding_window: A query sees so many keys before and after its own position; a pair is `(left, right)`, with
            `None` for no limit. With `causal` the right side is 0.
        logits_soft_cap: Squash scaled products into `(-cap, cap)` by `cap * tanh(x / cap)`, before the bias is added.
        implementation: Run this one (`xla`, `cudnn`), or one of these, the one to prefer first, or raise; `None` leaves
            the choice to the configuration.
        bucket_lengths: Run with what was tuned for lengths that are rounded up to powers of two, so that a program
            whose lengths vary is tuned once a power. Nothing is padded, and the result is the same.
        cfg: The configuration to run with, for this call and its gradient; `None` resolves one. Where it has no
            parameters for one of the two, they are the implementation's heuristic's.

    Returns:
        The output, in query's dtype; sums run in float32.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype or value.
        ConfigError: `cfg` names another implementation than `implementation`.
        UnsupportedError: `implementation` cannot run this call; the message says why. Where the platform is the
            reason, that is found when the program is lowered.
    """
    kernel = _bucketed_flash_attention if bucket_lengths else _flash_attention
    return kernel(
        query,
        key,
        value,
        bias,
        attention_mask,
        segment_ids,
        causal=causal,
        softmax_scale=softmax_scale,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        implementation=implementation,
        cfg=cfg,
    )
