# SPDX-License-Identifier: Apache-2.0
"""What is static of one launch, and what of the chip it takes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from ejkernel.kernels._hopper import MULTIPROCESSORS, Registers
from ejkernel.kernels.grouped_matmul.common import GroupedMatmulCall

from .params import ProductParams, WgradParams

STEP = 64  # of what is summed over: as many as one swizzle is wide, so that copies may begin at any row
WARPGROUPS = 2  # that compute
ROWS = 64  # of one tensor-core instruction
ROW_BYTES = 128  # of a piece of the result: one swizzle
TILE = (8, 64)  # rows and columns of operands that lie together in shared memory
ALIGNED = 64  # what columns are padded to: tiles of shared memory are so wide
REGISTERS = Registers(producer=40, consumer=232)
_ALIGNMENT = 1024  # that every buffer begins at a multiple of
_OVERHEAD = 2 * _ALIGNMENT


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedPlan:
    """What both kernels have in common.

    Attributes:
        rows: `m`, of the padded operands.
        groups: How many groups there are.
        inner: `k`, padded.
        columns: `n`, padded.
        dtype: Name of the operands' dtype.
        out_dtype: Name of the result's.
        tile_rows: Rows of a tile of the result.
        tile_columns: Its columns.
        stages, panel, out_slots: As in the parameters.
    """

    rows: int
    groups: int
    inner: int
    columns: int
    dtype: str
    out_dtype: str
    tile_rows: int
    tile_columns: int
    stages: int
    panel: int
    out_slots: int

    @property
    def products(self) -> int:
        """How many products of one left operand a tile is made of."""
        return 1

    @property
    def part_rows(self) -> int:
        """Rows of a tile that one warpgroup has."""
        return self.tile_rows // WARPGROUPS

    @property
    def piece_columns(self) -> int:
        """Columns of a result that are stored at once."""
        return ROW_BYTES // jnp.dtype(self.out_dtype).itemsize

    @property
    def pieces(self) -> int:
        """How many pieces a tile's columns are stored in; a multiple of the slots, so that these come in turn."""
        return self.tile_columns // self.piece_columns

    @property
    def column_tiles(self) -> int:
        """Tiles that cover the columns."""
        return -(-self.columns // self.tile_columns)

    @property
    def programs(self) -> int:
        """Blocks of threads."""
        return MULTIPROCESSORS

    def shared_bytes(self) -> int:
        """Return the bytes of shared memory that a block of threads takes."""
        operands = self.stages * STEP * (self.tile_rows + self.products * self.tile_columns) * 2
        out = WARPGROUPS * self.out_slots * self.part_rows * ROW_BYTES
        return operands + out + _OVERHEAD

    def sums_per_thread(self) -> int:
        """Return how many sums each thread keeps in registers."""
        return self.products * self.part_rows * self.tile_columns // 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductPlan(GroupedPlan):
    """A launch of the product.

    Attributes:
        transpose_rhs: Whether the matrices are transposed.
        activation, gated, scaled: As in the description of the call.
        keep: Whether the products are results, too.
        all_groups: How many sizes there are, if more than groups: behind them stands which is the first group's.
    """

    transpose_rhs: bool
    activation: str | None = None
    gated: bool = False
    scaled: bool = False
    keep: bool = False
    all_groups: int | None = None

    @property
    def products(self) -> int:
        """See `GroupedPlan`."""
        return 2 if self.gated else 1

    @property
    def is_plain(self) -> bool:
        """Whether the product is all that is asked for."""
        return self.activation is None and not self.gated and not self.scaled

    @property
    def results(self) -> int:
        """How many arrays the kernel writes."""
        return 1 + self.products if self.keep else 1

    @property
    def steps(self) -> int:
        """Steps of a tile."""
        return -(-self.inner // STEP)

    @property
    def last(self) -> int:
        """Number of the last of what counts as groups: the rows past them, or those before them, which come last."""
        return self.groups + self.is_part

    @property
    def is_part(self) -> bool:
        """Whether some groups have their matrices elsewhere."""
        return self.all_groups is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WgradPlan(GroupedPlan):
    """A launch of the weights' gradient.

    Attributes:
        snake: As in the parameters.
    """

    snake: bool

    @property
    def row_tiles(self) -> int:
        """Tiles that cover the rows of a group's result."""
        return -(-self.inner // self.tile_rows)

    @property
    def tiles(self) -> int:
        """All tiles, of all groups."""
        return self.groups * self.row_tiles * self.column_tiles


def product_plan(call: GroupedMatmulCall, params: ProductParams, *, keep: bool = False) -> ProductPlan:
    """Return the launch of a product, whose own numbers are kept beside what is made of them or not."""
    return ProductPlan(
        **_common(call, params),
        rows=max(call.rows, ROWS),
        tile_rows=params.block_m,
        transpose_rhs=call.transpose_rhs,
        activation=call.activation,
        gated=call.gated,
        scaled=call.scaled,
        keep=keep,
        # With the empty ones before and behind, which the launch adds.
        all_groups=None if call.all_groups is None else call.all_groups + 2 * call.groups,
    )


def wgrad_plan(call: GroupedMatmulCall, params: WgradParams) -> WgradPlan:
    """Return the launch of a weights' gradient."""
    return WgradPlan(
        **_common(call, params),
        rows=max(padded(call.rows, 8), STEP),  # copies move whole tiles of eight rows
        tile_rows=params.block_k,
        snake=params.snake,
    )


def _common(call: GroupedMatmulCall, params: ProductParams | WgradParams) -> dict[str, Any]:
    """Return the fields that both launches have from the same places."""
    return {
        "groups": call.groups,
        "inner": padded(call.inner, ALIGNED),
        "columns": padded(call.columns, ALIGNED),
        "dtype": call.dtype,
        "out_dtype": call.out_dtype,
        "tile_columns": params.block_n,
        "stages": params.stages,
        "panel": params.panel,
        "out_slots": params.out_slots,
    }


def padded(size: int, multiple: int) -> int:
    """Return a size rounded up."""
    return -(-size // multiple) * multiple
