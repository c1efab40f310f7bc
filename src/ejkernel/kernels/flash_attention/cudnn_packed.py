# SPDX-License-Identifier: Apache-2.0
"""Attention within segments by cuDNN's packed layout, on NVIDIA GPUs from Hopper on.

The layout requires each segment to be one run of positions, and takes the start of each. A kernel is compiled for a
maximum number of segments per row, and the time of its gradient grows with that number. Runs and counts are known only
at run time, so the program contains several kernels, and the device takes the smallest with enough capacity. It falls
back to plain JAX if the ids of a segment are not one run, if queries and keys have different ids, or if a row has too
many segments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel import compat
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.utils.datacarrier import BwdParams, FwdParams
from ejkernel.ops.utils.messages.names import NamedFields

from . import cudnn, xla
from ._batches import fold_examples
from .common import AttentionCall, AttentionImplementation, Gradients, Operands, Residuals, Rules


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackedParams(NamedFields):
    """The compiled kernels.

    Attributes:
        segments: Capacity of each kernel in segments per row, rising. On one H200 a gradient with capacity 64 takes
            twice as long as one with capacity 8.
    """

    segments: tuple[int, ...] = (8, 16, 32, 64)

    def __post_init__(self) -> None:
        sizes = self.segments
        if not sizes or sizes[0] < 2 or any(type(size) is not int for size in sizes) or list(sizes) != sorted({*sizes}):
            raise ConfigError(f"segments must be rising integers from 2 on, got {sizes!r}; try (8, 16, 32, 64).")


class CudnnPacked(AttentionImplementation):
    """cuDNN's packed layout, for segment ids."""

    name = "cudnn_packed"
    params = PackedParams
    is_told_of_sinks = True
    features = frozenset(("deterministic", "precision"))

    def unsupported(self, call: AttentionCall) -> str | None:
        """See `unsupported_reason`."""
        return unsupported_reason(call)

    def attend(self, operands: Operands, rules: Rules, params: PackedParams) -> Residuals:
        """See `AttentionImplementation`."""
        static = _static(rules)

        def packed(segments: int, query: Any, key: Any, value: Any, ids: Any, _: Any) -> Any:
            layout = _layout_of(ids)
            lengths = _lengths_of(layout, segments)
            out, stats = compat.kernels.cudnn_attention_forward(query, key, value, None, **static, lengths=lengths)
            return out, _of_rows(stats, layout)

        def plain(query: Any, key: Any, value: Any, ids: Any, key_ids: Any) -> Any:
            return _PLAIN.attend(_segmented(query, key, value, ids, key_ids), rules, FwdParams())

        out, lse = _by_capacity(packed, plain, params, _arrays_of(operands))
        return out, lse

    def differentiate(
        self, operands: Operands, residuals: Residuals, dout: jax.Array, rules: Rules, params: PackedParams
    ) -> Gradients:
        """See `AttentionImplementation`; there is no bias."""
        static = _static(rules) | {"bias_gradient": False}

        def packed(segments: int, query: Any, key: Any, value: Any, ids: Any, _: Any, *saved: Any) -> Any:
            out, lse, dout = saved
            layout = _layout_of(ids)
            lengths = _lengths_of(layout, segments)
            stats = _of_segments(lse, layout, segments)
            given = (query, key, value, None)
            return compat.kernels.cudnn_attention_backward(given, (out, stats), dout, **static, lengths=lengths)

        def plain(query: Any, key: Any, value: Any, ids: Any, key_ids: Any, *saved: Any) -> Any:
            out, lse, dout = saved
            given = _segmented(query, key, value, ids, key_ids)._replace(sinks=operands.sinks)
            return _PLAIN.differentiate(given, (out, lse), dout, rules, BwdParams())[:3]

        arrays = (*_arrays_of(operands), *residuals, dout.astype(operands.query.dtype))
        dquery, dkey, dvalue = _by_capacity(packed, plain, params, arrays)
        return dquery, dkey, dvalue, None


_PLAIN = xla.Xla()


def unsupported_reason(call: AttentionCall) -> str | None:
    """Return why the packed layout does not support `call`, with an alternative; `None` if it does."""
    elsewhere = cudnn.platform_reason(call, "cudnn_packed", hopper=True)
    if elsewhere is not None:
        return elsewhere
    if not call.segments:
        return "implementation='cudnn_packed' needs segment_ids, and the call has none; use 'cudnn'."
    if call.bias is not None or call.attention_mask is not None or call.rules.left is not None:
        return "segment_ids are not available with cuDNN beside bias, attention_mask or sliding_window; use 'xla'."
    if call.query[1] != call.key[1]:
        return (
            f"query has length {call.query[1]} and key {call.key[1]}, and cuDNN's packed layout is used where both "
            "have the same segments; use 'xla'."
        )
    # Otherwise the layout supports the same calls as cuDNN without segments.
    return cudnn.unsupported_reason(dataclasses.replace(call, segments=False))


class _Layout(NamedTuple):
    """Positions of the segments.

    Attributes:
        ordinals: `[batch, length]`, index of each position's segment in its row.
        starts: `[batch, length]`, first position of that segment.
        first: `[batch, 1]`, number of segments in all earlier rows.
        counts: `[batch, 1]`, number of segments in each row.
        begins: `[batch, length]`, whether a segment begins at this position.
    """

    ordinals: jax.Array
    starts: jax.Array
    first: jax.Array
    counts: jax.Array
    begins: jax.Array


def _static(rules: Rules) -> dict[str, Any]:
    return {"scale": rules.scale, "causal": rules.right == 0, "window": 0}


def _arrays_of(operands: Operands) -> tuple[Any, ...]:
    return (*operands[:3], operands.query_segments, operands.key_segments)


def _segmented(query: Any, key: Any, value: Any, ids: Any, key_ids: Any) -> Operands:
    return Operands(query, key, value, query_segments=ids, key_segments=key_ids)


def _by_capacity(
    packed: Callable[..., Any], plain: Callable[..., Any], params: PackedParams, arrays: Sequence[Any]
) -> tuple[Any, ...]:
    """Return the result of the smallest kernel with capacity for the segments, or of `plain` if none applies.

    Args:
        packed: Function of a capacity in segments per row, and the arrays.
        plain: Function of the arrays.
        params: The compiled kernels.
        arrays: Query, key, value, the segment ids of both, and others; the first axis of each is the batch.
    """

    def chosen(*arrays: Any) -> tuple[Any, ...]:
        ids, key_ids = arrays[3:5]
        length = ids.shape[1]
        # A row has no more segments than positions.
        sizes = [size for size in params.segments if size <= length] or [max(2, length)]
        layout = _layout_of(ids)
        most = layout.counts.max()
        branches = [_branch(packed, size) for size in sizes]
        fits = jnp.asarray(sizes, most.dtype) < most
        index = jnp.where(_is_packed(ids, key_ids, layout, sizes[-1]), fits.sum(dtype=jnp.int32), len(sizes))
        found: tuple[Any, ...] = lax.switch(index, [*branches, lambda *arrays: tuple(plain(*arrays))], *arrays)
        return found

    return fold_examples(chosen)(*arrays)


def _branch(packed: Callable[..., Any], size: int) -> Callable[..., Any]:
    return lambda *arrays: tuple(packed(size, *arrays))


def _layout_of(ids: jax.Array) -> _Layout:
    batch, length = ids.shape
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (batch, length))
    begins = jnp.concatenate([jnp.ones((batch, 1), bool), ids[:, 1:] != ids[:, :-1]], axis=1)
    ordinals = jnp.cumsum(begins, axis=1, dtype=jnp.int32) - 1
    counts = ordinals[:, -1:] + 1
    return _Layout(
        ordinals=ordinals,
        starts=lax.cummax(jnp.where(begins, positions, 0), axis=1),
        first=jnp.cumsum(counts, axis=0, dtype=jnp.int32) - counts,
        counts=counts,
        begins=begins,
    )


def _is_packed(ids: jax.Array, key_ids: jax.Array, layout: _Layout, most: int) -> jax.Array:
    """Return whether each row has at most `most` segments, each segment is one run, and keys have the same ids."""
    batch = ids.shape[0]
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    # Surplus segments go to the last column, which the slice drops.
    runs = jnp.zeros((batch, most + 1), ids.dtype).at[rows, jnp.minimum(layout.ordinals, most)].set(ids)[:, :most]
    there = jnp.arange(most, dtype=jnp.int32)[None] < layout.counts
    alike = (runs[:, :, None] == runs[:, None, :]) & there[:, :, None] & there[:, None, :]
    # If each segment is one run, each id equals only itself.
    once = alike.sum(dtype=jnp.int32) == jnp.minimum(layout.counts, most).sum(dtype=jnp.int32)
    return (layout.counts.max() <= most) & once & (ids == key_ids).all()


def _lengths_of(layout: _Layout, segments: int) -> compat.kernels.CudnnLengths:
    """Return the starts and lengths of the segments, for a kernel with capacity `segments` per row."""
    batch, length = layout.begins.shape
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
    starts = jnp.full((batch, segments + 1), -1, jnp.int32)
    starts = starts.at[rows, jnp.minimum(layout.ordinals, segments)].set(layout.starts)
    there = jnp.arange(segments, dtype=jnp.int32)[None]
    # The last segment ends with the row, the others where the next begins.
    ends = jnp.where(there == layout.counts - 1, length, starts[:, 1:])
    lengths = jnp.where(there < layout.counts, ends - starts[:, :-1], -1)
    return compat.kernels.CudnnLengths(lengths, lengths, starts)


def _places(layout: _Layout) -> tuple[jax.Array, jax.Array]:
    """Return the index of each position's segment over all rows, and the offset in it, both `[batch, length]`."""
    positions = jnp.arange(layout.starts.shape[1], dtype=jnp.int32)[None]
    return layout.first + layout.ordinals, positions - layout.starts


def _of_rows(stats: jax.Array, layout: _Layout) -> jax.Array:
    """Return cuDNN's statistics `[batch * segments, heads, length]` as `[batch, heads, length]`."""
    segment, place = _places(layout)
    rows: jax.Array = stats[segment, :, place]
    return rows.transpose(0, 2, 1)


def _of_segments(rows: jax.Array, layout: _Layout, segments: int) -> jax.Array:
    """Undo `_of_rows`; entries past the end of a segment are zero."""
    batch, heads, length = rows.shape
    segment, place = _places(layout)
    empty = jnp.zeros((batch * segments, heads, length), rows.dtype)
    return empty.at[segment, :, place].set(rows.transpose(0, 2, 1))
