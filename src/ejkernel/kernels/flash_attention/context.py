# SPDX-License-Identifier: Apache-2.0
"""Attention over a sequence that is sharded over mesh axes: each device has a shard of queries and of keys.

A *block* is the attention of some rows of this device's queries to some columns of one shard of keys. Blocks are calls
like any other. Their outputs are combined by log-sum-exp in float32. The backward computes each block with the output
and the log-sum-exp of the whole row, so that the blocks' gradients add up.

- *Ring*: keys and values travel from device to device, one shard further in each step, while the device attends to the
  shard that it has. In the backward, the sums of their gradients travel behind them, and return to the owner.
- *Bands*: with a sliding window, each device receives only the keys inside its window, directly from their owners.
- *Gathered*: every device receives all keys and values at once, and attends to its past in one call.

In zig-zag order the sequence is cut into `2 n` pieces for `n` devices, and device `i` has the pieces `i` and `2 n - 1 -
i`. With a causal mask, every device then has the same work in every step of the ring.

Sources: ring attention, Liu et al., arXiv:2310.01889; balanced causal orders, Brandon et al., arXiv:2311.09431; zig-zag
pieces and gathered keys, Llama 3, arXiv:2407.21783, section 3.3.2.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._varying import of_any_example, unify_varying

from ._zigzag import from_zigzag, moved, to_natural_shard, to_zigzag, to_zigzag_shard
from .common import EMPTY_ROW_LSE, Operands, Residuals, accumulator, returned_lse

Sides = tuple[int | None, int | None]
"""The visible keys before and after a query's position; `None` means all."""
State = Any  # of the queries: output and log-sum-exp in the forward, the gradient in the backward
Sums = Any  # of a shard of keys: nothing in the forward, the gradients of keys and values in the backward


class Keys(NamedTuple):
    """Keys of one shard, or of all: `[batch, keys, ...]`."""

    key: jax.Array
    value: jax.Array
    segments: jax.Array | None

    def part(self, columns: slice) -> Keys:
        """Return some of the keys."""
        found: Keys = jax.tree.map(lambda x: x[:, columns], self)
        return found


class Block(NamedTuple):
    """Rows of the queries, columns of a shard of keys, and the sides of the window between them."""

    rows: slice
    columns: slice
    sides: Sides = (None, None)


class Attend(Protocol):
    """The call of a block."""

    def __call__(self, operands: Operands, sides: Sides) -> Residuals:
        """Return the output and the log-sum-exp."""


class Pull(Protocol):
    """The backward call of a block."""

    def __call__(
        self, operands: Operands, sides: Sides, residuals: Residuals, cotangents: Sequence[jax.Array]
    ) -> Sequence[Any]:
        """Return the gradients of query, key and value, from the cotangents of the output and the log-sum-exp."""


Visit = Callable[[Operands, Block, State], tuple[State, Sums]]
"""The computation of a block, whose rows and columns the operands have: `(operands, block, state) -> (state, sums)`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """The attention of one device's queries to the keys of all devices.

    Attributes:
        axes: The mesh axes of the sequence.
        sides: The sides of the window.
        zigzag: Whether the sequence is in zig-zag order.
        gather: Whether to gather all keys; `None` decides by their size.
        attend, pull: The calls of a block.
    """

    axes: tuple[str, ...]
    sides: Sides
    zigzag: bool
    gather: bool | None
    attend: Attend
    pull: Pull

    def forward(self, operands: Operands) -> Residuals:
        """Return the output and the log-sum-exp, without sinks."""
        if self._wants_natural_order:
            out, lse = self._natural.forward(self._reordered(operands))
            return to_zigzag_shard(out, 1, self.axes), to_zigzag_shard(lse, 2, self.axes)
        dtype = accumulator(operands.query.dtype)
        batch, length, heads, _ = operands.query.shape
        empty = (
            jnp.zeros((batch, length, heads, operands.value.shape[3]), dtype),
            jnp.full((batch, heads, length), -jnp.inf, dtype),
        )

        def visit(given: Operands, block: Block, state: State) -> tuple[State, Sums]:
            return _combined(state, block.rows, self.attend(given, block.sides)), ()

        (out, lse), _ = _Walk.over(self, operands, visit, lambda keys: ()).everything(empty)
        return out.astype(operands.query.dtype), jnp.where(lse == -jnp.inf, EMPTY_ROW_LSE, lse)

    def backward(self, operands: Operands, residuals: Residuals, cotangents: Sequence[jax.Array]) -> Sequence[Any]:
        """Return the gradients of query, key and value.

        Args:
            operands: The operands, without sinks.
            residuals: Output and log-sum-exp of this device's queries, over all keys and including sinks.
            cotangents: Those of the output and, if it is a result, of the log-sum-exp.
        """
        rows = [*residuals, *cotangents]
        if self._wants_natural_order:
            rows = [to_natural_shard(x, axis, self.axes) for x, axis in zip(rows, _LENGTH_AXES, strict=False)]
            found = self._natural.backward(self._reordered(operands), (rows[0], rows[1]), rows[2:])
            return [to_zigzag_shard(x, 1, self.axes) for x in found]
        dtype = accumulator(operands.query.dtype)

        def visit(given: Operands, block: Block, state: State) -> tuple[State, Sums]:
            out, lse, *cts = (_rows(x, block.rows, axis) for x, axis in zip(rows, _LENGTH_AXES, strict=False))
            dquery, *found = self.pull(given, block.sides, (out, lse), cts)
            return _added(state, dquery, block.rows), tuple(x.astype(dtype) for x in found[:2])

        def blank(keys: Keys) -> Sums:
            return jnp.zeros(keys.key.shape, dtype), jnp.zeros(keys.value.shape, dtype)

        walk = _Walk.over(self, operands, visit, blank)
        dquery, sums = walk.everything(jnp.zeros(operands.query.shape, dtype))
        return [x.astype(operands.query.dtype) for x in (dquery, *sums)]

    # --- zig-zag order ---

    @property
    def _wants_natural_order(self) -> bool:
        # A window needs neighbours, and is balanced in natural order.
        return self.zigzag and self.sides not in _BALANCED

    @property
    def _natural(self) -> Context:
        return dataclasses.replace(self, zigzag=False)

    def _reordered(self, operands: Operands) -> Operands:
        names = ("query", "key", "value", "query_segments", "key_segments")
        return operands._replace(
            **{name: to_natural_shard(x, 1, self.axes) for name in names if (x := getattr(operands, name)) is not None}
        )


_BALANCED: tuple[Sides, ...] = ((None, None), (None, 0))  # full and causal attention
_LENGTH_AXES = (1, 2, 1, 2)  # of output, log-sum-exp, and their cotangents


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Walk:
    """A device's order of visits to the blocks of its queries.

    Attributes:
        context: The call.
        operands: This device's shards.
        visit: The computation of a block.
        blank: Returns zeros for the gradients of keys.
        sides: The sides of the window; `None` for a side beyond the sequence.
        count: The number of devices.
        index: The number of this device.
    """

    context: Context
    operands: Operands
    visit: Visit
    blank: Callable[[Keys], Sums]
    sides: Sides
    count: int
    index: jax.Array

    @classmethod
    def over(cls, context: Context, operands: Operands, visit: Visit, blank: Callable[[Keys], Sums]) -> _Walk:
        """Return the walk over the context's devices."""
        count = int(lax.axis_size(context.axes))
        whole = count * operands.query.shape[1]
        left, right = (None if side is None or side >= whole - 1 else side for side in context.sides)
        index, operands = unify_varying((lax.axis_index(context.axes), operands))
        return cls(
            context=context, operands=operands, visit=visit, blank=blank, sides=(left, right), count=count, index=index
        )

    @property
    def keys(self) -> Keys:
        """This device's keys."""
        return Keys(self.operands.key, self.operands.value, self.operands.key_segments)

    @property
    def rows(self) -> slice:
        """All rows."""
        return slice(0, self.operands.query.shape[1])

    @property
    def columns(self) -> slice:
        """All columns of a shard."""
        return slice(0, self.operands.key.shape[1])

    def everything(self, state: State) -> tuple[State, Sums]:
        """Return the state after all blocks, and the gradients of this device's keys."""
        state, sums = self._varying(state, self.blank(self.keys))
        if self.sides not in _BALANCED:
            return self._bands(state, sums)
        return self._gathered(state, sums) if self._gathers else self._ring(state, sums)

    # --- the ring ---

    def _ring(self, state: State, sums: Sums) -> tuple[State, Sums]:
        def step(number: Any, carry: Any, *, last: bool = False) -> Any:
            state, sums, keys = carry
            sums = self._shifted(sums, 1)
            following = keys if last else self._shifted(keys, 1)  # while this device computes
            shard = (self.index - number) % self.count
            return *self._step(*self._blocks(shard), keys, self._key_lengths(shard), state, sums), following

        following = self._shifted(self.keys, 1)
        carry = *self._own(state, sums), following
        if self.count > 2:
            carry = lax.fori_loop(1, self.count - 1, step, carry)
        if self.count > 1:
            carry = step(self.count - 1, carry, last=True)
        return carry[0], self._shifted(carry[1], 1)

    def _blocks(self, shard: Any) -> tuple[Any, list[Block]]:
        """Return the possible blocks of another shard, and the number of the visible one; 0 for none."""
        half, rows, columns = self.rows.stop // 2, self.rows, self.columns
        if self.sides[1] is None:
            return 1, [Block(rows, columns)]
        if not self.context.zigzag:
            return jnp.where(shard < self.index, 1, 0), [Block(rows, columns)]
        blocks = [Block(rows, slice(0, half)), Block(slice(half, rows.stop), columns)]
        return jnp.where(shard < self.index, 1, 2), blocks

    # --- windows ---

    def _bands(self, state: State, sums: Sums) -> tuple[State, Sums]:
        found = [(d, _band(self.sides, d, self.rows.stop)) for d in range(1 - self.count, self.count) if d]
        # each shard's part comes directly from its owner
        bands = [
            (distance, band, self._shifted(self.keys.part(band.columns), -distance, wraps=False))
            for distance, band in found
            if band is not None
        ]
        state, sums = self._own(state, sums)
        for distance, (rows, columns, sides), part in bands:
            shard = self.index + distance
            choice = jnp.where((shard >= 0) & (shard < self.count), 1, 0)
            block = Block(rows, slice(0, columns.stop - columns.start), sides)
            lengths = _within(self._key_lengths(shard), columns)
            state, added = self._step(choice, [block], part, lengths, state, self.blank(part))
            sums = _all_added(sums, self._shifted(added, distance, wraps=False), columns)
        return state, sums

    # --- gathered keys ---

    @property
    def _gathers(self) -> bool:
        if self.context.gather is not None:
            return self.context.gather
        return self.count * (self.operands.key.size + self.operands.value.size) <= self.operands.query.size

    def _gathered(self, state: State, sums: Sums) -> tuple[State, Sums]:
        axes, zigzag = self.context.axes, self.context.zigzag
        whole = jax.tree.map(lambda x: lax.all_gather(x, axes, axis=1, tiled=True), self.keys)
        whole = from_zigzag(whole, self.count) if zigzag else whole
        every = slice(0, whole.key.shape[1])
        state, far = self._varying(state, self.blank(whole))
        if self.sides[1] is None:
            state, far = self._visited(Block(self.rows, every), whole, self.operands.key_lengths, state, far)
        for rows, start in self._starts() if self.sides[1] == 0 else ():
            own = Block(rows, rows, self.sides)
            state, sums = self._visited(own, self.keys, self._key_lengths(self.index), state, sums)
            before = jnp.full(self.operands.query.shape[:1], start, jnp.int32)
            if self.operands.key_lengths is not None:
                before = jnp.minimum(before, self.operands.key_lengths)
            state, far = self._visited(Block(rows, every), whole, before, state, far)
        far = to_zigzag(far, self.count) if zigzag else far
        far = jax.tree.map(lambda x: lax.psum_scatter(x, axes, scatter_dimension=1, tiled=True), far)
        return state, jax.tree.map(jnp.add, sums, far)

    # --- blocks ---

    def _own(self, state: State, sums: Sums) -> tuple[State, Sums]:
        return self._visited(
            Block(self.rows, self.columns, self.sides), self.keys, self._key_lengths(self.index), state, sums
        )

    def _step(
        self, choice: Any, blocks: Sequence[Block], keys: Keys, lengths: jax.Array | None, state: State, sums: Sums
    ) -> tuple[State, Sums]:
        """Visit one of several blocks; none if `choice` is 0, or if segments or lengths hide all keys."""

        def visiting(block: Block) -> Callable[..., Any]:
            return lambda keys, lengths, state, sums: self._visited(block, keys, lengths, state, sums)

        def skip(keys: Keys, lengths: jax.Array | None, state: State, sums: Sums) -> tuple[State, Sums]:
            return self._varying(state, sums)

        choice = jnp.where(self._is_visible(keys, lengths), choice, 0)
        found: tuple[State, Sums] = lax.switch(choice, [skip, *map(visiting, blocks)], keys, lengths, state, sums)
        return found

    def _visited(
        self, block: Block, keys: Keys, lengths: jax.Array | None, state: State, sums: Sums
    ) -> tuple[State, Sums]:
        """Visit a block of these keys, of which each example has so many."""
        own, part = self.operands, keys.part(block.columns)
        given = own._replace(
            query=own.query[:, block.rows],
            key=part.key,
            value=part.value,
            query_segments=None if own.query_segments is None else own.query_segments[:, block.rows],
            key_segments=part.segments,
            query_lengths=_within(self._local(own.query_lengths, self.index, self.rows), block.rows),
            key_lengths=_within(lengths, block.columns),
        )
        state, added = self.visit(given, block, state)
        return self._varying(state, _all_added(sums, added, block.columns))

    def _varying(self, state: State, sums: Sums) -> tuple[State, Sums]:
        """Return both with the types of all branches and steps: varying over all axes."""
        _, state, sums = unify_varying((self.operands, state, sums))
        return state, sums

    def _is_visible(self, keys: Keys, lengths: jax.Array | None) -> jax.Array:
        """Return whether segments and lengths let any query see any key."""
        visible: jax.Array = jnp.bool_(True)
        if lengths is not None:
            visible &= jnp.any(lengths > 0)
        own = self.operands.query_segments
        if own is not None and keys.segments is not None:
            visible &= jnp.any((keys.segments.max(1) >= own.min(1)) & (own.max(1) >= keys.segments.min(1)))
        return of_any_example(visible)

    def _key_lengths(self, shard: Any) -> jax.Array | None:
        return self._local(self.operands.key_lengths, shard, self.columns)

    def _local(self, lengths: jax.Array | None, shard: Any, entries: slice) -> jax.Array | None:
        """Return how many entries of a shard are within the lengths of the whole sequences."""
        if lengths is None:
            return None
        numbers = self._numbers(shard)
        size = entries.stop // len(numbers)
        # the positions in a shard ascend, so those within a length come first
        counts = [jnp.clip(lengths - number * size, 0, size) for number in numbers]
        return sum(counts[1:], counts[0]).astype(lengths.dtype)

    def _numbers(self, shard: Any) -> list[Any]:
        """Return the numbers of a shard's pieces."""
        return [shard, 2 * self.count - 1 - shard] if self.context.zigzag else [shard]

    def _starts(self) -> list[tuple[slice, Any]]:
        """Return the rows of this device's pieces, and their positions in the sequence."""
        numbers = self._numbers(self.index)
        size = self.operands.query.shape[1] // len(numbers)
        return [(slice(i * size, (i + 1) * size), number * size) for i, number in enumerate(numbers)]

    def _shifted(self, tree: Any, by: int, *, wraps: bool = True) -> Any:
        """Return what the device `by` places before has; without `wraps`, zeros where no such device exists."""
        ends = [(i, i + by) for i in range(self.count)]
        moves = [(i, to % self.count) for i, to in ends if wraps or 0 <= to < self.count]
        return jax.tree.map(lambda x: moved(x, self.context.axes, moves), tree)


def _band(sides: Sides, distance: int, length: int) -> Block | None:
    """Return the visible block of the shard `distance` places ahead, with rules for its own rows and columns.

    The first row and the first column have the same position, because there are as many rows as columns.
    """
    left, right = sides
    low = -math.inf if left is None else -left - distance * length  # limits of column minus row
    high = math.inf if right is None else right - distance * length
    if low >= length or -high >= length:
        return None
    skipped = int(max(low, 0)), int(max(-high, 0))  # columns before the first visible one, and rows
    size = length - max(skipped)
    low, high = (limit - skipped[0] + skipped[1] for limit in (low, high))
    inner = (None if low <= 1 - size else int(-low), None if high >= size - 1 else int(high))
    rows, columns = (slice(first, first + size) for first in (skipped[1], skipped[0]))
    return Block(rows, columns, inner)


def _combined(state: State, rows: slice, found: Residuals) -> State:
    """Return output and log-sum-exp over the keys so far and those of another block."""
    out, lse = state
    own_out, own_lse, more, more_lse = out[:, rows], lse[..., rows], found[0], returned_lse(found[1])
    top = lax.stop_gradient(jnp.maximum(own_lse, more_lse))
    top = jnp.where(top == -jnp.inf, 0, top)  # no visible key so far
    own_weight, weight = jnp.exp(own_lse - top), jnp.exp(more_lse - top)
    total = own_weight + weight
    divisor = jnp.where(total == 0, 1, total)
    shares = [(x / divisor).transpose(0, 2, 1)[..., None] for x in (own_weight, weight)]
    merged = own_out * shares[0] + more.astype(out.dtype) * shares[1]
    merged_lse = jnp.where(total == 0, -jnp.inf, top + jnp.log(divisor))
    return out.at[:, rows].set(merged), lse.at[..., rows].set(merged_lse)


def _rows(x: jax.Array, rows: slice, axis: int) -> jax.Array:
    return lax.slice_in_dim(x, rows.start, rows.stop, axis=axis)


def _within(lengths: jax.Array | None, part: slice) -> jax.Array | None:
    """Return how many entries of a part are within lengths of the whole."""
    return None if lengths is None else jnp.clip(lengths - part.start, 0, part.stop - part.start)


def _added(whole: jax.Array, part: jax.Array, where: slice) -> jax.Array:
    return whole.at[:, where].add(part.astype(whole.dtype))


def _all_added(sums: Sums, added: Sums, columns: slice) -> Sums:
    return jax.tree.map(lambda whole, part: _added(whole, part, columns), sums, added)
