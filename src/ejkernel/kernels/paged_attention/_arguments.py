# SPDX-License-Identifier: Apache-2.0
"""The arguments of paged attention: validation and canonical form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels import _merging
from ejkernel.kernels._numbers import is_integer, is_number
from ejkernel.kernels._options import positive, type_text
from ejkernel.ops.errors import ArgumentError, ArgumentWarning
from ejkernel.ops.utils.messages.warn import warn
from ejkernel.ops.utils.values.scalars import given_text
from ejkernel.ops.utils.values.signature import is_array

from .plan import BatchShape, PagedPlan, PlanArrays

DTYPES = ("bfloat16", "float16", "float32")
QUANTISED = ("int8", "float8_e4m3fn")
PAGES = "[pages, page_size, kv_heads, 2, head_dim]"
_SHOWN = 16  # values in messages
KEYS_ONLY = "[pages, page_size, kv_heads, 1, head_dim]"


def check_pages(kv_pages: Any) -> None:
    """Raise an `ArgumentError` unless the cache has five axes and a supported dtype."""
    if not is_array(kv_pages) or len(kv_pages.shape) != 5 or kv_pages.shape[3] not in (1, 2):
        raise ArgumentError(
            f"kv_pages must be an array {PAGES}, keys first, or {KEYS_ONLY} if values are part of the keys; got "
            f"{type_text(kv_pages)}. For separate caches of keys and values, pass jnp.stack([keys, values], axis=-2)."
        )
    if 0 in (kv_pages.shape[1], kv_pages.shape[4]):
        raise ArgumentError(f"kv_pages must have a page_size and a head_dim of at least 1; got {type_text(kv_pages)}.")
    if str(kv_pages.dtype) not in (*DTYPES, *QUANTISED):
        raise ArgumentError(f"kv_pages must be one of {', '.join((*DTYPES, *QUANTISED))}; got {kv_pages.dtype}.")


def check_main(q: Any, kv_pages: Any) -> None:
    """Raise an `ArgumentError` unless queries and cache fit together."""
    if not is_array(q) or len(q.shape) != 3 or str(q.dtype) not in DTYPES:
        raise ArgumentError(
            f"q must be an array [tokens, heads, head_dim] of {', '.join(DTYPES)}; got {type_text(q)}. Reshape "
            "[batch, length, heads, head_dim], and pass the offsets of the examples as query_offsets."
        )
    check_pages(kv_pages)
    if str(kv_pages.dtype) not in (*QUANTISED, str(q.dtype)):
        raise ArgumentError(
            f"kv_pages must have q's dtype, {q.dtype}, or be {' or '.join(QUANTISED)}; got {kv_pages.dtype}."
        )
    heads, kv_heads = q.shape[1], kv_pages.shape[2]
    if not heads or not kv_heads or heads % kv_heads:
        raise ArgumentError(
            f"q must have a multiple of the cache's heads, got {heads} and {kv_heads}; head i reads KV head "
            "i // (heads // kv_heads)."
        )
    if q.shape[2] != kv_pages.shape[4]:
        raise ArgumentError(f"kv_pages must have q's head_dim, {q.shape[2]}; got shape {tuple(kv_pages.shape)}.")


def check_batch(page_table: Any, query_offsets: Any, kv_lengths: Any) -> None:
    """Raise an `ArgumentError` unless table, offsets and lengths are those of one number of sequences."""
    _check_integers("page_table", page_table, "[sequences, pages]")
    check_lengths(query_offsets, kv_lengths)
    if page_table.shape[0] != kv_lengths.shape[0]:
        raise ArgumentError(
            f"page_table must have a row for each of the {kv_lengths.shape[0]} kv_lengths; got shape "
            f"{tuple(page_table.shape)}."
        )


def check_lengths(query_offsets: Any, kv_lengths: Any) -> None:
    """Raise an `ArgumentError` unless offsets and lengths are those of one number of sequences."""
    _check_integers("query_offsets", query_offsets, "[sequences + 1]")
    _check_integers("kv_lengths", kv_lengths, "[sequences]")
    wanted = (kv_lengths.shape[0] + 1,)
    if tuple(query_offsets.shape) != wanted:
        raise ArgumentError(
            f"query_offsets must be [sequences + 1] = {wanted}, the cumulative numbers of new tokens with a leading 0; "
            f"got {type_text(query_offsets)}."
        )


def check_batch_values(query_offsets: Any, kv_lengths: Any, tokens: Any = None) -> None:
    """Raise an `ArgumentError` if the host knows offsets and lengths without waiting, and they do not fit together.

    It knows NumPy arrays, and JAX's on a CPU; other values, e.g. those inside `jax.jit`, are not checked.

    Args:
        query_offsets, kv_lengths: As for `paged_attention`, of any shape and type.
        tokens: The number of new tokens with padding; `None` if it is not known.
    """
    offsets, lengths = _on_host(query_offsets), _on_host(kv_lengths)
    if offsets is None or lengths is None or len(offsets) != len(lengths) + 1:  # other checks reject wrong shapes
        return
    new = offsets[1:] - offsets[:-1]
    if offsets[0] != 0 or new.min(initial=0) < 0:
        raise ArgumentError(
            "query_offsets must start at 0 and never fall: they are the cumulative numbers of new tokens, e.g. "
            f"np.cumsum([0, *new_tokens]); got {_values_text(offsets)}."
        )
    short = lengths < new
    if (lengths[new > 0] > 0).any():
        short &= lengths != 0  # a row of padding
    if short.any():
        row = int(short.argmax())
        raise ArgumentError(
            f"kv_lengths must count the new tokens as well: sequence {row} has {new[row]} new tokens, and "
            f"kv_lengths[{row}] is {lengths[row]}; add the numbers of new tokens, np.diff(query_offsets)."
        )
    if is_integer(tokens) and offsets[-1] > tokens:
        raise ArgumentError(
            f"query_offsets must end at the number of new tokens, {tokens}, or before it; got {_values_text(offsets)}."
        )


def _on_host(array: Any) -> Any:
    """Return the integers of an array of one axis as int64; `None` if reading them might wait for a device."""
    if not isinstance(array, np.ndarray):
        if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array) or not array.is_fully_addressable:
            return None
        if any(device.platform != "cpu" for device in array.devices()):
            return None
    return np.asarray(array, np.int64) if array.ndim == 1 and array.dtype.kind in "iu" else None


def _values_text(values: Any) -> str:
    return f"[{', '.join(map(str, values[:_SHOWN]))}{', ...' * (len(values) > _SHOWN)}]"


def _check_integers(name: str, array: Any, axes: str) -> None:
    rank = axes.count(",") + 1
    if not is_array(array) or not jnp.issubdtype(array.dtype, jnp.integer) or len(array.shape) != rank:
        raise ArgumentError(f"{name} must be an integer array {axes}; got {type_text(array)}.")
    _check_axes(name, array, [()] * rank)


def check_shards(kv_pages: Any, k: Any, v: Any, **scales: Any) -> None:
    """Raise an `ArgumentError` unless new tokens can be written where explicit mesh axes hold the cache's shards."""
    cache = _axes(kv_pages)
    _check_axes("kv_pages", kv_pages, [(), (), *cache[2:]])
    _check_axes("k", k, [(), cache[2], cache[4]])
    if v is not None:
        _check_axes("v", v, [(), cache[2], cache[4]])
        if _axes(v) != _axes(k):
            raise ArgumentError(f"v must be sharded like k, {_spec(k)}; got {_spec(v)}. Use jax.sharding.reshard.")
    for name, scale in scales.items():
        _check_axes(name, scale, [cache[2]])


def check_whole_pages(kv_pages: Any) -> None:
    """Raise an `ArgumentError` if explicit mesh axes shard the pages of a cache."""
    _check_axes("kv_pages", kv_pages, [(), *_axes(kv_pages)[1:]])


def _check_axes(name: str, array: Any, allowed: Sequence[tuple[str, ...]]) -> None:
    """Raise an `ArgumentError` if an axis is sharded over explicit mesh axes otherwise than over the allowed ones."""
    for axis, (own, wanted) in enumerate(zip(_axes(array), allowed, strict=False)):
        if own not in ((), wanted):
            fix = f"sharded over {', '.join(wanted)} like kv_pages, or whole" if wanted else "whole on every device"
            raise ArgumentError(
                f"axis {axis} of {name} must be {fix}; got the sharding {_spec(array)}. Use jax.sharding.reshard."
            )


def _axes(array: Any) -> tuple[tuple[str, ...], ...]:
    return _merging.explicit_axes(array, least=2)


def _spec(array: Any) -> Any:
    return jax.sharding.PartitionSpec(*(axes or None for axes in _axes(array)))


def check_count(name: str, value: Any) -> None:
    """Raise an `ArgumentError` unless the value is a positive integer that fits in 32 bits."""
    if not is_integer(value) or not 0 < value < 1 << 31:
        raise ArgumentError(f"{name} must be a positive integer below 2**31, got {given_text(value)}.")


def check_new_tokens(k: Any, v: Any, kv_pages: Any) -> None:
    """Raise an `ArgumentError` unless keys and values of new tokens fit the cache."""
    kv_heads, kinds, head_dim = kv_pages.shape[2:]
    if (v is None) != (kinds == 1):
        raise ArgumentError(
            f"v must be None for a cache of keys alone, {KEYS_ONLY}, and an array for one with values; got "
            f"{type_text(v)} and kv_pages of shape {tuple(kv_pages.shape)}."
        )
    for name, array in (("k", k), *((("v", v),) if v is not None else ())):
        if not is_array(array) or str(array.dtype) not in (*DTYPES, str(kv_pages.dtype)):
            raise ArgumentError(f"{name} must be an array of {', '.join(DTYPES)}; got {type_text(array)}.")
        if len(array.shape) != 3 or array.shape[0] != k.shape[0] or tuple(array.shape[1:]) != (kv_heads, head_dim):
            raise ArgumentError(
                f"{name} must be [tokens, kv_heads, head_dim], with heads and head_dim of the cache, {kv_heads} and "
                f"{head_dim}; got {type_text(array)}."
            )


def warn_of_rounding(k: Any, v: Any, kv_pages: Any, k_scale: Any, v_scale: Any) -> None:
    """Warn if a cache of integers takes floating-point numbers without a scale: most keys and values would be 0."""
    if str(kv_pages.dtype) != "int8":
        return
    for name, array, scale in (("k", k, k_scale), ("v", v, v_scale)):
        if array is not None and scale is None and jnp.issubdtype(array.dtype, jnp.floating):
            warn(
                f"append_to_pages: {name} is {array.dtype} and kv_pages int8, so without {name}_scale each number is "
                f"rounded to an integer. Pass {name}_scale, e.g. the largest magnitude / 127, and pass it to "
                "paged_attention as well. If this is intended, pass a scale of 1.",
                ArgumentWarning,
            )


def check_copies(sources: Any, targets: Any) -> None:
    """Raise an `ArgumentError` unless sources and targets have the same length."""
    _check_integers("sources", sources, "[copies]")
    _check_integers("targets", targets, "[copies]")
    if sources.shape != targets.shape:
        raise ArgumentError(
            f"targets must have one page for each of sources, {type_text(sources)}; got {type_text(targets)}."
        )


def canonical_scales(name: str, scale: Any, kv_heads: int) -> Any:
    """Return the factors of the cache's heads, float32 `[kv_heads]`; `None` stays."""
    if scale is None:
        return None
    if is_number(scale):
        positive(name, scale)
        return jnp.full((kv_heads,), scale, jnp.float32)
    wanted = is_array(scale) and jnp.issubdtype(scale.dtype, jnp.floating)
    if not wanted or tuple(scale.shape) not in ((), (kv_heads,)):
        raise ArgumentError(
            f"{name} must be a positive number, or a floating-point array [kv_heads] = {(kv_heads,)}; got "
            f"{type_text(scale)}."
        )
    if isinstance(scale, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((kv_heads,), jnp.float32)
    return jnp.broadcast_to(jnp.asarray(scale, jnp.float32), (kv_heads,))


def canonical_value_dim(value_dim: Any, v_scale: Any, kv_pages: Any) -> int | None:
    """Return `value_dim`; `None` if the cache has separate values."""
    own_values = kv_pages.shape[3] == 2
    if value_dim is None:
        if own_values:
            return None
        raise ArgumentError(
            f"value_dim must be given for a cache without values, {KEYS_ONLY}: the values are the first value_dim "
            f"elements of the keys; got None and kv_pages of shape {tuple(kv_pages.shape)}."
        )
    if own_values or not is_integer(value_dim) or not 0 < value_dim <= kv_pages.shape[4]:
        raise ArgumentError(
            f"value_dim must be an integer up to head_dim, and needs a cache of keys alone, {KEYS_ONLY}; got "
            f"{given_text(value_dim)} and kv_pages of shape {tuple(kv_pages.shape)}."
        )
    if v_scale is not None:
        raise ArgumentError("v_scale must be None with value_dim: the values are part of the keys, scaled by k_scale.")
    return int(value_dim)


def canonical_window(window: Any) -> int | None:
    """Return the number of keys that a query sees before its own; `None`: all."""
    if isinstance(window, tuple | list) and len(window) == 2 and window[1] in (None, 0):
        window = window[0]
    if window is None:
        return None
    if not is_integer(window) or window < 0:
        raise ArgumentError(
            f"sliding_window must be an int >= 0, or a pair (left, 0), or None for no limit; got {given_text(window)}."
        )
    return int(window) if window < 1 << 30 else None


def canonical_plan(plan: Any, q: Any, kv_pages: Any, page_table: Any, window: int | None) -> tuple[Any, ...] | None:
    """Return the arrays of a plan, a tuple so that a call can be described by plain data."""
    if plan is None or (type(plan) is tuple and len(plan) == len(PlanArrays._fields)):
        return plan
    if not isinstance(plan, PagedPlan):
        raise ArgumentError(f"plan must be the result of paged_plan, or None; got {type(plan).__name__}.")
    wanted = BatchShape.of(q.shape, kv_pages.shape, tuple(page_table.shape), window)
    differences = wanted.differences(plan.shape)
    if differences:
        named = "; ".join(f"{name} is {other}, not {own}" for name, (own, other) in differences.items())
        raise ArgumentError(f"plan must be of this batch, but its {named}. Call paged_plan for this batch.")
    limit = plan.shape.window
    if limit is not None and (window is None or window > limit):
        raise ArgumentError(
            f"plan must not leave out pages that sliding_window={window!r} sees; got one for {limit}. Layers with "
            "different windows need a plan each, or one without a window for all."
        )
    return None if plan.arrays is None else tuple(plan.arrays)
