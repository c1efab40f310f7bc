# SPDX-License-Identifier: Apache-2.0
"""`ragged_paged_attention`: `paged_attention` with the arguments of kernels for TPUs, and the write to the cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ejkernel.kernels._options import canonical_flag, canonical_sinks, check_values, positive, type_text, within_32_bits
from ejkernel.kernels.paged_attention import _arguments as arguments
from ejkernel.ops.core.types import Flag, Number
from ejkernel.ops.errors import ArgumentError
from ejkernel.ops.utils.messages.names import names_checked
from ejkernel.ops.utils.values.scalars import Takes, python_numbers
from ejkernel.ops.utils.values.signature import is_array

from .kv_cache import append_to_pages
from .paged_attention import PagedAttentionConfig, paged_attention

Cache = Any  # one array or a pair


@names_checked({"kv_pages": "kv_cache", "softmax_scale": "sm_scale", "sinks": "attention_sink"})
def ragged_paged_attention(  # noqa: PLR0917 - the order of the kernels for TPUs
    queries: Float[Array, "tokens heads head_dim"],
    keys: Float[Array, "tokens kv_heads head_dim"] | None,
    values: Float[Array, "tokens kv_heads head_dim"] | None,
    kv_cache: Cache,
    kv_lens: Int[Array, " sequences"],
    page_indices: Int[Array, " all_pages"] | Int[Array, "sequences pages_per_sequence"],
    cu_q_lens: Int[Array, " sequences_and_one"],
    distribution: Int[Array, " 3"] | Int[Array, " 1"],
    attention_sink: Float[Array, " heads"] | None = None,
    *,
    sm_scale: Number = 1.0,
    sliding_window: int | None = None,
    soft_cap: Number | None = None,
    q_scale: Number | None = None,
    k_scale: Number | None = None,
    v_scale: Number | None = None,
    use_causal_mask: Flag = True,
    update_kv_cache: Flag = True,
    implementation: str | Sequence[str] | None = None,
    cfg: PagedAttentionConfig | None = None,
) -> tuple[Float[Array, "tokens heads head_dim"], Cache]:
    """Write the new tokens to a cache and attend to it, with the arguments that tpu-inference and sglang-jax use.

    In new programs, use `append_to_pages` and `paged_attention`. Two defaults differ: `sm_scale` is 1 here, not
    `head_dim ** -0.5`; and `sliding_window` counts the query's own key, as in these libraries.

    The cache has one of three forms, in any of which the result returns it: `[pages, page_size, 2 * kv_heads / n, n,
    head_dim]` with any packing `n`, or `[pages, page_size, 2 * kv_heads, head_dim]`, in which keys and values of each
    head alternate; or a pair of arrays, `[pages, page_size, kv_heads, head_dim]`. Keys and values of a pair are joined
    and separated again in each call, which copies the cache. A cache whose `head_dim` is padded, e.g. to 128, may have
    queries of the true size.

    Args:
        queries: The new tokens' queries.
        keys, values: The new tokens' keys and values; `None` with `update_kv_cache=False`.
        kv_cache: The cache; donate it in the enclosing `jax.jit`.
        kv_lens: The number of each sequence's keys, including its new tokens.
        page_indices: The page table, flat or with two axes.
        cu_q_lens: The cumulative numbers of new tokens, with a leading 0.
        distribution: Its last entry is the number of sequences; later rows of the table are padding. The others, which
            tell decode from prefill, are not needed.
        attention_sink: For each head an additional logit in the softmax of every row.
        sm_scale: Factor on the products of query and key.
        sliding_window: The number of keys that a query sees, including its own; `None`: all.
        soft_cap: Squash scaled products into `(-cap, cap)`.
        q_scale: A further factor on the products, of quantised queries.
        k_scale, v_scale: Factors of a quantised cache. Keys and values of another dtype than the cache's are quantised.
        use_causal_mask: Only True is supported.
        update_kv_cache: Whether to write the new tokens; otherwise they must be in the cache already.
        implementation: See `paged_attention`.
        cfg: See `paged_attention`.

    Returns:
        The output, in the dtype of the queries, with zeros for padding; and the cache.

    Raises:
        ArgumentError: An argument has the wrong shape, dtype or value.
        UnsupportedError: `implementation` cannot run this call.
    """
    _check(kv_cache, distribution, use_causal_mask)
    _check_batch(kv_lens, page_indices, cu_q_lens)
    updates = canonical_flag("update_kv_cache", update_kv_cache)
    for name, array in (("queries", queries), *((("keys", keys), ("values", values)) if updates else ())):
        if not is_array(array) or len(array.shape) != 3:
            rest = ", or pass update_kv_cache=False if the cache has them" * (name != "queries")
            raise ArgumentError(f"{name} must be an array [tokens, heads, head_dim]; got {type_text(array)}{rest}.")
    canonical_sinks(attention_sink, queries.shape[1], "attention_sink")
    check_values(keys=keys, values=values, distribution=distribution)
    check_values(kv_lens=kv_lens, page_indices=page_indices, cu_q_lens=cu_q_lens)
    kv_pages = _joined(kv_cache)
    head_dim, padded = queries.shape[-1], kv_pages.shape[-1]
    window = _window(python_numbers(sliding_window, Takes.NUMBERS))
    scale = _factor("sm_scale", sm_scale) * (1.0 if q_scale is None else _factor("q_scale", q_scale))
    kv_lens, page_indices, cu_q_lens = map(within_32_bits, (kv_lens, page_indices, cu_q_lens))
    sequences = kv_lens.shape[0]
    number = jnp.arange(sequences + 1, dtype=jnp.int32)
    count = jnp.clip(within_32_bits(distribution)[-1], 0, sequences)
    batch = (
        _table(page_indices, sequences),
        jnp.where(number <= count, cu_q_lens, jnp.asarray(cu_q_lens)[count]),
        jnp.where(number[:-1] < count, kv_lens, 0),
    )
    scales: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale}
    if updates:
        kv_pages = append_to_pages(kv_pages, _padded(keys, padded), _padded(values, padded), *batch, **scales)
    out = paged_attention(
        _padded(queries, padded),
        kv_pages,
        *batch,
        softmax_scale=scale,
        logits_soft_cap=soft_cap,
        sliding_window=window,
        sinks=attention_sink,
        **scales,
        implementation=implementation,
        cfg=cfg,
    )
    return out[..., :head_dim], _separated(kv_pages, kv_cache)


def _check(kv_cache: Any, distribution: Any, use_causal_mask: Any) -> None:
    if not canonical_flag("use_causal_mask", use_causal_mask):
        raise ArgumentError("use_causal_mask must be True: a paged cache has no later keys; got False.")
    last = "whose last entry is the number of sequences"
    _check_integers("distribution", distribution, last, lambda shape: len(shape) == 1 and shape[0] > 0)
    pair = kv_cache if isinstance(kv_cache, tuple | list) else None
    fits = (
        len(pair) == 2 and all(is_array(x) and len(x.shape) == 4 and x.shape == pair[0].shape for x in pair)
        if pair is not None
        else is_array(kv_cache) and len(kv_cache.shape) in (4, 5) and math.prod(kv_cache.shape[2:-1]) % 2 == 0
    )
    if not fits:
        raise ArgumentError(
            "kv_cache must be [pages, page_size, 2 * kv_heads, head_dim], with an optional axis of packing before the "
            "last, or a pair of arrays [pages, page_size, kv_heads, head_dim]; got "
            f"{', '.join(map(type_text, [kv_cache] if pair is None else pair))}."
        )
    for array in [kv_cache] if pair is None else pair:
        check_values(kv_cache=array)


def _check_batch(kv_lens: Any, page_indices: Any, cu_q_lens: Any) -> None:
    _check_integers("kv_lens", kv_lens, "[sequences]", lambda shape: len(shape) == 1)
    sequences = kv_lens.shape[0]
    offsets = (sequences + 1,)
    _check_integers("cu_q_lens", cu_q_lens, f"[sequences + 1] = {offsets}", lambda shape: shape == offsets)
    pages = f"with as many pages for each of the {sequences} kv_lens"
    _check_integers("page_indices", page_indices, pages, lambda shape: math.prod(shape) % max(sequences, 1) == 0)


def _check_integers(name: str, array: Any, wanted: str, fits: Callable[[tuple[int, ...]], bool]) -> None:
    if not is_array(array) or not jnp.issubdtype(array.dtype, jnp.integer) or not fits(tuple(array.shape)):
        raise ArgumentError(f"{name} must be an integer array {wanted}; got {type_text(array)}.")


def _factor(name: str, value: Any) -> float:
    found = positive(name, python_numbers(value, Takes.NUMBERS))
    if found is None:
        raise ArgumentError(f"{name} must be a positive number, got None.")
    return found


def _table(page_indices: jax.Array, sequences: int) -> jax.Array:
    """Return a page table with two axes. `reshape` alone cannot find the second one for an array without elements."""
    columns = math.prod(page_indices.shape) // max(sequences, 1)
    return jnp.reshape(page_indices, -1)[: sequences * columns].reshape(sequences, columns)


def _joined(kv_cache: Cache) -> Any:
    """Return the cache in the layout of `paged_attention`."""
    if isinstance(kv_cache, tuple | list):
        return jnp.stack(kv_cache, axis=-2)
    pages, page_size, *heads, head_dim = kv_cache.shape
    return kv_cache.reshape(pages, page_size, math.prod(heads) // 2, 2, head_dim)


def _separated(kv_pages: jax.Array, like: Cache) -> Cache:
    if isinstance(like, tuple | list):
        return type(like)((kv_pages[..., 0, :], kv_pages[..., 1, :]))
    return kv_pages.reshape(like.shape)


def _padded(x: Any, size: int) -> Any:
    return x if x.shape[-1] >= size else jnp.pad(x, ((0, 0), (0, 0), (0, size - x.shape[-1])))


def _window(window: Any) -> Any:
    """Return the number of keys before the query's own."""
    if window is None:
        return None
    arguments.check_count("sliding_window", window)
    return window - 1
