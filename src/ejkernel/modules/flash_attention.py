# SPDX-License-Identifier: Apache-2.0
"""`flash_attention`: softmax attention, with the fastest implementation for each call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
from jaxtyping import Array, Bool, Float, Int

from ejkernel.kernels._options import canonical_flag, within_32_bits
from ejkernel.kernels.flash_attention import _arguments as arguments
from ejkernel.kernels.flash_attention import _batches as batches
from ejkernel.kernels.flash_attention._arguments import SlidingWindow
from ejkernel.kernels.flash_attention._zigzag import from_zigzag as from_zigzag
from ejkernel.kernels.flash_attention._zigzag import to_zigzag as to_zigzag
from ejkernel.kernels.flash_attention.operation import FlashAttention as FlashAttention
from ejkernel.kernels.flash_attention.operation import FlashAttentionConfig as FlashAttentionConfig
from ejkernel.kernels.flash_attention.operation import bucketed_flash_attention as _bucketed_flash_attention
from ejkernel.kernels.flash_attention.operation import flash_attention as _flash_attention
from ejkernel.ops.core.types import Flag, Number
from ejkernel.ops.utils.messages.names import names_checked

from ._names import by_name

SegmentIds = Int[Array, "*batch length"] | tuple[Int[Array, "*batch queries"], Int[Array, "*batch keys"]]
Output = Float[Array, "*batch queries heads value_dim"]
LogSumExp = Float[Array, "*batch heads queries"]

# The names in JAX, flash-attn, PyTorch, Tokamax, xFormers, Flax and Pallas.
_NAMES_ELSEWHERE = by_name(
    {
        "query": "q",
        "key": "k",
        "value": "v",
        "causal": "is_causal",
        "softmax_scale": "scale sm_scale scaling logits_scale",
        "attention_mask": "mask",
        "use `attention_mask=` for a boolean mask, `bias=` for numbers to add.": "attn_mask",
        "bias": "attn_bias ab",
        "pass the slopes times the distances as `bias=`.": "alibi_slopes",
        "use `sliding_window=`, with None instead of -1 for no limit.": "window_size",
        "sliding_window": "local_window_size window",
        "logits_soft_cap": "softcap soft_cap logit_cap attn_logits_soft_cap",
        "dropout_rate": "dropout_p p",
        "dropout_key": "dropout_rng",
        "query_lengths": "query_seq_lengths q_seqlen q_lens",
        "key_lengths": "key_value_seq_lengths kv_seqlen kv_lens",
        "use `segment_ids=`, one array for both or a pair, `(of_queries, of_keys)`.": "q_segment_ids kv_segment_ids",
        "use `segment_ids=`, with a document number for each token.": "cu_seqlens_q cu_seqlens_k",
        "sinks": "s_aux softmax_aux attention_sink",
        "heads are grouped whenever keys have fewer of them than queries; leave it out.": "enable_gqa",
        "return_lse": "return_residual return_residuals save_residuals return_attn_probs",
        "logits are float32; leave it out.": "logits_dtype",
        "cfg": "block_sizes config",
        "implementation": "backend impl",
    }
)


class _Options(TypedDict, total=False):
    """The options of `flash_attention` that do not affect the type of its result."""

    causal: Flag
    softmax_scale: Number | None
    bias: Float[Array, "*broadcastable"] | None
    attention_mask: Bool[Array, "*broadcastable"] | None
    segment_ids: SegmentIds | None
    query_lengths: Int[Array, "*batch"] | None
    key_lengths: Int[Array, "*batch"] | None
    sinks: Float[Array, " heads"] | None
    sliding_window: SlidingWindow | None
    logits_soft_cap: Number | None
    soft_cap_after_bias: Flag
    dropout_rate: Number
    dropout_key: jax.Array | None
    precision: str | jax.lax.Precision | None
    deterministic: Flag
    axis_name: str | Sequence[str] | None
    zigzag: Flag
    gather_keys: Flag | None
    implementation: str | Sequence[str] | None
    bucket_lengths: bool
    cfg: FlashAttentionConfig | None


@overload
def flash_attention(
    query: Float[Array, "*batch queries heads head_dim"],
    key: Float[Array, "*batch keys groups head_dim"],
    value: Float[Array, "*batch keys groups value_dim"],
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> Output: ...


@overload
def flash_attention(
    query: Float[Array, "*batch queries heads head_dim"],
    key: Float[Array, "*batch keys groups head_dim"],
    value: Float[Array, "*batch keys groups value_dim"],
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Output, LogSumExp]: ...


@overload
def flash_attention(
    query: Float[Array, "*batch queries heads head_dim"],
    key: Float[Array, "*batch keys groups head_dim"],
    value: Float[Array, "*batch keys groups value_dim"],
    *,
    return_lse: Flag,
    **options: Unpack[_Options],
) -> Output | tuple[Output, LogSumExp]: ...


@names_checked(_NAMES_ELSEWHERE)
def flash_attention(
    query: Float[Array, "*batch queries heads head_dim"],
    key: Float[Array, "*batch keys groups head_dim"],
    value: Float[Array, "*batch keys groups value_dim"],
    *,
    causal: Flag = False,
    softmax_scale: Number | None = None,
    bias: Float[Array, "*broadcastable"] | None = None,
    attention_mask: Bool[Array, "*broadcastable"] | None = None,
    segment_ids: SegmentIds | None = None,
    query_lengths: Int[Array, "*batch"] | None = None,
    key_lengths: Int[Array, "*batch"] | None = None,
    sinks: Float[Array, " heads"] | None = None,
    sliding_window: SlidingWindow | None = None,
    logits_soft_cap: Number | None = None,
    soft_cap_after_bias: Flag = False,
    dropout_rate: Number = 0.0,
    dropout_key: jax.Array | None = None,
    precision: str | jax.lax.Precision | None = None,
    deterministic: Flag = False,
    return_lse: Flag = False,
    axis_name: str | Sequence[str] | None = None,
    zigzag: Flag = False,
    gather_keys: Flag | None = None,
    implementation: str | Sequence[str] | None = None,
    bucket_lengths: bool = False,
    cfg: FlashAttentionConfig | None = None,
) -> Output | tuple[Output, LogSumExp]:
    """Return softmax attention, with grouped key/value heads and the usual masks, without storing the score matrix.

    A query that sees no key has zero output and zero gradients. Any number of batch axes is accepted, including none.

    The backward needs the arguments, the output and the log-sum-exp. The latter two are named `flash_attention.out` and
    `flash_attention.residuals` for `jax.checkpoint`. With a policy that saves both, e.g.
    `jax.checkpoint_policies.save_only_these_names("flash_attention.out", "flash_attention.residuals")`, the backward
    does not recompute the forward.

    Args:
        query: Queries. `heads` must be a multiple of `groups`; head `i` reads key head `i // (heads // groups)`. An
            `ArgumentWarning` says if the axes seem to be `[*batch, heads, queries, head_dim]`.
        key, value: Keys and values, of query's dtype.
        causal: Hide keys after the query; the last query is aligned with the last key. If there are more queries than
            keys, the first queries see no key; an `ArgumentWarning` says so.
        softmax_scale: Factor on the products of query and key; `None` means `head_dim ** -0.5`.
        bias: Added to the logits; broadcastable to `[batch, heads, queries, keys]`. It has a gradient. To hide keys,
            use `attention_mask`, which is exact and faster. If all keys of a row have a bias such as -1e9, the row is
            the mean of all values, and its gradients, computed from a float32 log-sum-exp, are inaccurate.
        attention_mask: True where a key is visible; `[batch, keys]`, or four axes, broadcastable like `bias`.
        segment_ids: A query sees only keys of its own segment; one array for both, or a pair. Ids that do not fit in 32
            bits are hashed.
        query_lengths: Number of valid queries of each example; later queries see no key.
        key_lengths: Number of valid keys of each example; later keys are hidden. Lengths only mask: they do not shift
            `causal` and `sliding_window`.
        sinks: Attention sinks: for each head an additional logit in the softmax of every row, without a value. They
            have a gradient.
        sliding_window: Number of keys that a query sees before and after its own position; a pair is `(left, right)`,
            with `None` for no limit. With `causal` the right side is 0. The query's own key is not counted: for a model
            whose window counts it, as those of Hugging Face do, pass one less.
        logits_soft_cap: Squash scaled products into `(-cap, cap)` by `cap * tanh(x / cap)`, before the bias is added.
        soft_cap_after_bias: Add the bias first, then apply the soft cap.
        dropout_rate: Probability of dropping a weight; the others are scaled up, so that the mean stays the same.
        dropout_key: A `jax.random` key, different for each step and layer. The key and the position `[batch, head,
            query, key]` in this call decide which weights are dropped. The backward and all implementations drop the
            same ones. Under `vmap` and `shard_map` a shared key drops the same weights in each example or shard; fold
            an index into it.
        precision: Of matrix products: `default`, `high`, `highest`, or a `jax.lax.Precision`; `None`: JAX's default.
        deterministic: Use only implementations with bitwise reproducible results, including gradients. It is implied
            if `XLA_FLAGS` contain `--xla_gpu_deterministic_ops`.
        return_lse: Return the log-sum-exp as well. It has a gradient.
        axis_name: Inside `jax.shard_map`: the mesh axis, or several, over which the sequence is sharded. Query, key,
            value and segment ids are then this device's shards, and lengths count tokens of the whole sequence. The
            output is that of this device's queries over the keys of all devices. With the same number of queries and
            keys, `jit` over a mesh needs no `axis_name`. `bias`, `attention_mask` and `dropout_rate` are not available.
        zigzag: With `axis_name`: the sequence is in the order of `to_zigzag`, which balances causal attention.
        gather_keys: With `axis_name`: whether every device receives all keys and values at once (`True`), or from its
            neighbour in a ring, while it computes (`False`). By default it gathers if all keys and values are no larger
            than one device's queries. A window exchanges only the keys inside it, in either case.
        implementation: An implementation (`mosaic_gpu`, `cudnn`, `cudnn_packed`, `xla`, `splash`, `pallas_tpu`), or
            several in order of preference; the call raises if none of them supports it. `None` leaves the choice to the
            configuration.
        bucket_lengths: Round lengths up to powers of two in the call's key, so that a program with varying lengths is
            tuned once for each power. Arrays are not padded, and the result is the same.
        cfg: The configuration of this call and its gradient; `None` looks one up. A direction without parameters in
            `cfg` uses the implementation's heuristic.

    Returns:
        The output, in query's dtype; sums are computed in float32. With `return_lse` a pair: the output, and the
        float32 log-sum-exp of each row's logits, including sinks (minus infinity for a row without keys).

    Raises:
        ArgumentError: An argument has the wrong shape, dtype or value.
        ConfigError: `cfg` and `implementation` name different implementations.
        UnsupportedError: `implementation` cannot run this call; the message says why. An unsupported platform is
            found when the program is lowered.
    """
    if axis_name is not None:
        arguments.check_axis(axis_name)
    else:
        arguments.warn_of_mistakes(query, key, causal=causal is True)
    run = _bucketed_flash_attention if canonical_flag("bucket_lengths", bucket_lengths) else _flash_attention
    # Arguments that are not arrays pass here as if they had four axes; the operation then raises a clear error.
    batch = None if getattr(query, "ndim", 4) == 4 else batches.batch_of(query, key, value, dropout_rate)
    if batch is not None:
        lengths = {"query_lengths": query_lengths, "key_lengths": key_lengths}
        query, key, value, query_lengths, key_lengths = (
            batches.fold(name, x, batch) for name, x in {"query": query, "key": key, "value": value, **lengths}.items()
        )
        bias = batches.fold_broadcast("bias", bias, batch)
        attention_mask = batches.fold_mask(attention_mask, batch)
        segment_ids = batches.fold_segments(segment_ids, batch)
    arrays: list[Any] = [query, key, value, bias, attention_mask, arguments.segments_within_32_bits(segment_ids)]
    # Newer arguments are only passed if given, so that calls without them keep the keys of earlier versions.
    if query_lengths is not None or key_lengths is not None or sinks is not None or dropout_key is not None:
        arrays += [(within_32_bits(query_lengths), within_32_bits(key_lengths)), sinks, dropout_key]
    # Each option slows down an eager call, so defaults are not passed.
    flags = soft_cap_after_bias is deterministic is return_lse is False
    more: dict[str, Any] = {}
    if not (flags and precision is None and type(dropout_rate) is float and not dropout_rate):
        more = {
            "soft_cap_after_bias": soft_cap_after_bias,
            "dropout_rate": dropout_rate,
            "precision": precision,
            "deterministic": deterministic,
            "return_lse": return_lse,
        }
    if axis_name is not None or gather_keys is not None or zigzag is not False:
        more |= {"axis_name": axis_name, "zigzag": zigzag, "gather_keys": gather_keys}
    found = run(
        *arrays,
        causal=causal,
        softmax_scale=softmax_scale,
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        implementation=implementation,
        cfg=cfg,
        **more,
    )
    return found if batch is None else jax.tree.map(batch.separate, found)
