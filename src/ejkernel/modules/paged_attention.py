# SPDX-License-Identifier: Apache-2.0
"""`paged_attention`: attention of new tokens to a paged cache of keys and values, for serving."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

from jaxtyping import Array, Float, Int

from ejkernel.kernels._numbers import is_integer
from ejkernel.kernels._options import int32, within_32_bits
from ejkernel.kernels.paged_attention import _arguments as arguments
from ejkernel.kernels.paged_attention.operation import PagedAttention as PagedAttention
from ejkernel.kernels.paged_attention.operation import PagedAttentionConfig as PagedAttentionConfig
from ejkernel.kernels.paged_attention.operation import paged_attention as _paged_attention
from ejkernel.kernels.paged_attention.plan import BatchShape, plan_arrays
from ejkernel.kernels.paged_attention.plan import PagedPlan as PagedPlan
from ejkernel.ops.core.types import Flag, Number
from ejkernel.ops.errors import ArgumentError
from ejkernel.ops.utils.messages.names import names_checked
from ejkernel.ops.utils.values.scalars import Takes, given_text, python_numbers

from ._names import by_name

Pages = Float[Array, "pages page_size kv_heads 2 head_dim"] | Int[Array, "pages page_size kv_heads 2 head_dim"]
Scale = Number | Float[Array, " kv_heads"]
Output = Float[Array, "tokens heads value_dim"]
LogSumExp = Float[Array, "tokens heads"]

# The names in tpu-inference, Tokamax, vLLM, FlashInfer and flash-attn.
NAMES_ELSEWHERE = by_name(
    {
        "q": "query queries",
        "kv_pages": "kv_cache paged_kv_cache",
        "kv_pages= has keys and values; join separate caches with jnp.stack([keys, values], axis=-2).": (
            "key_cache value_cache k_pages v_pages"
        ),
        "write new keys to the cache with append_to_pages; kv_pages= has keys and values.": "k",
        "write new values to the cache with append_to_pages; kv_pages= has keys and values.": "v",
        "page_table": "block_tables block_table",
        "page_table= has two axes, [sequences, pages]; reshape a flat table.": "page_indices",
        "page_table= has two axes, [sequences, pages], one row for each sequence; it needs no kv_indptr.": "kv_indices",
        "page_table= has one row for each sequence; leave it out.": "kv_indptr",
        "query_offsets": "cu_q_lens cu_seqlens_q qo_indptr query_start_loc",
        "kv_lengths": "kv_lens lengths seq_lens seqused_k",
        "kv_lengths= has the number of all keys of each sequence.": "kv_last_page_len",
        "kv_lengths= counts the new tokens as well.": "context_lens cache_seqlens",
        "softmax_scale": "scale sm_scale",
        "logits_soft_cap": "soft_cap softcap attn_logits_soft_cap",
        "sliding_window": "window window_left",
        "sliding_window= is the number of earlier keys that a query sees.": "window_size",
        "sinks": "s_aux attention_sink",
        "k_scale": "k_descale",
        "v_scale": "v_descale",
        "attention is always causal; leave it out.": "causal",
        "cfg": "config block_sizes",
        "implementation": "backend",
    }
)


class _Options(TypedDict, total=False):
    """The options of `paged_attention` that do not affect the type of its result."""

    plan: PagedPlan | None
    softmax_scale: Number | None
    logits_soft_cap: Number | None
    sliding_window: int | None
    sinks: Float[Array, " heads"] | None
    k_scale: Scale | None
    v_scale: Scale | None
    value_dim: int | None
    implementation: str | Sequence[str] | None
    cfg: PagedAttentionConfig | None


@overload
def paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    kv_pages: Pages,
    page_table: Int[Array, "sequences pages_per_sequence"],
    query_offsets: Int[Array, " sequences_and_one"],
    kv_lengths: Int[Array, " sequences"],
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> Output: ...


@overload
def paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    kv_pages: Pages,
    page_table: Int[Array, "sequences pages_per_sequence"],
    query_offsets: Int[Array, " sequences_and_one"],
    kv_lengths: Int[Array, " sequences"],
    *,
    return_lse: Flag,
    **options: Unpack[_Options],
) -> Any: ...


@names_checked(NAMES_ELSEWHERE)
def paged_attention(
    q: Float[Array, "tokens heads head_dim"],
    kv_pages: Pages,
    page_table: Int[Array, "sequences pages_per_sequence"],
    query_offsets: Int[Array, " sequences_and_one"],
    kv_lengths: Int[Array, " sequences"],
    *,
    plan: PagedPlan | None = None,
    softmax_scale: Number | None = None,
    logits_soft_cap: Number | None = None,
    sliding_window: int | None = None,
    sinks: Float[Array, " heads"] | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    value_dim: int | None = None,
    return_lse: Flag = False,
    implementation: str | Sequence[str] | None = None,
    cfg: PagedAttentionConfig | None = None,
) -> Any:
    """Return the attention of each sequence's new tokens to its keys and values in a paged cache.

    One batch may mix sequences in decode, with one new token, and in prefill, with several. The new tokens of a
    sequence are its last ones, and their keys and values must be in the cache already; see `append_to_pages`. A token
    sees the keys up to its own position.

    No index leads out of an array: a sequence that needs a page outside of the cache gives zeros, and lengths are
    clamped to the page table. The unused parts of pages are never read into a result, even if they hold NaN.

    It has no gradient.

    Args:
        q: The new tokens' queries, sequence after sequence. `heads` must be a multiple of `kv_heads`; head `i` reads KV
            head `i // (heads // kv_heads)`. Tokens past `query_offsets[-1]` are padding and give zeros.
        kv_pages: The cache, keys before values, of q's dtype, int8 or float8_e4m3fn. With `value_dim`, the cache has
            keys alone, `[pages, page_size, kv_heads, 1, head_dim]`.
        page_table: The pages of each sequence, in order. Entries past a sequence's length are not used.
        query_offsets: The cumulative numbers of new tokens, with a leading 0. Outside of `jax.jit`, values on the host
            (NumPy arrays, and JAX's on a CPU) are checked, and those of `kv_lengths` with them. A sequence may have no
            new token.
        kv_lengths: The number of each sequence's keys, including its new tokens; 0 for a row of padding.
        plan: The schedule of the batch from `paged_plan`, which the layers of a model share. `None` computes it.
        softmax_scale: Factor on the products of query and key; `None` means `head_dim ** -0.5`.
        logits_soft_cap: Squash scaled products into `(-cap, cap)` by `cap * tanh(x / cap)`.
        sliding_window: The number of keys that a query sees before its own position; `None`: all.
        sinks: Attention sinks: for each head an additional logit in the softmax of every row, without a value.
        k_scale, v_scale: Factors on cached keys and values, not negative: one number, or one for each KV head. Pass
            those that `append_to_pages` quantised with.
        value_dim: The values are the first `value_dim` elements of the keys, as in absorbed latent attention (MLA):
            e.g. `value_dim=512` with `head_dim=576` and one KV head. Pass the `softmax_scale` of the model then.
        return_lse: Return the log-sum-exp as well.
        implementation: An implementation (`mosaic_gpu`, `xla`, `tpu_ragged`), or several in order of preference; the
            call raises if none of them supports it. `None` leaves the choice to the configuration.
        cfg: The configuration of this call; `None` looks one up.

    Returns:
        The output, in q's dtype; sums are computed in float32. With `return_lse` a pair: the output, and the float32
        log-sum-exp of each row's logits, including sinks (minus infinity for padding, and for a row without keys and
        sinks).

    Raises:
        ArgumentError: An argument has the wrong shape, dtype or value.
        ConfigError: `cfg` and `implementation` name different implementations.
        UnsupportedError: `implementation` cannot run this call, or the call is differentiated.
    """
    if plan is None:  # the plan has offsets and lengths that were checked with it
        arguments.check_main(q, kv_pages)
        arguments.check_batch_values(query_offsets, kv_lengths, q.shape[0])
    return _paged_attention(
        q,
        kv_pages,
        *map(within_32_bits, (page_table, query_offsets, kv_lengths)),
        sinks,
        k_scale,
        v_scale,
        plan,
        softmax_scale=softmax_scale,
        logits_soft_cap=logits_soft_cap,
        sliding_window=sliding_window,
        value_dim=value_dim,
        return_lse=return_lse,
        implementation=implementation,
        cfg=cfg,
    )


@names_checked({"block_tables": "page_table", "cu_q_lens": "query_offsets", "kv_lens": "kv_lengths"})
def paged_plan(
    query_offsets: Int[Array, " sequences_and_one"],
    kv_lengths: Int[Array, " sequences"],
    *,
    heads: int,
    kv_heads: int,
    page_size: int,
    sliding_window: int | None = None,
    tokens: int | None = None,
    pages: int | None = None,
    page_table: Int[Array, "sequences pages_per_sequence"] | None = None,
) -> PagedPlan:
    """Return the schedule of a batch for `paged_attention`: compute it once for each step, and pass it to all layers.

    With `tokens`, `pages` and `page_table` the plan has the whole schedule, and which sequences need a page outside of
    the cache. A layer then uses the plan's offsets and lengths instead of its own arguments; page tables that differ
    from the plan's are not checked again, only kept within the cache. Without these three, each layer computes the
    schedule again.

    Args:
        query_offsets: The cumulative numbers of new tokens, with a leading 0.
        kv_lengths: The number of each sequence's keys, including its new tokens.
        heads: Query heads of the layers, on all devices or on one, like `kv_heads`. With those of one device, shards of
            heads need not compute schedules of their own.
        kv_heads: KV heads of the layers.
        page_size: Tokens of a page.
        sliding_window: The window of the layers. A plan with a window is valid for smaller ones. A plan without one is
            valid for every window, unless pages before the window were freed.
        tokens: The length of q, with padding.
        pages: The number of pages of a layer's cache.
        page_table: The pages of each sequence, in order.

    Returns:
        A pytree of arrays on the device.

    Raises:
        ArgumentError: An argument has the wrong shape, dtype or value, or some of `tokens`, `pages` and `page_table`
            are missing.
    """
    heads, kv_heads, page_size, tokens, pages = python_numbers(
        (heads, kv_heads, page_size, tokens, pages), Takes.NUMBERS
    )
    for name, value in (("heads", heads), ("kv_heads", kv_heads), ("page_size", page_size)):
        arguments.check_count(name, value)
    if heads % kv_heads:
        raise ArgumentError(f"heads must be a multiple of kv_heads, got {heads} and {kv_heads}.")
    window = arguments.canonical_window(python_numbers(sliding_window, Takes.NUMBERS))
    shape = BatchShape(
        tokens=-1, heads=heads, kv_heads=kv_heads, pages=-1, page_size=page_size, table=(-1, -1), window=window
    )
    given = {"tokens": tokens, "pages": pages, "page_table": page_table}
    missing = [name for name, value in given.items() if value is None]
    if page_table is None and len(missing) == len(given):
        arguments.check_lengths(query_offsets, kv_lengths)
        arguments.check_batch_values(query_offsets, kv_lengths)
        return PagedPlan(None, shape)
    if page_table is None or missing:
        raise ArgumentError(
            f"tokens, pages and page_table belong together; {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing."
        )
    for name, value in (("tokens", tokens), ("pages", pages)):
        if not is_integer(value) or not 0 <= value < 1 << 31:
            raise ArgumentError(f"{name} must be an integer from 0 to 2**31 - 1, got {given_text(value)}.")
    arguments.check_batch(page_table, query_offsets, kv_lengths)
    arguments.check_batch_values(query_offsets, kv_lengths, tokens)
    shape = dataclasses.replace(shape, tokens=tokens, pages=pages, table=tuple(page_table.shape))
    return PagedPlan(plan_arrays(shape, *map(int32, (page_table, query_offsets, kv_lengths))), shape)
