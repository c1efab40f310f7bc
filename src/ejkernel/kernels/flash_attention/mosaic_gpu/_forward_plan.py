# SPDX-License-Identifier: Apache-2.0
"""What is static of one launch of the forward, and the shared memory that it takes."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from ejkernel.kernels._hopper import MULTIPROCESSORS
from ejkernel.kernels.flash_attention.common import AttentionCall, Rules

from .availability import DTYPES
from .params import ForwardParams

ROWS = 64  # of queries that a warpgroup owns: those of one tensor-core instruction
REGISTERS = {1: (24, 240), 2: (24, 240), 3: (32, 160)}  # of a thread that copies and one that computes, by warpgroups


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardPlan:
    """What is static of one launch.

    Attributes:
        bias: Itemsize of a bias with rows and keys, which is copied block by block; 0 if there is none.
        mask: Whether there is a mask with rows and keys.
        key_bias: Whether a bias that is the same for all rows is added.
        key_mask: Whether keys are hidden from all rows.
        segments: Whether segment ids are compared.
        key_lengths: Whether only some keys of each example count, and there are no segment ids that say so.
        caps_late: Whether the soft cap is of the sum of logits and bias.
        table: Whether the blocks of each tile are read from a table.
    """

    batch: int
    queries: int
    keys: int
    heads: int
    groups: int
    head_dim: int
    value_dim: int
    dtype: str
    rules: Rules
    params: ForwardParams
    bias: int = 0
    mask: bool = False
    key_bias: bool = False
    key_mask: bool = False
    segments: bool = False
    key_lengths: bool = False
    caps_late: bool = False
    table: bool = False

    @property
    def tile_rows(self) -> int:
        """Rows of queries in a tile."""
        return ROWS if self.params.pack_heads else ROWS * self.params.warpgroups

    @property
    def tile_heads(self) -> int:
        """Heads in a tile."""
        return self.params.warpgroups if self.params.pack_heads else 1

    @property
    def row_tiles(self) -> int:
        """Tiles that cover the queries of one head."""
        return -(-self.queries // self.tile_rows)

    @property
    def tiles(self) -> int:
        """All tiles."""
        return self.batch * self.row_tiles * (self.heads // self.tile_heads)

    @property
    def programs(self) -> int:
        """Blocks of threads."""
        return min(MULTIPROCESSORS, self.tiles) if self.params.persistent else self.tiles

    @property
    def head_swizzle(self) -> int:
        """Bytes that are swizzled together in queries and keys."""
        return swizzle(self.head_dim * 2)

    @property
    def value_swizzle(self) -> int:
        """Likewise in values, both along a row and along the keys: a product sums whole tiles of keys."""
        return swizzle(math.gcd(self.value_dim, self.params.kv_block) * 2)

    @property
    def out_swizzle(self) -> int:
        """Likewise in the output."""
        return swizzle(self.value_dim * 2)

    @property
    def adds(self) -> bool:
        """Whether anything but zero and minus infinity is added to the logits after the soft cap."""
        return (bool(self.bias) or self.key_bias) and not self.caps_late

    @property
    def frees_late(self) -> bool:
        """Whether a tile's buffer of queries is freed by the next tile, which has one of its own, and then by none."""
        return self.params.share_buffer and self.params.query_buffers > 1

    @property
    def hides_tail(self) -> bool:
        """Whether the last block of keys ends behind the last key, and the window does not hide that."""
        right = self.rules.right
        return self.keys % self.params.kv_block != 0 and (right is None or right > 0)

    def shared_bytes(self) -> int:
        """Return the bytes of shared memory that a block of threads takes."""
        p = self.params
        rows, extras = p.warpgroups * ROWS, self.bias or self.mask or self.key_bias or self.key_mask or self.segments
        query, out = rows * self.head_dim * 2 * p.query_buffers, rows * self.value_dim * 2
        block = p.stages * p.kv_block
        buffers = [
            query if p.share_buffer else query + out,
            block * self.head_dim * 2,
            block * self.value_dim * 2,
            block * rows * self.bias,
            block * rows // 8 * self.mask,
            block * 4 * (self.key_bias or self.key_mask),
            block * 4 * self.segments,
        ]
        barriers = (6 if extras else 4) * p.stages + p.query_buffers * (p.warpgroups + 1) + p.warpgroups
        return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in buffers) + 8 * barriers + 2 * _ALIGNMENT


_ALIGNMENT = 1024  # that every buffer begins at a multiple of


def imbalance(plan: ForwardPlan) -> float:
    """Return how long the program with the most work of a persistent causal launch takes, over their mean.

    Whoever deals tiles in turns may deal the long ones to the same programs again and again.
    """
    heads = plan.heads // plan.tile_heads
    together = heads // plan.groups if plan.params.heads_first and heads % plan.groups == 0 else heads
    numbers = np.arange(plan.tiles)
    row_tile = plan.row_tiles - 1 - numbers % (plan.row_tiles * heads) % (plan.row_tiles * together) // together
    seen = np.clip((row_tile + 1) * plan.tile_rows + plan.keys - plan.queries, 0, plan.keys)
    blocks = -(-seen // plan.params.kv_block) + 1  # a tile takes as long as one more, to begin and to end
    turn, place = np.divmod(numbers, plan.programs)
    program = np.where(turn % 2, plan.programs - 1 - place, place)
    # One order can take 1.6 times as long as another by this, and times that were measured agree with it.
    work = np.bincount(program, blocks, plan.programs)
    return float(work.max() / work.mean())


def plan_of(call: AttentionCall, params: ForwardParams) -> ForwardPlan:
    """Return what is static of a launch."""
    bias, mask = _kind(call.bias, call), _kind(call.attention_mask, call)
    caps_late = call.bias is not None and call.rules.soft_cap is not None and call.rules.cap_after_bias
    if caps_late and not bias:  # under a cap, what is added to a row does not only shift it
        bias = "block"
    # As `lengths_as_segments` leaves them.
    segments = call.segments or call.query_lengths
    key_lengths = call.key_lengths and not segments
    return ForwardPlan(
        batch=call.query[0],
        queries=call.query[1],
        keys=call.key[1],
        heads=call.query[2],
        groups=call.key[2],
        head_dim=whole_dim(call.query[3]),
        value_dim=whole_dim(call.value[3]),
        dtype=call.dtype,
        rules=call.rules,
        params=params,
        bias=0 if bias != "block" else 2 if call.bias_dtype in DTYPES else 4,
        mask=mask == "block",
        key_bias=bias == "keys",
        key_mask=mask == "keys",
        segments=segments,
        key_lengths=key_lengths,
        caps_late=caps_late,
        table=segments or key_lengths or mask != "",
    )


def _kind(shape: tuple[int, ...] | None, call: AttentionCall) -> str:
    """Return whether a bias or mask differs between `keys`, or in a `block` of rows and keys; empty if in neither."""
    if shape is None or (shape[3] == 1 and call.key[1] > 1):
        return ""
    return "keys" if shape[2] == 1 else "block"


def whole_dim(size: int) -> int:
    """Return the width, which swizzles divide, that heads of `size` are filled up to with zeros."""
    return -(-size // 16) * 16


def swizzle(row_bytes: int) -> int:
    """Return the widest swizzle, in bytes, that divides a row; 0 if none does."""
    return next((width for width in (128, 64, 32) if row_bytes % width == 0), 0)
