# SPDX-License-Identifier: Apache-2.0
"""The loop of a kernel: the tiles that a block of one axis sees of the other axis, and the mask of each.

The forward and the kernel for the query's gradient own blocks of queries and walk over keys; the kernel for the
gradients of key and value owns blocks of keys and walks over queries. Both use this loop. A tile has rows of the
block's axis and columns of the other one. Skipped tiles follow from the block's index and from segment ids in vector
memory, not from tables: the compiler's simulator can evaluate the former.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels._vector_memory import LANES, up

from .numbers import MASKED, column, down, floor, least, most

_MOST_TILES = 32  # of one basic block

Hide = Callable[[Any], Any]
"""Returns scores with those of hidden pairs replaced."""
Update = Callable[[Any, Any, "Hide | None"], None]
"""Computes one tile: `(rows, columns, hide)`, the first two as slices."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What a block sees: row `i` is at column `i + offset`, and sees those from `before` to `after` it.

    Attributes:
        offset: Static.
        before: `None`: all before.
        after: `None`: all after.
    """

    offset: int
    before: int | None
    after: int | None

    @property
    def everything(self) -> bool:
        """Whether all columns are visible."""
        return self.before is None and self.after is None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The static sizes of a walk.

    Attributes:
        block: Rows of a block.
        blocks: Blocks.
        columns: All columns, with padding; a multiple of `part`.
        part: Columns in vector memory at once; a multiple of `chunk`.
        chunk: Columns per step of the loop.
        unroll: Chunks in one basic block.
        rows: Rows per tile of a chunk; divides `block`.
        strip: Rows per tile at an edge; divides `block`.
    """

    block: int
    blocks: int
    columns: int
    part: int
    chunk: int
    unroll: int
    rows: int
    strip: int

    @property
    def parts(self) -> int:
        """The number of parts."""
        return self.columns // self.part


class _Strips(NamedTuple):
    """Tiles at the edges of the visible columns.

    `tiles` are `(first row, first column, columns)`, from `first` to `end` in all. Columns are relative to the block's
    position minus `lead`.
    """

    lead: int
    tiles: list[tuple[int, int, int]]
    first: int
    end: int


def walk(sight: Sight, plan: Plan, place: tuple[Any, Any], update: Update, ids: tuple[Any, Any] | None = None) -> None:
    """Compute all tiles that a block sees of one part of the columns.

    Args:
        sight: The static rules.
        plan: The sizes.
        place: The block's index, and the part's.
        update: Computes one tile.
        ids: References to the ids of the block's rows and of the part's columns, `[1, n]`; a row sees columns with its
            own id.
    """
    loop = _Loop(sight, plan, place, update, ids)
    strips = _strips(sight, plan)
    if strips is None:
        loop.chunks()
        return
    inside = _inside(sight, plan, strips, loop.position)
    if inside is True:
        loop.with_strips(strips)
        return
    pl.when(inside)(lambda: loop.with_strips(strips))
    pl.when(~inside)(loop.chunks)


class _Loop(NamedTuple):
    sight: Sight
    plan: Plan
    place: tuple[Any, Any]
    update: Update
    ids: tuple[Any, Any] | None

    @property
    def position(self) -> Any:
        """The column at which the block's first row is."""
        return self.place[0] * self.plan.block + self.sight.offset

    def chunks(self) -> None:
        """Compute whole chunks, masked at the edges of the visible part."""
        lo, a, b, hi = visible_chunks(self.sight, self.position, self.plan)
        if self.sight.before is not None:
            self._each(lo, a, masked=True)
        self._each(a, b, masked=False)
        if self.sight.after is not None:
            self._each(b, hi, masked=True)

    def with_strips(self, strips: _Strips) -> None:
        """Compute the chunks that all rows see, and strips at the edges."""
        chunk, (before, after) = self.plan.chunk, (self.sight.before, self.sight.after)
        base = self.position - strips.lead
        if before is None:
            self._each(0, floor(base, chunk), masked=False)
        if after is None:
            self._each(floor(base + strips.end, chunk), self.plan.columns // chunk, masked=False)

        def run() -> None:
            first = base - self._first_of_part()
            for row, start, width in strips.tiles:
                distance = start - strips.lead - row
                hide = window_mask(self.sight, (self.plan.strip, width), distance)
                at = pl.multiple_of(first + start, math.gcd(chunk, start))
                self._tile(row, self.plan.strip, at, width, hide)

        if self.plan.parts == 1:
            run()
        else:
            pl.when(floor(base, self.plan.part) == self.place[1])(run)

    def _first_of_part(self) -> Any:
        return self.place[1] * self.plan.part if self.plan.parts > 1 else 0

    def _each(self, lo: Any, hi: Any, *, masked: bool) -> None:
        """Compute chunks `lo` to `hi`, as far as they are in the part."""
        plan = self.plan
        if plan.parts > 1:
            per_part = plan.part // plan.chunk
            lo = most(lo, self.place[1] * per_part)
            hi = least(hi, (self.place[1] + 1) * per_part)
        _repeat(lo, hi, lambda g: self._chunk(g, masked), 1 if masked or self.ids is not None else plan.unroll)

    def _chunk(self, g: Any, masked: bool) -> None:
        plan = self.plan
        start = g * plan.chunk
        for row in range(0, plan.block, plan.rows):
            distance = start - self.position - row
            hide = window_mask(self.sight, (plan.rows, plan.chunk), distance) if masked else None
            first = pl.multiple_of(start - self._first_of_part(), plan.chunk)
            self._tile(row, plan.rows, first, plan.chunk, hide)

    def _tile(self, row: int, height: int, start: Any, width: int, hide: Hide | None) -> None:
        rows, columns = pl.ds(row, height), pl.ds(start, width)
        if self.ids is None:
            self.update(rows, columns, hide)
            return
        own, others = self.ids[0][:, rows], self.ids[1][:, columns]
        low, high, first, last = jnp.min(own), jnp.max(own), jnp.min(others), jnp.max(others)
        one = (low == high) & (first == last) & (low == first)

        def mixed(scores: Any) -> Any:
            same = column(own)[:, :1] == others
            return jnp.where(same, scores if hide is None else hide(scores), MASKED)

        pl.when(one)(lambda: self.update(rows, columns, hide))
        pl.when(~one & (first <= high) & (low <= last))(lambda: self.update(rows, columns, mixed))


class Scores(NamedTuple):
    """Numbers of scores: of one tile, one chunk, the chunks of one basic block, all strips, and the largest strip.

    They are 0 for code that a kernel does not have.
    """

    tile: int
    chunk: int
    ahead: int
    edges: int
    strip: int


def scores_at_once(sight: Sight, plan: Plan, *, branches: bool) -> Scores:
    """Return how many scores each kind of basic block of a kernel computes; the estimate of its memory needs them.

    Args:
        sight: The static rules.
        plan: The sizes.
        branches: Whether each tile is a basic block, because segment ids decide whether to compute it.
    """
    strips, chunk = _strips(sight, plan), plan.block * plan.chunk
    sizes = [0] if strips is None else [plan.strip * width for _, _, width in strips.tiles]
    if strips is not None and _has_only_strips(sight, plan, strips):
        return Scores(0, 0, 0, sum(sizes), max(sizes))
    unroll = 1 if branches else _emitted(sight, plan)
    return Scores(plan.rows * plan.chunk, chunk, unroll * chunk, sum(sizes), max(sizes))


def _emitted(sight: Sight, plan: Plan) -> int:
    """Return the chunks in the body of the loop; with one edge its bounds are traced, so it may never run."""
    chunks, one_edge = plan.columns // plan.chunk, (sight.before is None) != (sight.after is None)
    return plan.unroll if one_edge and chunks > 1 else min(plan.unroll, chunks)


def _has_only_strips(sight: Sight, plan: Plan, strips: _Strips) -> bool:
    """Return whether a single block sees no chunk besides its strips; the compiler then drops the loop."""
    base = sight.offset - strips.lead
    if plan.blocks > 1 or base + strips.first < 0 or base + strips.end > plan.columns:
        return False
    before = sight.before is not None or base < plan.chunk
    return before and (sight.after is not None or (base + strips.end) // plan.chunk >= plan.columns // plan.chunk)


def visible_chunks(sight: Sight, position: Any, plan: Plan) -> tuple[Any, Any, Any, Any]:
    """Return `lo, a, b, hi`: some row of a block sees the chunks from `lo` to `hi`, and all rows those from `a` to `b`.

    Args:
        sight: The static rules.
        position: The column at which the block's first row is.
        plan: The sizes.
    """
    chunk, total = plan.chunk, plan.columns // plan.chunk
    last = position + plan.block - 1
    lo: Any = 0
    a: Any = 0
    b: Any = total
    hi: Any = total
    if sight.after is not None:
        hi = least(floor(last + sight.after + chunk, chunk), total)
        b = least(floor(position + sight.after + 1, chunk), total)
    if sight.before is not None:
        lo = least(floor(position - sight.before, chunk), hi)
        a = floor(most(last - sight.before, 0) + chunk - 1, chunk)
    a = least(most(a, lo), hi)
    return lo, a, least(most(b, a), hi), hi


def window_mask(sight: Sight, shape: tuple[int, int], distance: Any) -> Hide | None:
    """Return a function that hides a tile's pairs outside of the window; `None` if all pairs are inside.

    Args:
        sight: The static rules.
        shape: Of the tile.
        distance: The tile's first column minus the position of its first row. If it is static, the mask covers only the
            columns that have hidden pairs.
    """
    height, width = shape
    left, right = 0, width
    if isinstance(distance, int):
        if sight.before is not None:
            left = min(up(max(height - 1 - sight.before - distance, 0)), width)
        if sight.after is not None:
            right = max(min(down(sight.after - distance + 1), width), 0)
        if left == 0 and right == width:
            return None
    if not isinstance(distance, int) or left >= right:
        return lambda scores: _masked(scores, sight, distance, 0)

    def hide(scores: Any) -> Any:
        # Mosaic has no slices of width 0
        parts = [_masked(scores[:, :left], sight, distance, 0)] if left else []
        parts.append(scores[:, left:right])
        if right < width:
            parts.append(_masked(scores[:, right:], sight, distance, right))
        return jnp.concatenate(parts, axis=1)

    return hide


def _masked(scores: Any, sight: Sight, distance: Any, first: int) -> Any:
    ahead = lax.broadcasted_iota(jnp.int32, scores.shape, 1) - lax.broadcasted_iota(jnp.int32, scores.shape, 0)
    visible: Any = None
    if sight.after is not None:
        visible = ahead <= sight.after - distance - first
    if sight.before is not None:
        recent = ahead >= -sight.before - distance - first
        visible = recent if visible is None else visible & recent
    return scores if visible is None else jnp.where(visible, scores, MASKED)


def _strips(sight: Sight, plan: Plan) -> _Strips | None:
    """Return tiles with rows that end at the edges of the visible columns; `None` if whole chunks are computed instead.

    With one edge, such as the diagonal of causal attention, the tiles reach from the last whole chunk to the edge; with
    two, from edge to edge.
    """
    before, after = sight.before, sight.after
    if sight.everything or plan.block % plan.chunk:
        return None
    both = before is not None and after is not None
    lead = sight.offset % plan.chunk
    if ((before or 0) > plan.block and not both) or ((after or 0) > plan.block and not both):
        return None
    if plan.parts > 1 and (both or lead or before or after or plan.part % plan.block):
        return None  # a strip would reach into another part
    tiles = []
    end_of_block = 0 if before is None else up(lead + plan.block - before, plan.chunk)
    for row in range(0, plan.block, plan.strip):
        first = 0 if before is None else down(lead + row - before)
        end = end_of_block if after is None else up(lead + row + plan.strip + after)
        # no larger than a tile of a chunk
        size = max(down(plan.rows * plan.chunk // plan.strip), LANES) if both else end - first
        tiles += [(row, at, min(size, end - at)) for at in range(first, end, size)]
    if len(tiles) > _MOST_TILES or max(width for _, _, width in tiles) > plan.part:
        return None
    tiles.sort(key=lambda tile: -tile[2])  # long ones first, which takes 2 % fewer simulated cycles on v5e
    return _Strips(lead, tiles, min(t[1] for t in tiles), max(t[1] + t[2] for t in tiles))


def _inside(sight: Sight, plan: Plan, strips: _Strips, position: Any) -> Any:
    """Return whether a block's strips are inside of the columns: true if they are for each block."""
    last = (plan.blocks - 1) * plan.block + sight.offset - strips.lead + strips.end
    low = sight.offset - strips.lead + strips.first
    base = position - strips.lead
    conditions = [] if low >= 0 else [base + strips.first >= 0]
    conditions += [] if last <= plan.columns else [base + strips.end <= plan.columns]
    if not conditions:
        return True
    return conditions[0] & conditions[-1]


def _repeat(lo: Any, hi: Any, body: Callable[[Any], None], unroll: int) -> None:
    """Call `body` with `lo` to `hi`, `unroll` times in one basic block."""
    if isinstance(lo, int) and isinstance(hi, int) and hi - lo <= unroll:
        for g in range(lo, hi):
            body(g)
        return
    hi = most(lo, hi)
    if unroll > 1:
        rounds = floor(hi - lo, unroll)
        start = lo

        def several(t: Any, carry: None) -> None:
            for at in range(unroll):
                body(start + t * unroll + at)

        lax.fori_loop(0, rounds, several, None)
        lo = lo + rounds * unroll
    lax.fori_loop(lo, hi, lambda g, _: body(g), None)
