# SPDX-License-Identifier: Apache-2.0
"""The arguments of attention: validation and canonical form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np

from ejkernel import compat, settings
from ejkernel.kernels._numbers import is_integer, is_number
from ejkernel.kernels._options import canonical_flag, canonical_precision, has_64_bits, int32, type_text
from ejkernel.ops.core.types import Integer
from ejkernel.ops.errors import ArgumentError, ArgumentWarning
from ejkernel.ops.utils.messages.warn import warn
from ejkernel.ops.utils.values.scalars import given_text
from ejkernel.ops.utils.values.signature import is_array

SlidingWindow = Integer | tuple[Integer | None, Integer | None]

_DTYPES = ("bfloat16", "float16", "float32", "float64")
_MANY_HEADS, _FEW_KEYS = 256, 128  # more heads than models have, with fewer keys than heads
_ODD = -0x61C88647  # -2**32 / golden ratio: its multiples are far from each other
_SALT = 0x2545F491  # tells numbers beyond 32 bits from those with the same lower half
_FAR = 1 << 30  # a window side beyond every array; positions and sides are added as 32-bit integers


def warn_of_mistakes(query: Any, key: Any, *, causal: bool) -> None:
    """Warn of arrays that look as if heads came before the length, and of causal queries that see no key."""
    try:
        queries, heads, keys = query.shape[-3], query.shape[-2], key.shape[-3]
    except (AttributeError, IndexError):  # `check_main` raises a clear error
        return
    # Symbolic lengths may not compare.
    if not type(queries) is type(heads) is type(keys) is int:
        return
    if heads >= _MANY_HEADS and keys <= _FEW_KEYS:
        warn(
            f"flash_attention: query of shape {tuple(query.shape)} has {heads} heads, and key has {keys} tokens. The "
            "axes are [batch, length, heads, head_dim]; arrays of [batch, heads, length, head_dim] need "
            "jnp.swapaxes(x, -3, -2). If this is intended, ignore ArgumentWarning.",
            ArgumentWarning,
        )
    elif causal and queries > keys > 0:  # without keys the call is an error
        first = f"the first {queries - keys} queries see no key, and their outputs are 0"
        if queries - keys == 1:
            first = "the first query sees no key, and its output is 0"
        swapped = ""
        if heads == key.shape[-2] and not queries % keys:
            swapped = (
                " If these are heads: the axes are [batch, length, heads, head_dim], so use jnp.swapaxes(x, -3, -2)."
            )
        warn(
            f"flash_attention: causal=True with {queries} queries and {keys} keys. The last query is aligned with the "
            f"last key, so {first}; jax.nn aligns the first ones.{swapped} If this is intended, ignore "
            "ArgumentWarning.",
            ArgumentWarning,
        )


def check_main(query: Any, key: Any, value: Any) -> None:
    """Check query, key and value against each other.

    Raises:
        ArgumentError: One is not an array, or their axes, shapes or dtypes do not match.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not is_array(x):
            raise ArgumentError(f"{name} must be an array, got {type(x).__name__}; convert it with jnp.asarray.")
        if len(x.shape) != 4 or 0 in x.shape:
            raise ArgumentError(
                f"{name} must be [*batch, length, heads, head_dim] with any batch axes, none of them empty; got shape "
                f"{tuple(x.shape)}."
            )
        if str(x.dtype) not in _DTYPES:
            raise ArgumentError(
                f"{name}'s dtype must be one of {', '.join(_DTYPES)}; got {x.dtype}. Cast it with .astype."
            )
        if x.dtype != query.dtype:
            raise ArgumentError(f"{name} must have query's dtype, {query.dtype}; got {x.dtype}. Cast it with .astype.")
    batch, _, heads, head_dim = query.shape
    groups = key.shape[2]
    if key.shape[0] != batch or key.shape[3] != head_dim:
        raise ArgumentError(
            f"key must have query's batch and head_dim, {batch} and {head_dim}; got shape {tuple(key.shape)}."
        )
    if tuple(value.shape[:3]) != tuple(key.shape[:3]):
        raise ArgumentError(
            f"value must have key's batch, length and heads, {tuple(key.shape[:3])}; got shape {tuple(value.shape)}."
        )
    if heads % groups:
        raise ArgumentError(
            f"query has {heads} heads and key has {groups}: query's heads must be a multiple of key's (shapes "
            f"{tuple(query.shape)} and {tuple(key.shape)})."
        )


def full_shape(query: Any, key: Any) -> tuple[int, int, int, int]:
    """Return the shape of the scores: `(batch, heads, queries, keys)`."""
    return query.shape[0], query.shape[2], query.shape[1], key.shape[1]


def canonical_bias(bias: Any, full: tuple[int, ...]) -> Any:
    """Check `bias`, and return it with four axes, `[batch, heads, queries, keys]`; `None` stays `None`."""
    if bias is None:
        return None
    if not is_array(bias) or not jnp.issubdtype(bias.dtype, jnp.floating):
        got = f"dtype {bias.dtype}" if is_array(bias) else type(bias).__name__
        raise ArgumentError(f"bias must be a floating-point array, got {got}; pass booleans as attention_mask.")
    if len(bias.shape) > 4 or not _broadcasts(bias.shape, full):
        raise ArgumentError(
            f"bias must be broadcastable to [batch, heads, queries, keys] = {full}, got shape {tuple(bias.shape)}."
        )
    return _reshaped(bias, (1,) * (4 - len(bias.shape)) + tuple(bias.shape))


def canonical_mask(mask: Any, full: tuple[int, ...]) -> Any:
    """Check `mask`, and return it with four axes; a mask with two axes means `[batch, keys]`."""
    if mask is None:
        return None
    if not is_array(mask) or mask.dtype != bool:
        got = f"dtype {mask.dtype}" if is_array(mask) else type(mask).__name__
        raise ArgumentError(
            f"attention_mask must be a boolean array, got {got}; pass mask != 0, or additive masks as bias."
        )
    given = tuple(mask.shape)
    if len(given) == 2:
        mask = _reshaped(mask, (mask.shape[0], 1, 1, mask.shape[1]))
    if len(mask.shape) != 4 or not _broadcasts(mask.shape, full):
        raise ArgumentError(
            f"attention_mask must be [batch, keys] = {(full[0], full[3])}, or have four axes and be broadcastable to "
            f"[batch, heads, queries, keys] = {full}; got shape {given}. Pass [queries, keys] as "
            "mask[None, None]."
        )
    return mask


def canonical_segments(segments: Any, full: tuple[int, ...]) -> tuple[Any, Any] | None:
    """Check segment ids, and return them as a pair, of the queries and of the keys."""
    if segments is None:
        return None
    pair = segments if isinstance(segments, tuple | list) else (segments, segments)
    wanted = ((full[0], full[2]), (full[0], full[3]))
    if len(pair) != 2 or not all(is_array(x) and jnp.issubdtype(x.dtype, jnp.integer) for x in pair):
        raise ArgumentError(
            "segment_ids must be an integer array [batch, length], or a pair of them, of queries and of keys; got "
            f"{_shown(pair)}."
        )
    if any(tuple(x.shape) != want for x, want in zip(pair, wanted, strict=True)):
        raise ArgumentError(
            f"segment_ids must have shape {wanted[0]} for queries and {wanted[1]} for keys, got {_shown(pair)}; where "
            "the lengths differ, pass a pair."
        )
    queries, keys = pair
    alike = queries.dtype == keys.dtype and queries.dtype.itemsize < 8
    return (queries, keys) if alike else (_narrow(queries), _narrow(keys))


def segments_within_32_bits(segments: Any) -> Any:
    """Return segment ids with NumPy arrays of 64 bits as int32, before an eager call."""
    if isinstance(segments, tuple | list):
        return type(segments)(map(segments_within_32_bits, segments)) if any(map(has_64_bits, segments)) else segments
    return _narrow(segments) if has_64_bits(segments) else segments


def _narrow(ids: Any) -> Any:
    """Return ids as int32: the same numbers if they fit, else hashes, which seldom meet."""
    if isinstance(ids, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(ids.shape, jnp.int32)
    # NumPy arrays by NumPy: JAX would keep the lower half of 64 bits, and takes longer.
    library, is_unsigned = np if isinstance(ids, np.ndarray) else jnp, ids.dtype.kind == "u"
    low = ids.astype(np.int32)
    if ids.dtype.itemsize < (4 if is_unsigned else 5):
        return low
    high = (ids >> 32).astype(np.int32) if ids.dtype.itemsize == 8 else library.zeros_like(low)
    fits = (high == 0) & (low >= 0) if is_unsigned else high == low >> 31
    return library.where(fits, low, low ^ (high * np.int32(_ODD)) ^ np.int32(_SALT))


def canonical_lengths(pair: tuple[Any, Any], batch: int) -> tuple[Any, Any] | None:
    """Return the lengths of queries and keys as int32; `None` if neither is given."""
    query_lengths, key_lengths = pair
    for name, lengths in (("query_lengths", query_lengths), ("key_lengths", key_lengths)):
        if lengths is None:
            continue
        if not is_array(lengths) or not jnp.issubdtype(lengths.dtype, jnp.integer) or tuple(lengths.shape) != (batch,):
            raise ArgumentError(f"{name} must be an integer array [batch] = {(batch,)}; got {_shown((lengths,))}.")
    if query_lengths is None and key_lengths is None:
        return None
    query_lengths, key_lengths = (None if lengths is None else int32(lengths) for lengths in pair)
    return query_lengths, key_lengths


def canonical_dropout(rate: Any, key: Any) -> tuple[float, Any]:
    """Return the dropout rate, and its random key as two uint32 words (`None` without dropout)."""
    if not is_number(rate) or not 0 <= rate < 1:
        raise ArgumentError(f"dropout_rate must be a number from 0 to 1, 1 excluded, got {given_text(rate)}.")
    # with rate 0 the key is dropped, so that the call equals one without dropout
    if not rate:
        return 0.0, None
    if key is None:
        raise ArgumentError(
            "dropout_key must be given with dropout_rate, got None; pass a key of jax.random, another one each step."
        )
    if not is_array(key):
        raise ArgumentError(f"dropout_key must be a key of jax.random, got {type(key).__name__}.")
    is_typed = compat.tracing.dtypes.issubdtype(key.dtype, compat.tracing.dtypes.prng_key)
    shapes = ((),) if is_typed else ((2,), (4,))  # keys of `rbg` are four words
    if tuple(key.shape) not in shapes or not (is_typed or key.dtype == np.uint32):
        raise ArgumentError(f"dropout_key must be one key, as of jax.random.key(seed); got {_shown((key,))}.")
    return float(rate), key if tuple(key.shape) == (2,) else _two_words(key)


def _two_words(key: Any) -> Any:
    if isinstance(key, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((2,), jnp.uint32)
    words = jnp.asarray(key) if key.dtype == np.uint32 else jax.random.key_data(key)
    if words.shape == (2,):
        return words
    # The halves of an `rbg` key are often equal, so their sum or difference would be the same for all keys.
    return jax.extend.random.threefry_2x32((words[0], words[1]), words[2:])


def canonical_window(window: Any, causal: Any) -> tuple[bool, tuple[int | None, int | None] | None]:
    """Return whether attention is causal, and the window as `(left, right)`, in one form for equal masks."""
    causal = canonical_flag("causal", causal)
    sides = window if isinstance(window, tuple | list) else (window, window)
    if len(sides) != 2 or not all(side is None or (is_integer(side) and side >= 0) for side in sides):
        raise ArgumentError(
            f"sliding_window must be an int >= 0, or a pair (left, right) of such with None for no limit; got "
            f"{given_text(window)}."
        )
    left, right = (None if side is None or side >= _FAR else int(side) for side in sides)
    # a window without later keys is causal, however the caller expressed it
    if causal or right == 0:
        return True, None if left is None else (left, 0)
    return False, None if left is None and right is None else (left, right)


def canonical_more(
    *,
    soft_cap_after_bias: Any = False,
    precision: Any = None,
    return_lse: Any = False,
    deterministic: Any = False,
) -> dict[str, Any]:
    """Return the options that differ from their defaults."""
    found = {
        "soft_cap_after_bias": canonical_flag("soft_cap_after_bias", soft_cap_after_bias),
        "precision": canonical_precision(precision),
        "return_lse": canonical_flag("return_lse", return_lse),
        "deterministic": canonical_flag("deterministic", deterministic) or settings.deterministic_ops(),
    }
    return {name: value for name, value in found.items() if value}


CONTEXT = frozenset({"axis_name", "zigzag", "gather_keys"})


def canonical_context(
    axis_name: Any, zigzag: Any, gather_keys: Any, arrays: Sequence[Any], mask: tuple[bool, Any]
) -> dict[str, Any]:
    """Return the options of a call on one shard of the sequence; none for a call on the whole sequence.

    Args:
        axis_name, zigzag, gather_keys: The options.
        arrays: The canonical arrays.
        mask: The result of `canonical_window`.
    """
    names = _axis_names(axis_name)
    zigzag = canonical_flag("zigzag", zigzag)
    gather = None if gather_keys is None else canonical_flag("gather_keys", gather_keys)
    if not names:
        for name, value in (("zigzag", zigzag or None), ("gather_keys", gather)):
            if value is not None:
                raise ArgumentError(f"{name} needs axis_name, the mesh axis of the sequence; got {name}={value}.")
        return {}
    query, key, _, bias, attention_mask, *_, dropout_key = arrays
    for name, array, instead in (
        ("bias", bias, "shard heads or examples instead"),
        ("attention_mask", attention_mask, "use segment_ids or key_lengths instead"),
        ("dropout_rate", dropout_key, "drop elsewhere, or shard heads or examples instead"),
    ):
        if array is not None:
            raise ArgumentError(f"{name} is not available with a sharded sequence, axis_name={axis_name!r}; {instead}.")
    queries, keys = query.shape[1], key.shape[1]
    if queries != keys and mask != (False, None):
        raise ArgumentError(
            f"query must have key's length with axis_name and a causal mask or a window, got {queries} and {keys} on "
            "each device; shard heads or examples instead."
        )
    if zigzag and (queries % 2 or keys % 2):
        raise ArgumentError(
            f"zigzag needs shards of even length, two pieces each; got {queries} queries and {keys} keys: pad them."
        )
    found = {"axis_name": names, "zigzag": zigzag, "gather_keys": gather}
    return {name: value for name, value in found.items() if value not in (None, False) or name == "gather_keys"}


def check_axis(axis_name: Any) -> None:
    """Raise an `ArgumentError` unless the program is inside a `shard_map` over these mesh axes."""
    try:
        jax.lax.axis_size(_axis_names(axis_name))
    except NameError as error:
        raise ArgumentError(
            f"axis_name must be a mesh axis of an enclosing jax.shard_map, or several, got {axis_name!r}; under jit "
            "over a mesh, leave it out."
        ) from error


def _axis_names(axis_name: Any) -> tuple[str, ...]:
    names = (axis_name,) if isinstance(axis_name, str) else () if axis_name is None else axis_name
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ArgumentError(f"axis_name must be the name of a mesh axis, several names, or None; got {axis_name!r}.")
    if not names and axis_name is not None:
        raise ArgumentError(f"axis_name must name a mesh axis, got {axis_name!r}; for a whole sequence, pass None.")
    if len(set(names)) < len(names):
        raise ArgumentError(f"axis_name must name each mesh axis once; got {axis_name!r}.")
    return tuple(names)


def _reshaped(x: Any, shape: tuple[int, ...]) -> Any:
    return jax.ShapeDtypeStruct(shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x.reshape(shape)


def _broadcasts(shape: Sequence[int], full: tuple[int, ...]) -> bool:
    return all(n in (1, m) for n, m in zip(reversed(tuple(shape)), reversed(full), strict=False))


def _shown(values: Sequence[Any]) -> str:
    return ", ".join(map(type_text, values))
