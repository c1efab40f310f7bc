# SPDX-License-Identifier: Apache-2.0
"""The static description of one launch, and the shared memory that it takes."""

from __future__ import annotations

import dataclasses

from ejkernel.kernels._hopper.tile_shapes import OVERHEAD
from ejkernel.kernels.paged_attention import schedule
from ejkernel.kernels.paged_attention.common import PagedCall
from ejkernel.kernels.paged_attention.schedule import BLOCK

from .params import MosaicGpuParams

PIECE = 64  # columns of queries and output that are copied at once: one swizzle of 16-bit numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """One launch for tiles of up to `tile_tokens` query tokens.

    A tile's rows are its tokens, each with the query heads of one KV head, padded to `group_rows`. An item is a tile
    with one KV head.

    Attributes:
        tokens, heads, kv_heads, head_dim: Sizes of the queries and the cache.
        pages, page_size, columns: Sizes of the cache and the page table.
        tile_tokens: Query tokens of a tile.
        dtype: Dtype of queries, cache and output.
        scale, soft_cap, window: As in the call.
        sinks, scales, return_lse: Whether the launch has sinks, scales of keys and values, and returns the log-sum-exp.
        stages, query_buffers: As in the parameters.
        programs: Blocks of threads.
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
    scale: float
    soft_cap: float | None
    window: int | None
    sinks: bool
    scales: bool
    return_lse: bool
    stages: int
    query_buffers: int
    programs: int

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
    def pieces(self) -> int:
        """Pieces of a query or output row."""
        return self.head_dim // PIECE

    @property
    def copies(self) -> int:
        """Copies that fill one pipeline stage."""
        return max(BLOCK // self.page_size, 1)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a block of threads takes."""
        blocks = self.stages * BLOCK * 2 * self.head_dim * 2
        queries, weights = self.query_buffers * self.rows * self.head_dim * 2, BLOCK * self.rows * 2
        results = (4 + 2) * self.rows * self.head_dim  # a share, and a tile of the output
        return blocks + queries + weights + results + OVERHEAD


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
        scale=call.scale,
        soft_cap=call.soft_cap,
        window=call.window,
        sinks=call.sinks,
        scales=call.scales,
        return_lse=call.return_lse,
        stages=params.stages,
        query_buffers=params.query_buffers,
        programs=schedule.PROGRAMS,
    )
