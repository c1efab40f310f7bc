# SPDX-License-Identifier: Apache-2.0
"""Paged attention in plain JAX: a loop over tiles of queries, and for each tile a loop over blocks of pages.

Both loops run as often as the batch needs: a sequence in decode costs the pages that it reads, and nothing is padded to
the longest sequence. Only one block of pages of each tile in work is in memory.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel import compat
from ejkernel.kernels._varying import unify_varying
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.implementation import Implementation
from ejkernel.ops.utils.messages.names import NamedFields

from .common import Operands, PagedCall, as_bits, from_bits, planned, sorted_before, within_cache
from .plan import PlanArrays

_TOKENS = tuple(1 << i for i in range(6, 14))  # of the blocks of a space
_BLOCK_TOKENS = 512
_LONGEST = 2048  # tokens of a block that a heuristic takes
_BLOCK_BYTES = 64 << 20  # of all blocks of a step, on an accelerator
_LONG_BYTES = 2 * _BLOCK_BYTES  # with long blocks, for few sequences


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class XlaParams(NamedFields):
    """The sizes of a step.

    Attributes:
        block_pages: Pages per block.
        tiles: Tiles per step. They take as many steps as the longest of them; an accelerator needs many.
    """

    block_pages: int = 16
    tiles: int = 1

    def __post_init__(self) -> None:
        for name in ("block_pages", "tiles"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} must be a positive integer, got {value!r}.")


class Xla(Implementation[PagedCall]):
    """Paged attention in plain JAX: supports every call on every platform."""

    name = "xla"
    params = XlaParams

    def heuristic(self, call: PagedCall) -> XlaParams:
        """Return blocks that fit in the caches of a CPU, or tiles that fill an accelerator."""
        on_cpu = (call.platform or compat.programs.target_kind()) == "cpu"
        pages = _block_pages(call, _BLOCK_TOKENS)
        if on_cpu:
            return XlaParams(block_pages=pages)
        tiles = max(1, min(call.table[0], _BLOCK_BYTES // _block_bytes(call, pages)))
        if tiles < call.table[0] or call.q[0] > call.table[0]:  # prefill reads few blocks in vain with short ones
            return XlaParams(block_pages=pages, tiles=tiles)
        # Few sequences fill an accelerator with long blocks alone. On one H200, 40 heads and 8 KV heads of 256 in
        # bfloat16: 2 sequences of 65,536 with blocks of 512, 1,024 and 2,048 tokens took 1,332, 861 and 684 us, and 8
        # of 2,048 with blocks of 512 and 1,024 tokens 201 and 179 us.
        most = _LONGEST if call.window is None else min(_LONGEST, call.window)
        longer = [_block_pages(call, tokens) for tokens in _TOKENS if _BLOCK_TOKENS < tokens <= most]
        fitting = [own for own in longer if tiles * _block_bytes(call, own) <= _LONG_BYTES]
        return XlaParams(block_pages=max([pages, *fitting]), tiles=tiles)

    def space(self, call: PagedCall) -> list[XlaParams]:
        """Return blocks of several sizes, each with several numbers of tiles."""
        blocks = dict.fromkeys(_block_pages(call, tokens) for tokens in _TOKENS)
        tiles = [tiles for tiles in (1, 2, 4, 8, 16, 32, 64, 128, 256) if tiles < 2 * call.table[0]] or [1]
        found = [XlaParams(block_pages=pages, tiles=count) for pages in blocks for count in tiles]
        fitting = [own for own in found if own.tiles * _block_bytes(call, own.block_pages) <= 2 * _LONG_BYTES]
        return list(dict.fromkeys((self.heuristic(call), *fitting)))

    def forward(self, call: PagedCall, /, *args: Any, params: XlaParams) -> tuple[Any, Any]:
        """Return the output, and the log-sum-exp if the call returns it."""
        out, lse = _attention(call, unify_varying(Operands(*args)), params)
        return (out, lse) if call.return_lse else out, ()


def _block_pages(call: PagedCall, tokens: int) -> int:
    return max(1, min(tokens // call.pages[1], call.table[1]))


def _block_bytes(call: PagedCall, pages: int) -> int:
    """Return the bytes of one block in float32, as it is copied and computed."""
    return max(1, 4 * pages * math.prod(call.pages[1:]))


class _Tiles(NamedTuple):
    """Tiles of one step, each of queries of one sequence."""

    sequence: jax.Array  # [tiles]
    tokens: jax.Array  # [tiles, queries]; for rows without a query, a token past the end
    positions: jax.Array  # [tiles, queries]: the last key that each query sees; -1 for rows without a query
    first_page: jax.Array  # [tiles]
    blocks: jax.Array  # [tiles]: the number of blocks to read, from the first page on


class _Sums(NamedTuple):
    """Running sums of the softmax of each row, in float32."""

    top: jax.Array  # [tiles, kv_heads, rows]
    total: jax.Array  # [tiles, kv_heads, rows]
    out: jax.Array  # [tiles, kv_heads, rows, value_dim]


def _attention(call: PagedCall, operands: Operands, params: XlaParams) -> tuple[jax.Array, jax.Array]:
    out = jnp.zeros((*call.q[:2], call.out_dim), operands.q.dtype)
    lse = jnp.full(call.q[:2], -jnp.inf, jnp.float32)
    out, lse, _ = unify_varying((out, lse, operands.q))
    if 0 in (*call.q, *call.table, *call.pages):
        return out, lse
    operands, plan = planned(call, operands)
    run = _Run(call, operands, plan, params)
    out, lse = run.all_tiles(plan.decodes[0], (out, lse), decode=True)
    return run.all_tiles(plan.tiles[-1], (out, lse), decode=False) if call.q[0] > 1 else (out, lse)


class _Run(NamedTuple):
    """A call with its plan."""

    call: PagedCall
    operands: Operands
    plan: PlanArrays
    params: XlaParams

    def all_tiles(
        self, count: jax.Array, results: tuple[jax.Array, jax.Array], *, decode: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Return output and log-sum-exp with those of the sequences in decode, or of `count` tiles of prefill."""
        queries = 1 if decode else min(self.call.batch_shape.tile_queries, self.call.q[0])
        width = min(self.params.tiles, self.call.table[0] if decode else self.call.q[0])

        def step(index: jax.Array, results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            numbers = index * width + jnp.arange(width, dtype=jnp.int32)
            tiles = self._tiles(numbers, numbers < count, queries, decode=decode)
            out, lse = self._attend(tiles)
            outs, lses = results
            outs = outs.at[tiles.tokens].set(out.astype(outs.dtype), mode="drop")
            return outs, lses.at[tiles.tokens].set(lse, mode="drop") if self.call.return_lse else lses

        found: tuple[jax.Array, jax.Array] = lax.fori_loop(0, -(-count // width), step, results)
        return found

    def _tiles(self, numbers: jax.Array, used: jax.Array, queries: int, *, decode: bool) -> _Tiles:
        """Return the tiles with these numbers."""
        (sequences, _), page, offsets = self.call.table, self.call.pages[1], self.operands.query_offsets
        ends = self.plan.tiles
        at = numbers if decode else sorted_before(ends, numbers) - 1
        at = jnp.clip(at, 0, sequences - 1)
        sequence = self.plan.order[at]
        begin, end = offsets[sequence], offsets[sequence + 1]
        begin = begin if decode else begin + (numbers - ends[at]) * queries
        token = begin[:, None] + jnp.arange(queries, dtype=jnp.int32)[None]
        inside = used[:, None] & (token < end[:, None])
        positions = jnp.where(inside, self.operands.kv_lengths[sequence][:, None] - (end[:, None] - token), -1)
        window = self.call.window
        lowest = jnp.zeros_like(begin) if window is None else positions[:, 0] - window
        first = jnp.maximum(jnp.maximum(lowest, 0) // page, self.plan.first_pages[sequence])
        stop = jnp.minimum(jnp.max(positions, axis=1) // page + 1, self.plan.end_pages[sequence])
        blocks = jnp.where(used, -(-jnp.maximum(stop - first, 0) // self.params.block_pages), 0)
        # rows without a query lead past the end of the output, which drops them
        return _Tiles(sequence, jnp.where(inside, token, self.call.q[0]), positions, first, blocks)

    def _attend(self, tiles: _Tiles) -> tuple[jax.Array, jax.Array]:
        """Return the output `[tiles, queries, heads, value_dim]` and the log-sum-exp `[tiles, queries, heads]`."""
        call, (count, queries) = self.call, tiles.tokens.shape
        kv_heads, rows = call.pages[2], queries * call.group
        q = self.operands.q[jnp.minimum(tiles.tokens, call.q[0] - 1)]
        q = q.reshape(count, queries, kv_heads, call.group, -1).swapaxes(1, 2).reshape(count, kv_heads, rows, -1)
        empty = jnp.zeros((count, kv_heads, rows), jnp.float32)
        sums = _Sums(empty - jnp.inf, empty, jnp.zeros((*empty.shape, call.out_dim), jnp.float32))
        sums, q, tiles = unify_varying((sums, q, tiles))
        sums = lax.fori_loop(0, jnp.max(tiles.blocks), lambda index, sums: self._add(index, sums, q, tiles), sums)
        out, lse = self._finished(sums, queries)

        def by_token(x: jax.Array) -> jax.Array:
            x = x.reshape(count, kv_heads, queries, call.group, *x.shape[3:]).swapaxes(1, 2)
            return x.reshape(count, queries, call.q[1], *x.shape[4:])

        return by_token(out), by_token(lse)

    def _add(self, index: jax.Array, sums: _Sums, q: jax.Array, tiles: _Tiles) -> _Sums:
        """Return the sums with one more block of keys."""
        call = self.call
        key, value, at = self._block(index, tiles)
        logits = jnp.einsum("tkrd,tskd->tkrs", q, key, preferred_element_type=jnp.float32) * call.scale
        if self.operands.k_scale is not None:
            logits = logits * self.operands.k_scale[None, :, None, None]
        if call.soft_cap is not None:
            logits = call.soft_cap * jnp.tanh(logits / call.soft_cap)
        position = jnp.repeat(tiles.positions, call.group, axis=1)[:, None, :, None]
        visible = at[:, None, None, :] <= position
        if call.window is not None:
            visible &= at[:, None, None, :] >= position - call.window
        logits = jnp.where(visible, logits, -jnp.inf)
        top = jnp.maximum(sums.top, jnp.max(logits, axis=-1))
        finite = jnp.where(top == -jnp.inf, 0, top)
        weights, factor = jnp.exp(logits - finite[..., None]), jnp.exp(sums.top - finite)
        total = sums.total * factor + jnp.sum(weights, axis=-1)
        added = jnp.einsum("tkrs,tskd->tkrd", weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
        return _Sums(top, total, sums.out * factor[..., None] + added)

    def _block(self, index: jax.Array, tiles: _Tiles) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return keys and values of a block, `[tiles, keys, kv_heads, head_dim]`, and their positions."""
        call, size = self.call, self.params.block_pages
        column = tiles.first_page[:, None] + index * size + jnp.arange(size, dtype=jnp.int32)[None]
        page = self.operands.page_table[tiles.sequence[:, None], jnp.minimum(column, call.table[1] - 1)]
        page = within_cache(call, page)
        both = from_bits(as_bits(self.operands.kv_pages)[page], self.operands.kv_pages.dtype)
        both = both.reshape(len(page), -1, *call.pages[2:])
        at = column[..., None] * call.pages[1] + jnp.arange(call.pages[1], dtype=jnp.int32)[None, None]
        at = at.reshape(len(page), -1)
        key, value = both[..., 0, :], both[..., -1, :]
        if call.value_dim is not None:
            value = value[..., : call.value_dim]
        # A weight of zero does not cancel a NaN in the unused part of a page.
        used = at < self.operands.kv_lengths[tiles.sequence][:, None]
        value = jnp.where(used[..., None, None], value, jnp.zeros((), value.dtype))
        return key.astype(call.dtype), value.astype(call.dtype), at

    def _finished(self, sums: _Sums, queries: int) -> tuple[jax.Array, jax.Array]:
        """Return the output and the log-sum-exp, with the sinks; rows without keys and sinks give zeros."""
        top, total, out = sums
        sinks = self.operands.sinks
        if sinks is not None:
            rows = jnp.tile(sinks.astype(jnp.float32).reshape(-1, self.call.group), (1, queries))[None]
            highest = jnp.maximum(top, rows)
            finite = jnp.where(highest == -jnp.inf, 0, highest)
            factor = jnp.exp(top - finite)
            top, total, out = highest, total * factor + jnp.exp(rows - finite), out * factor[..., None]
        safe = jnp.where(total == 0, 1, total)
        out = out / safe[..., None]
        scale = self.operands.v_scale if self.call.value_dim is None else self.operands.k_scale
        out = out if scale is None else out * scale[None, :, None, None]
        return out, jnp.where(total == 0, -jnp.inf, top + jnp.log(safe))
