# SPDX-License-Identifier: Apache-2.0
"""The static description of one launch, and the shared memory that it takes."""

from __future__ import annotations

import dataclasses
import math

from ejkernel.kernels._hopper.columns import Columns, split_columns
from ejkernel.kernels._hopper.tile_shapes import OVERHEAD
from ejkernel.kernels._options import check_parameters
from ejkernel.kernels.flash_attention.common import Rules
from ejkernel.kernels.flash_attention.mosaic_gpu.params import ForwardParams
from ejkernel.kernels.flash_attention.mosaic_gpu.plan import ROWS, ForwardPlan
from ejkernel.kernels.paged_attention import schedule
from ejkernel.kernels.paged_attention.common import PagedCall
from ejkernel.kernels.paged_attention.schedule import BLOCK
from ejkernel.ops.utils.messages.names import NamedFields


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MosaicGpuParams(NamedFields):
    """Launch parameters.

    A block of threads has one producer and one consumer warpgroup. The launch is persistent: each block of threads
    takes an equal number of blocks of 64 keys.

    Attributes:
        stages: Pipeline stages, each with the keys and values of 64 tokens.
        query_buffers: Buffers of queries; with 2, those of the next tile are copied early.
    """

    stages: int = 3
    query_buffers: int = 2

    def __post_init__(self) -> None:
        check_parameters(self, stages=range(2, 13), query_buffers=(1, 2))


NARROW = ("int8", "float8_e4m3fn")
PIECE = 64  # columns of queries and output that are copied at once: one swizzle of 16-bit numbers
_HALF = (233_472 - 2 * 1024) // 2  # bytes of shared memory, if two blocks of threads share a multiprocessor
_PREFILL = ForwardParams(persistent=True, query_buffers=2)
# More than 128 columns fit in shared memory so. As in `flash_attention`, ping-pong costs time then.
_WIDE_PREFILL = ForwardParams(persistent=True, kv_block=64, share_buffer=True, ping_pong=False)


def is_widened(call: PagedCall) -> bool:
    """Return whether prefill, or latent attention, reads a 16-bit copy of an 8-bit cache."""
    return call.cache_dtype != call.dtype and (call.value_dim is not None or call.q[0] > call.table[0])


def as_run(call: PagedCall) -> PagedCall:
    """Return the call as the kernels run it: on the 16-bit copy of the cache, if they make one."""
    if not is_widened(call):
        return call
    pages = min(call.pages[0], math.prod(call.table))
    return dataclasses.replace(call, pages=(pages, *call.pages[1:]), cache_dtype=call.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """One launch for tiles of up to `tile_tokens` query tokens.

    A tile's rows are its tokens, each with the query heads of one KV head, padded to `group_rows`. An item is a tile
    with one KV head.

    Attributes:
        tokens, heads, kv_heads: Sizes of the queries and the cache.
        head_dim: Columns of queries, keys, values and output.
        pages, page_size, columns: Sizes of the cache and the page table.
        tile_tokens: Query tokens of a tile.
        dtype: Dtype of queries and output.
        cache_dtype: Dtype of the cache.
        scale, soft_cap, window: As in the call.
        sinks, scales, return_lse: Whether the launch has sinks, scales of keys and values, and returns the log-sum-exp.
        stages, query_buffers: As in the parameters.
    """

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    pages: int
    page_size: int
    columns: int
    tile_tokens: int
    dtype: str
    cache_dtype: str
    scale: float
    soft_cap: float | None
    window: int | None
    sinks: bool
    scales: bool
    return_lse: bool
    stages: int
    query_buffers: int

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.heads // self.kv_heads

    @property
    def group_rows(self) -> int:
        """Rows of one token."""
        return schedule.group_rows(self.group)

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.tile_tokens * self.group_rows

    @property
    def is_narrow(self) -> bool:
        """Whether the cache has 8 bits, so that keys and values are widened."""
        return self.cache_dtype in NARROW

    @property
    def product_dtype(self) -> str:
        """Dtype of the operands of both products; float16 holds every number of 8 bits."""
        return "float16" if self.is_narrow else self.dtype

    @property
    def unit(self) -> int:
        """Columns of keys or values in one swizzle; those of 8 bits are computed as even and odd ones, 64 each."""
        return 2 * PIECE if self.is_narrow else PIECE

    @property
    def units(self) -> int:
        """Units of keys, and as many of values; the last one may end in zeros."""
        return -(-self.head_dim // self.unit)

    @property
    def is_whole(self) -> bool:
        """Whether the keys and values of a token are whole units, which one copy takes; otherwise each has its own."""
        return self.head_dim % self.unit == 0

    @property
    def width(self) -> int:
        """Columns of keys and of values in shared memory, with the zeros of the last unit."""
        return self.units * self.unit

    @property
    def pieces(self) -> int:
        """Pieces of a query or output row, and accumulators of the weighted values."""
        return self.width // PIECE

    @property
    def out_dim(self) -> int:
        """Columns of the output; with 8 bits those of each unit have the even ones first, and zeros remain."""
        return self.width if self.is_narrow else self.head_dim

    @property
    def key_copies(self) -> int:
        """Runs of keys that fill one pipeline stage."""
        return max(BLOCK // self.page_size, 1)

    @property
    def copies(self) -> int:
        """Copies that fill one pipeline stage."""
        return self.key_copies * (1 if self.is_whole else 2 * self.units)

    @property
    def copied_bytes(self) -> int:
        """Bytes of the cache in one pipeline stage."""
        return BLOCK * 2 * self.head_dim * (1 if self.is_narrow else 2)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a block of threads takes."""
        blocks = self.stages * BLOCK * 2 * self.width * (1 if self.is_narrow else 2)
        queries, weights = self.query_buffers * self.rows * self.width * 2, BLOCK * self.rows * 2
        return blocks + queries + weights + self.rows * self.width * 2 + OVERHEAD

    @property
    def shares(self) -> int:
        """Shares of the schedule that a program takes: two if no two blocks of threads fit on a multiprocessor."""
        # Several units of 8-bit numbers take 156 registers of a thread; two blocks may have 128.
        has_many_registers = self.is_narrow and self.units > 1
        return 2 if has_many_registers or self.shared_bytes > _HALF else 1

    @property
    def programs(self) -> int:
        """Blocks of threads."""
        return -(-schedule.PROGRAMS // self.shares)


def launch_plan(call: PagedCall, params: MosaicGpuParams, tile_tokens: int) -> LaunchPlan:
    """Return the plan of a launch."""
    pages, page_size, kv_heads, _, head_dim = call.pages
    return LaunchPlan(
        tokens=call.q[0],
        heads=call.q[1],
        kv_heads=kv_heads,
        head_dim=head_dim,
        pages=pages,
        page_size=page_size,
        columns=call.table[1],
        tile_tokens=tile_tokens,
        dtype=call.dtype,
        cache_dtype=call.cache_dtype,
        scale=call.scale,
        soft_cap=call.soft_cap,
        window=call.window,
        sinks=call.sinks,
        scales=call.scales,
        return_lse=call.return_lse,
        stages=params.stages,
        query_buffers=params.query_buffers,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillPlan(ForwardPlan):
    """One launch of prefill.

    A tile's rows are its tokens, each with the same `tile_heads` heads. An item is a tile with some heads.

    Attributes:
        pages, page_size: Sizes of the cache.
        most_tiles: The length of the table of tiles.
        return_lse: Whether the launch returns the log-sum-exp.
        by_warp: Whether the warps of a producer share the copies of a block of keys, if there are several for each.
    """

    pages: int
    page_size: int
    most_tiles: int
    return_lse: bool
    by_warp: bool

    @property
    def tile_heads(self) -> int:
        """Heads of an item."""
        return schedule.prefill_heads(self.heads // self.groups)

    @property
    def bundles(self) -> int:
        """Items of a tile."""
        return self.heads // self.tile_heads

    @property
    def tiles(self) -> int:
        """All items."""
        return self.most_tiles * self.bundles

    @property
    def programs(self) -> int:
        """Blocks of threads: one for each multiprocessor."""
        return min(self.tiles, -(-schedule.PROGRAMS // 2)) if self.params.persistent else self.tiles

    @property
    def leaves_idle(self) -> bool:
        """Whether warpgroups skip tiles; these do not."""
        return False

    @property
    def warpgroup_tokens(self) -> int:
        """Query tokens of a consumer warpgroup."""
        return ROWS // self.tile_heads

    @property
    def row_columns(self) -> tuple[Columns, ...]:
        """The pieces of a query or output row."""
        return split_columns(self.head_dim)

    @property
    def copied_keys(self) -> int:
        """Keys of one copy."""
        return math.gcd(self.page_size, self.params.kv_block)

    @property
    def key_copies(self) -> int:
        """Runs of keys that fill a stage of keys."""
        return self.params.kv_block // self.copied_keys


def prefill_plan(call: PagedCall, tiles: int, *, by_warp: bool) -> PrefillPlan:
    """Return the plan of a launch with so many tiles."""
    head_dim = call.q[2]
    return PrefillPlan(
        batch=1,
        queries=call.q[0],
        keys=call.table[1] * call.pages[1],
        heads=call.q[1],
        groups=call.pages[2],
        head_dim=head_dim,
        value_dim=head_dim,
        rules=Rules(scale=call.scale, left=call.window, right=0, soft_cap=call.soft_cap),
        dtype=call.dtype,
        params=_PREFILL if head_dim <= 2 * PIECE else _WIDE_PREFILL,
        pieced=head_dim % PIECE > 0,
        pages=call.pages[0],
        page_size=call.pages[1],
        most_tiles=tiles,
        return_lse=call.return_lse,
        by_warp=by_warp,
    )
