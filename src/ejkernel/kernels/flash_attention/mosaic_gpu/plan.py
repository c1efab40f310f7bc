# SPDX-License-Identifier: Apache-2.0
"""The static description of one forward launch, and the shared memory that it takes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from ejkernel.kernels._hopper import DTYPES, MULTIPROCESSORS, Registers, widest_swizzle
from ejkernel.kernels._hopper import unavailable as unavailable_on_hopper
from ejkernel.kernels._hopper.columns import Columns, split_columns
from ejkernel.kernels.flash_attention.common import AttentionCall, Rules, scale_reason
from ejkernel.ops.utils.values.signature import is_known

from .params import ForwardParams

ROWS = 64  # of one WGMMA instruction: the query rows of one consumer warpgroup of the forward
REGISTERS = {1: Registers(24, 240), 2: Registers(24, 240), 3: Registers(32, 160)}  # by consumer warpgroups
ALIGNMENT = 1024  # bytes, of every buffer: a swizzle of 128 bytes repeats after as many
_CACHED = 16 << 20  # bytes of keys and values that stay in the L2 cache, which has 50 MB
_MANY_SCORES = 1 << 27
_MOST_ORDERED = 1 << 12  # tiles of rows: the time of ordering them grows with their square; up to 1,024 were measured
SMALL_CAP = 50.0  # with half of it in place of a row's largest logit, weights are between exp(-75) and exp(25)
TILE_ROWS = 8  # of the tiles of shared memory
WHOLE_DIMS = (16, 32, 64, 96, 128, 160, 192, 224, 256)  # head dimensions that copies of whole tiles cover well


def unavailable(call: AttentionCall) -> str | None:
    """Return why no kernel of either direction runs `call`, and an alternative; `None` if one may."""
    if not is_known(*call.query, *call.key, *call.value):
        return "it needs static shapes, and this program is exported with symbolic ones; use 'xla'."
    missing = unavailable_on_hopper(call, "query, key and value", "'cudnn' or 'xla'")
    if missing is not None:
        return missing
    if call.dtype not in DTYPES:
        return f"query has dtype {call.dtype}; 'mosaic_gpu' supports bfloat16 and float16; cast it, or use 'xla'."
    return scale_reason(call, "'mosaic_gpu'")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """The common part of forward and backward.

    Attributes:
        batch, heads, groups: As in `Operands`.
        queries, keys: The lengths, without padding.
        head_dim, value_dim: The columns that they take in shared memory.
        rules: Of the call.
    """

    batch: int
    queries: int
    keys: int
    heads: int
    groups: int
    head_dim: int
    value_dim: int
    rules: Rules


def sizes_of(call: AttentionCall, padded: Callable[[int], int]) -> dict[str, Any]:
    """Return the fields of `AttentionSizes`, with head dimensions padded by this function."""
    names = ("batch", "queries", "heads", "head_dim")
    sizes = dict(zip(names, call.query, strict=True)) | {"keys": call.key[1], "groups": call.key[2]}
    return sizes | {"head_dim": padded(call.query[3]), "value_dim": padded(call.value[3]), "rules": call.rules}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardPlan(AttentionSizes):
    """The static description of one forward launch.

    Attributes:
        bias: Itemsize of a bias with rows and keys, which is copied block by block; 0 without one.
        mask: Whether a mask differs between rows and between keys.
        key_bias: Whether a bias is added that is the same for all rows.
        key_mask: Whether keys are hidden from all rows.
        segments: Whether segment ids are compared.
        key_lengths: Whether examples have key lengths and no segment ids that express them.
        caps_late: Whether the soft cap applies to the sum of logits and bias.
        table: Whether the range of key blocks of each tile is read from a table. Otherwise the kernel computes it from
            the window and the length; a mask of keys then applies to all blocks.
        pieced: Whether query, key, value and output are copied in pieces of columns: lengths or head dimensions are no
            multiples of the tiles of shared memory.
    """

    dtype: str
    params: ForwardParams
    pieced: bool = False
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
        """Query rows of a tile."""
        return ROWS if self.params.pack_heads else ROWS * self.params.warpgroups

    @property
    def tile_heads(self) -> int:
        """Heads of a tile."""
        return self.params.warpgroups if self.params.pack_heads else 1

    @property
    def row_tiles(self) -> int:
        """Tiles that cover the queries of one head."""
        return -(-self.queries // self.tile_rows)

    @property
    def head_tiles(self) -> int:
        """Tiles that cover the same queries of all heads of an example."""
        return self.heads // self.tile_heads

    @property
    def tiles(self) -> int:
        """All tiles."""
        return self.batch * self.row_tiles * self.head_tiles

    @property
    def bundle(self) -> int:
        """Heads, of one or several examples, whose tiles come together: from their last rows to their first ones."""
        heads = self.head_tiles
        if self.params.heads_first and heads % self.groups == 0:
            return heads // self.groups
        # The more heads, the more even the shares of the blocks of threads; but their keys and values are read once for
        # each row of tiles, and should stay in the cache.
        most = _CACHED // (self.keys * self.groups * (self.head_dim + self.value_dim) * 2)
        return heads * max(n for n in range(1, min(self.batch, max(most, 1)) + 1) if self.batch % n == 0)

    def position(self, row: Any) -> Any:
        """Return the key position of a query row."""
        return row + (self.keys - self.queries)

    @property
    def programs(self) -> int:
        """Blocks of threads."""
        return min(MULTIPROCESSORS, self.tiles) if self.params.persistent else self.tiles

    @property
    def deals_by_length(self) -> bool:
        """Whether a persistent launch deals its tiles by their lengths, which segments or key lengths decide."""
        # Of key lengths without a causal mask, the tiles of an example are alike: two of four such forwards took 2 %
        # less, and two 2 and 5 % more. Three with a random mask took 2 to 5 % more: neighbours share less of the cache.
        causal = self.rules.right == 0 and self.rules.left is None
        hides = self.segments or (self.key_lengths and causal)
        return hides and self.programs < self.tiles and self.batch * self.row_tiles <= _MOST_ORDERED

    @property
    def head_columns(self) -> tuple[Columns, ...]:
        """The pieces of queries and keys."""
        return split_columns(self.head_dim) if self.pieced else (Columns(0, self.head_dim),)

    @property
    def value_columns(self) -> tuple[Columns, ...]:
        """The pieces of values; their swizzle divides a block of keys, as `value_swizzle`."""
        widest = widest_swizzle(self.params.kv_block * 2) // 2
        return split_columns(self.value_dim, widest) if self.pieced else (Columns(0, self.value_dim),)

    @property
    def out_columns(self) -> tuple[Columns, ...]:
        """The pieces of the output."""
        return split_columns(self.value_dim) if self.pieced else (Columns(0, self.value_dim),)

    @property
    def bias_columns(self) -> tuple[Columns, ...]:
        """The pieces of a block of the bias, at most 128 bytes wide."""
        return split_columns(self.params.kv_block, 128 // self.bias) if self.bias else ()

    @property
    def head_swizzle(self) -> int:
        """Swizzle of queries and keys in one piece, in bytes."""
        return widest_swizzle(self.head_dim * 2)

    @property
    def value_swizzle(self) -> int:
        """Swizzle of values, which divides a row and a block of keys: the second product sums whole tiles of keys."""
        return widest_swizzle(math.gcd(self.value_dim, self.params.kv_block) * 2)

    @property
    def out_swizzle(self) -> int:
        """Swizzle of the output in one piece."""
        return widest_swizzle(self.value_dim * 2)

    @property
    def adds(self) -> bool:
        """Whether a bias other than zero and minus infinity is added to the logits after the soft cap."""
        return (bool(self.bias) or self.key_bias) and not self.caps_late

    @property
    def has_many_descriptors(self) -> bool:
        """Whether the descriptors of the queries' tiles, kept through the mainloop, would take too many registers."""
        return self.head_dim > 128

    @property
    def frees_late(self) -> bool:
        """Whether a tile's query buffer, which stages the output too, is released during the next tile.

        The last tile's buffer is then never released.
        """
        return self.params.share_buffer and self.params.query_buffers > 1

    @property
    def leaves_idle(self) -> bool:
        """Whether warpgroups without queries skip the last tile of a head; not measured for multiples of 64 queries."""
        rest = self.queries % self.tile_rows
        return not self.params.pack_heads and rest % ROWS > 0 and rest <= self.tile_rows - ROWS

    @property
    def hides(self) -> bool:
        """Whether arrays may hide keys of any block."""
        return self.table or self.key_lengths or self.key_mask

    @property
    def packs_mask(self) -> bool:
        """Whether a mask of keys is added to a bias of 16 bits, two numbers at once; copies start at 128 bytes."""
        return self.key_mask and not self.key_bias and self.bias == 2 and self.params.kv_block % 64 == 0

    @property
    def masks_all(self) -> bool:
        """Whether a mask applies to every block."""
        return self.key_mask and not self.table

    @property
    def slides(self) -> bool:
        """Whether the blocks of a tile start exactly at the first key of its window."""
        arrays = self.hides or self.bias or self.key_bias
        return self.rules.left is not None and not arrays

    @property
    def has_tail(self) -> bool:
        """Whether the last block of keys extends past the last key, where the window does not hide it."""
        right = self.rules.right
        return (self.slides or self.keys % self.params.kv_block != 0) and (right is None or right > 0)

    @property
    def hides_tail(self) -> bool:
        """Whether the positions must hide this tail: a bias or mask of keys is padded with minus infinity."""
        return self.has_tail and not (self.key_bias or self.key_mask)

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
        barriers = (6 if extras else 4) * p.stages + p.query_buffers * p.warpgroups * 2 + p.warpgroups
        pieces = len(self.head_columns) + len(self.value_columns) + len(self.out_columns)  # each may need padding
        spare = ALIGNMENT * (pieces if self.pieced else 2)
        return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in buffers) + 8 * barriers + spare


def forward_plan(call: AttentionCall, params: ForwardParams) -> ForwardPlan:
    """Return the plan of a forward."""
    bias, mask = variation(call.bias, call), variation(call.attention_mask, call)
    caps_late = call.bias is not None and call.rules.soft_cap is not None and call.rules.cap_after_bias
    if caps_late and not bias:  # under a cap, a bias that is constant along a row does more than shift the row
        bias = "block"
    # As `lengths_as_segments` leaves them.
    segments = call.segments or call.query_lengths
    key_lengths = call.key_lengths and not segments
    sizes, pieced = sizes_of(call, whole_dim), is_pieced(call, WHOLE_DIMS)
    if params.share_buffer:
        # An array of whole tiles is cut into rows of the output.
        pieced = pieced or (ROWS * sizes["head_dim"]) % (8 * sizes["value_dim"]) > 0
        if pieced:
            sizes |= _shared_columns(sizes["head_dim"], sizes["value_dim"])
    return ForwardPlan(
        **sizes,
        dtype=call.dtype,
        params=params,
        pieced=pieced,
        bias=0 if bias != "block" else 2 if call.bias_dtype in DTYPES else 4,
        mask=mask == "block",
        key_bias=bias == "keys",
        key_mask=mask == "keys",
        segments=segments,
        key_lengths=key_lengths,
        caps_late=caps_late,
        table=segments or mask == "block" or (mask == "keys" and _is_worth_a_table(call, params.kv_block)),
    )


def _shared_columns(head_dim: int, value_dim: int) -> dict[str, int]:
    """Return the columns of queries and output in one buffer, whose first pieces are the same.

    For example, an output of 208 columns takes 256 beside queries of 256: the last piece of 64 holds 16, and zeros.
    """
    ends = (piece.start + piece.width for piece in split_columns(head_dim))
    covering = (end for end in ends if end >= value_dim)
    return {"head_dim": max(head_dim, value_dim), "value_dim": next(covering, value_dim)}


def _is_worth_a_table(call: AttentionCall, kv_block: int) -> bool:
    """Return whether the blocks of keys that a mask hides are found before the kernel, which takes about 10 us."""
    # Of a few blocks a mask rarely hides a whole one. Triangle attention with 616 keys took 55 us with a table, and 42
    # without.
    batch, queries, heads, _ = call.query
    return call.key[1] >= 8 * kv_block and batch * heads * queries * call.key[1] > _MANY_SCORES


def variation(shape: tuple[int, ...] | None, call: AttentionCall) -> str:
    """Return whether a bias or mask varies along the `keys`, or within a `block` of rows and keys; else empty."""
    if shape is None or (shape[3] == 1 and call.key[1] > 1):
        return ""
    return "keys" if shape[2] == 1 else "block"


def is_pieced(call: AttentionCall, dims: tuple[int, ...]) -> bool:
    """Return whether lengths, or head dimensions other than `dims`, keep the kernels from copying whole tiles."""
    lengths = (call.query[1], call.key[1])
    return any(size % TILE_ROWS for size in lengths) or not {call.query[3], call.value[3]} <= set(dims)


def whole_dim(size: int) -> int:
    """Return the columns that a head dimension takes in shared memory."""
    return -(-size // 16) * 16
