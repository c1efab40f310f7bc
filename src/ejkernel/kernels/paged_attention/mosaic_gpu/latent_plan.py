# SPDX-License-Identifier: Apache-2.0
"""The static description of a launch of latent attention, and which calls have one."""

from __future__ import annotations

import dataclasses

from ejkernel.kernels._hopper.tile_shapes import OVERHEAD, padded
from ejkernel.kernels.paged_attention import schedule
from ejkernel.kernels.paged_attention.common import PagedCall
from ejkernel.kernels.paged_attention.schedule import BLOCK

ROWS = 64  # of a tile: query heads of one token
REST = 64  # columns of keys behind the values, e.g. with rotary embeddings; their buffers also hold the weights
MOST_HEADS = 128
MOST_VALUES = 512  # columns: each consumer warpgroup sums half of them in its registers
STEP = 128  # the number of values is a multiple of it


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentPlan:
    """One launch of latent attention.

    A tile has one token with up to 64 of its heads. The heads of a token are split evenly over `parts` neighbouring
    blocks of threads, which read the same keys at about the same time; such a group takes several shares of the
    schedule.

    Attributes:
        tokens: Query tokens.
        heads: Query heads, padded to `parts` equal numbers of them in steps of 8.
        parts: Blocks of threads of a group.
        value_dim: Columns of the values, the first ones of the keys.
        pages, page_size: Sizes of the cache.
        dtype: Dtype of queries, cache and output.
        scale, soft_cap, window: As in the call.
        shares: Shares of the schedule, i.e. programs of decode.
    """

    tokens: int
    heads: int
    parts: int
    value_dim: int
    pages: int
    page_size: int
    dtype: str
    scale: float
    soft_cap: float | None
    window: int | None
    shares: int

    @property
    def rows(self) -> int:
        """Heads of a tile."""
        return self.heads // self.parts

    @property
    def half(self) -> int:
        """Columns of the values for each consumer warpgroup."""
        return self.value_dim // 2

    @property
    def head_dim(self) -> int:
        """Columns of queries and keys."""
        return self.value_dim + REST

    @property
    def group_shares(self) -> int:
        """Shares of the schedule that a group takes; one block of threads fits on a multiprocessor instead of two."""
        return 2 * self.parts

    @property
    def groups(self) -> int:
        """Groups of blocks of threads."""
        return -(-self.shares // self.group_shares)

    @property
    def programs(self) -> int:
        """Blocks of threads."""
        return self.groups * self.parts

    @property
    def copies(self) -> int:
        """Copies that fill a buffer of keys."""
        return max(BLOCK // self.page_size, 1)


def unsupported_reason(call: PagedCall) -> str | None:
    """Return why no launch of latent attention runs `call`, and an alternative; `None` if one does."""
    kv_heads, values, rest = call.pages[2], call.out_dim, call.q[2] - call.out_dim
    if kv_heads != 1 or call.q[1] > MOST_HEADS:
        return (
            f"with value_dim, 'mosaic_gpu' takes one KV head and up to {MOST_HEADS} query heads, got {kv_heads} and "
            f"{call.q[1]}; use 'xla'."
        )
    if rest != REST or values % STEP or values > MOST_VALUES:
        return (
            f"value_dim={values} with head_dim={call.q[2]}: 'mosaic_gpu' takes a multiple of {STEP} up to "
            f"{MOST_VALUES}, and {REST} elements behind the values; use 'xla'."
        )
    return None


def shared_bytes(call: PagedCall) -> int:
    """Return the bytes of shared memory that a block of threads takes."""
    queries, keys = ROWS * call.q[2] * 2, 2 * BLOCK * call.q[2] * 2
    return queries + keys + (2 + 4) * ROWS * 4 + OVERHEAD


def latent_plan(call: PagedCall) -> LatentPlan:
    """Return the plan of a launch."""
    parts = -(-call.q[1] // ROWS)
    return LatentPlan(
        tokens=call.q[0],
        heads=padded(call.q[1], 8 * parts),
        parts=parts,
        value_dim=call.out_dim,
        pages=call.pages[0],
        page_size=call.pages[1],
        dtype=call.dtype,
        scale=call.scale,
        soft_cap=call.soft_cap,
        window=call.window,
        shares=schedule.PROGRAMS,
    )
