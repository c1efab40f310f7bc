# SPDX-License-Identifier: Apache-2.0
"""Writing to a paged cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._merging import without_single_shards
from ejkernel.kernels._varying import unify_varying

from .common import as_bits, from_bits, sorted_before

_limits: Any = jnp.finfo  # it has no annotations


def appended(
    kv_pages: jax.Array,
    new_tokens: tuple[jax.Array, jax.Array | None],
    batch: tuple[jax.Array, jax.Array, jax.Array],
    scales: tuple[jax.Array | None, jax.Array | None],
) -> jax.Array:
    """Return the cache with the new tokens' keys and values; see `ejkernel.modules.append_to_pages`."""
    kv_pages, new_tokens, batch, scales = unify_varying((kv_pages, new_tokens, batch, scales))
    (k, v), (page_table, query_offsets, kv_lengths), (k_scale, v_scale) = new_tokens, batch, scales
    if not page_table.size or not k.shape[0]:
        return kv_pages
    count, size = kv_pages.shape[:2]
    token = jnp.arange(k.shape[0], dtype=jnp.int32)
    sequence = sorted_before(query_offsets, token) - 1
    inside = (sequence >= 0) & (sequence < page_table.shape[0])
    sequence = jnp.clip(sequence, 0, page_table.shape[0] - 1)
    position = kv_lengths[sequence] - (query_offsets[sequence + 1] - token)
    inside &= (position >= 0) & (position < page_table.shape[1] * size)
    position = jnp.maximum(position, 0)
    page = page_table[sequence, jnp.minimum(position // size, page_table.shape[1] - 1)]
    # A token without a place is dropped: a clamped index would overwrite another sequence.
    page = jnp.where(inside & (page >= 0), page, count)
    new = _quantised(k, k_scale, kv_pages.dtype)[:, :, None]
    if v is not None:
        new = jnp.concatenate([new, _quantised(v, v_scale, kv_pages.dtype)[:, :, None]], axis=2)
    return _written(kv_pages, (page, position % size), new)


def _quantised(x: jax.Array, scale: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    if x.dtype == dtype:
        return x
    wide = x.astype(jnp.float32)
    wide = wide if scale is None else wide / scale[None, :, None]
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.clip(jnp.round(wide), -127, 127).astype(dtype)
    most = float(_limits(dtype).max)  # beyond it, float8_e4m3fn has NaN
    return jnp.clip(wide, -most, most).astype(dtype)


def copied(kv_pages: jax.Array, sources: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the cache with the pages `sources` at `targets`; see `ejkernel.modules.copy_pages`."""
    count = kv_pages.shape[0]
    if not count:
        return kv_pages
    # A copy from a page that does not exist is dropped: a clamped index would copy another sequence.
    targets = jnp.where((targets < 0) | (sources < 0) | (sources >= count), count, targets)
    new = from_bits(as_bits(kv_pages)[jnp.clip(sources, 0, count - 1)], kv_pages.dtype)
    return _written(kv_pages, (targets,), new)


def _written(kv_pages: jax.Array, at: tuple[jax.Array, ...], new: jax.Array) -> jax.Array:
    """Return the cache with `new` at these indices; those past the last page are dropped."""
    return from_bits(as_bits(kv_pages).at[at].set(as_bits(new), mode="drop"), kv_pages.dtype)


def _in_place(write: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return the function of a donated cache; JAX refuses some writes of arrays over mesh axes of one device."""

    def written(kv_pages: jax.Array, *others: Any) -> jax.Array:
        given = jax.tree.map(without_single_shards, (kv_pages, *others))
        found = write(*given)
        return found if given[0] is kv_pages else jax.sharding.reshard(found, jax.typeof(kv_pages).sharding)

    written.__name__ = write.__name__
    return jax.jit(written, donate_argnums=0)


append = _in_place(appended)
copy = _in_place(copied)
