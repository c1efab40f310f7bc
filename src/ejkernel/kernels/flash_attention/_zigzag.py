# SPDX-License-Identifier: Apache-2.0
"""Zig-zag order: an order of a sharded sequence that gives every device the same causal work.

The sequence is cut into `2 n` pieces for `n` devices, and device `i` has the pieces `i` and `2 n - 1 - i`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel import compat
from ejkernel.kernels._numbers import is_integer
from ejkernel.kernels._options import type_text
from ejkernel.kernels._varying import Tree
from ejkernel.ops.errors import ArgumentError
from ejkernel.ops.utils.values.scalars import given_text


def to_zigzag(tree: Tree, devices: int, *, axis: int = 1) -> Tree:
    """Return arrays with their sequences in zig-zag order, for `flash_attention(..., axis_name=..., zigzag=True)`.

    The sequence is cut into `2 * devices` pieces, and device `i` gets the pieces `i` and `2 * devices - 1 - i`. Reorder
    everything that belongs to tokens, before it is sharded: tokens, targets, segment ids and positions, e.g.
    `to_zigzag(jnp.arange(length), devices, axis=0)`.

    Args:
        tree: Arrays, of NumPy or JAX.
        devices: The number of devices that share a sequence.
        axis: The axis of the sequence in each array.

    Raises:
        ArgumentError: `devices` is not a positive integer, an array lacks the axis, or a sequence's length is not
            divisible by `2 * devices`.
    """
    return _reordered(tree, devices, axis, _zigzag_pieces)


def from_zigzag(tree: Tree, devices: int, *, axis: int = 1) -> Tree:
    """Return arrays in natural order: the inverse of `to_zigzag`.

    Args:
        tree: Arrays in zig-zag order, of NumPy or JAX.
        devices: The number of devices that share a sequence.
        axis: The axis of the sequence in each array.

    Raises:
        ArgumentError: `devices` is not a positive integer, an array lacks the axis, or a sequence's length is not
            divisible by `2 * devices`.
    """
    return _reordered(tree, devices, axis, lambda count: _inverse(_zigzag_pieces(count)))


def _zigzag_pieces(devices: int) -> list[int]:
    return [piece for i in range(devices) for piece in (i, 2 * devices - 1 - i)]


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _reordered(tree: Tree, devices: int, axis: int, order_of: Callable[[int], list[int]]) -> Tree:
    """Return arrays with the pieces of one axis in the order for a number of devices."""
    if not is_integer(devices) or devices < 1:
        raise ArgumentError(
            f"devices must be the number of devices that share a sequence, an int >= 1; got {given_text(devices)}."
        )
    if not is_integer(axis):
        raise ArgumentError(f"axis must be an int, the axis of the sequence in each array; got {given_text(axis)}.")

    def reordered(x: Any) -> Any:
        if not isinstance(x, np.ndarray | jax.Array) or not -x.ndim <= axis < x.ndim:
            raise ArgumentError(
                f"tree must consist of arrays that have the sequence as axis {axis}, got {type_text(x)}; pass axis=, "
                "e.g. axis=0 for arrays without a batch."
            )
        at, length = axis % x.ndim, x.shape[axis]
        if length % (2 * devices):
            raise ArgumentError(
                f"axis {axis} of each array must be divisible by 2 * devices = {2 * devices}, got shape "
                f"{tuple(x.shape)}; pad the sequence."
            )
        order = order_of(devices)
        shape = (*x.shape[:at], len(order), length // len(order), *x.shape[at + 1 :])
        if isinstance(x, np.ndarray):
            return x.reshape(shape).take(np.asarray(order), axis=at).reshape(x.shape)
        pieces = x.reshape(shape)
        # over explicit mesh axes JAX must be told that the result has the sharding of the pieces
        where = None if compat.tracing.explicit_mesh([jax.typeof(pieces)]) is None else jax.typeof(pieces).sharding
        return pieces.at[(*[slice(None)] * at, np.asarray(order))].get(out_sharding=where).reshape(x.shape)

    found: Tree = jax.tree.map(reordered, tree)
    return found


def to_natural_shard(x: jax.Array, axis: int, axes: tuple[str, ...]) -> jax.Array:
    """Return this device's shard in natural order, given its shard in zig-zag order.

    Each device has one piece of even number and one of odd number, in both orders.

    Args:
        x: The shard.
        axis: The axis of the sequence.
        axes: The mesh axes of the sequence.
    """
    first, second = jnp.split(x, 2, axis)
    pieces = zip(_swapped(first, second, axes), _moves(axes), strict=True)
    return jnp.concatenate([moved(piece, axes, moves) for piece, moves in pieces], axis)


def to_zigzag_shard(x: jax.Array, axis: int, axes: tuple[str, ...]) -> jax.Array:
    """Return this device's shard in zig-zag order, given its shard in natural order: the inverse."""
    pieces = zip(jnp.split(x, 2, axis), _moves(axes), strict=True)
    even, odd = (moved(piece, axes, [(to, source) for source, to in moves]) for piece, moves in pieces)
    return jnp.concatenate(_swapped(even, odd, axes), axis)


def _moves(axes: tuple[str, ...]) -> Iterator[list[tuple[int, int]]]:
    """Yield the moves to natural order of pieces with even numbers, and of those with odd ones."""
    count = lax.axis_size(axes)
    for odd in (0, 1):
        held = [i if i % 2 == odd else 2 * count - 1 - i for i in range(count)]
        yield [(i, piece // 2) for i, piece in enumerate(held)]


def _swapped(first: jax.Array, second: jax.Array, axes: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    """Return the arrays in this order on devices with an even number, else in the other."""
    is_even = lax.axis_index(axes) % 2 == 0
    return jnp.where(is_even, first, second), jnp.where(is_even, second, first)


def moved(x: jax.Array, axes: tuple[str, ...], moves: Sequence[tuple[int, int]]) -> jax.Array:
    """Return an array of another device, as `lax.ppermute`, whose devices are numbered in the order of `axes`.

    `lax.ppermute` numbers them in the order of the mesh, and later versions of JAX refuse other orders.
    """
    ordered = compat.tracing.in_mesh_order(axes)
    if ordered != axes:
        sizes = [lax.axis_size(axis) for axis in ordered]
        in_mesh = np.arange(math.prod(sizes)).reshape(sizes).transpose([ordered.index(axis) for axis in axes])
        numbers = in_mesh.ravel().tolist()
        moves = [(numbers[source], numbers[to]) for source, to in moves]
    found: jax.Array = lax.ppermute(x, ordered, moves)
    return found
