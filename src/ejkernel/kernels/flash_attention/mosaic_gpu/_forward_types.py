# SPDX-License-Identifier: Apache-2.0
"""What the forward's kernel reads, writes and waits for."""

from __future__ import annotations

from typing import Any, NamedTuple

from ._forward_plan import ROWS, ForwardPlan
from .visibility import BlockRange, remainder


class Inputs(NamedTuple):
    """Arrays in global memory; those that a call does not have are `None`.

    Attributes:
        query, key, value: As in `Operands`.
        table: `[batch or 1, heads or 1, tiles, 4]`, int32; see `visibility`.
        query_segments, key_segments: `[batch, 1, padded to whole tiles or blocks]`, int32.
        key_lengths: `[batch]`, int32, at most the number of keys.
        key_bias: `[batch or 1, heads or 1, padded to whole blocks]`, float32.
        bias: `[batch or 1, heads or 1, queries, keys]`.
        mask: `[batch or 1, heads or 1, keys / 32, queries]`, padded; a bit for each key, which hides it if not set.
        dropout: `[batch, heads, padded to whole tiles]`, the words of the rows that a dropout's mask is drawn with.
    """

    query: Any
    key: Any
    value: Any
    table: Any = None
    query_segments: Any = None
    key_segments: Any = None
    key_lengths: Any = None
    key_bias: Any = None
    bias: Any = None
    mask: Any = None
    dropout: Any = None


class Outputs(NamedTuple):
    """Arrays in global memory: `[batch, queries, heads, value_dim]`, and `[batch, heads, padded to whole tiles]`."""

    out: Any
    lse: Any


class Buffers(NamedTuple):
    """Shared memory: buffers of warpgroups for queries and outputs, and stages of all else."""

    query: Any
    key: Any
    value: Any
    out: Any
    bias: Any
    mask: Any
    key_bias: Any
    key_segments: Any


class Barriers(NamedTuple):
    """What warpgroups wait for: `full` that a copy has come, `free` that it is not needed any more."""

    query_full: Any
    query_free: Any
    key_full: Any
    key_free: Any
    value_full: Any
    value_free: Any
    extra_full: Any  # all else that belongs to a block of keys
    extra_free: Any
    turn: Any  # whose turn it is at the tensor core


class Tile(NamedTuple):
    """Where a tile lies; numbers that are known as it begins."""

    batch: Any
    head: Any
    row: Any
    blocks: BlockRange


class Part(NamedTuple):
    """A warpgroup's part of a tile.

    Attributes:
        tile: Which tile.
        number: How many tiles this block of threads had before.
        warpgroup: Which warpgroup.
        slot: The number of the buffer of its queries.
        row: Its first row.
        head: Its head.
    """

    tile: Tile
    number: Any
    warpgroup: Any
    slot: Any
    row: Any
    head: Any


class Memory(NamedTuple):
    """All that the warpgroups of one block of threads share."""

    plan: ForwardPlan
    inputs: Inputs
    outputs: Outputs
    buffers: Buffers
    barriers: Barriers
    simulated: bool

    def query_slot(self, warpgroup: Any, number: Any) -> Any:
        """Return the number of the buffer, and of the barrier, of a warpgroup's queries in its tile of that number."""
        params = self.plan.params
        return remainder(number, params.query_buffers) * params.warpgroups + warpgroup

    def query(self, slot: Any) -> Any:
        """Return a buffer of queries."""
        query = self.buffers.query[0] if self.plan.params.share_buffer else self.buffers.query
        return query.at[slot]

    def out(self, warpgroup: Any, slot: Any) -> Any:
        """Return the buffer of a warpgroup's output."""
        if not self.plan.params.share_buffer:
            return self.buffers.out.at[warpgroup]
        return self.buffers.query[1].at[slot, 0:ROWS]

    def by_key(self) -> list[tuple[Any, Any]]:
        """Return what else there is of each block of keys: the array that it is copied from, and its buffer."""
        inputs, buffers = self.inputs, self.buffers
        pairs = ((inputs.key_bias, buffers.key_bias), (inputs.key_segments, buffers.key_segments))
        return [pair for pair in pairs if pair[0] is not None]


def within(array: Any, batch: Any, head: Any) -> tuple[Any, Any]:
    """Return the index into the first two axes of an array that may have 1 there."""
    return 0 if array.shape[0] == 1 else batch, 0 if array.shape[1] == 1 else head
