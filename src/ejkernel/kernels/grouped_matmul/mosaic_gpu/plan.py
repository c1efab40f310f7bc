# SPDX-License-Identifier: Apache-2.0
"""The launch parameters, the static description of one launch, and the shared memory and registers that it takes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from ejkernel.kernels._hopper import MULTIPROCESSORS
from ejkernel.kernels._hopper.tile_shapes import ALIGNED, OVERHEAD, ROW_BYTES, ROWS, STEP, WARPGROUPS, padded
from ejkernel.kernels._options import check_parameters
from ejkernel.kernels.grouped_matmul.common import GroupedMatmulCall
from ejkernel.ops.utils.messages.names import NamedFields

# Rows per group, on average, for short tiles. With 512 they gained 1 to 5 % on one H200, with 1,024 nothing; with fewer
# they lost up to 10 %, because they read matrices once more from memory.
ROWS_WITH_SHORT_TILES = 512
_LONG_BLOCKS = (128, 256)
_ALLOWED: Any = {
    "block_n": (64, 128, 192, 256),
    "stages": range(2, 9),
    "panel": range(1, 257),
    "out_slots": range(1, 5),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProductParams(NamedFields):
    """Launch parameters of the product; they do not change the result.

    A block of threads has one producer and two consumer warpgroups; each consumer computes half of the rows of a tile.
    The launch is persistent: one block per multiprocessor takes tile after tile.

    Attributes:
        block_m: Rows of a tile, 128 or 256.
        block_n: Columns of a tile: 64, 128, 192 or 256; 64 or 128 with a gate, which needs a second accumulator.
        stages: Pipeline stages, each with 64 of `k`.
        panel: Rows of tiles in a panel of the tile order; inside a panel rows vary fastest.
        out_slots: Staging buffers of the epilogue: pieces of the result that are copied at once.
    """

    block_m: int = 128
    block_n: int = 256
    stages: int = 4
    panel: int = 16
    out_slots: int = 2

    def __post_init__(self) -> None:
        check_parameters(self, block_m=_LONG_BLOCKS, **_ALLOWED)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WgradParams(NamedFields):
    """Launch parameters of the weight gradient; they do not change the result.

    Blocks of threads and tiles are as in `ProductParams`; a tile belongs to one group's result, and a step takes 64 of
    the group's rows, or 128 in 8 bits.

    Attributes:
        block_k: Rows of a tile of the result, 128 or 256.
        block_n: Columns of a tile: 64, 128, 192 or 256.
        stages: Pipeline stages, each with the rows of a step.
        panel, out_slots: As in `ProductParams`.
        largest_first: Whether groups with more rows come first.
        snake: Whether every other round of tiles is dealt to the blocks in reverse.
    """

    block_k: int = 128
    block_n: int = 256
    stages: int = 4
    panel: int = 16
    out_slots: int = 2
    largest_first: bool = False
    snake: bool = False

    def __post_init__(self) -> None:
        check_parameters(self, block_k=_LONG_BLOCKS, **_ALLOWED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedPlan:
    """The static description that both kernels share.

    Attributes:
        rows: `m`, of the padded operands.
        groups: The number of groups.
        inner: `k`, padded.
        columns: `n`, padded.
        dtype: Name of the operands' dtype.
        out_dtype: Name of the result's dtype.
        tile_rows: Rows of a tile of the result.
        tile_columns: Its columns.
        stages, panel, out_slots: As in the parameters.
        cluster: Blocks of threads in a cluster, which share copies of a matrix: 2 needs a single group.
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
    cluster: int = 1

    @property
    def products(self) -> int:
        """Products with the same left operand per tile: 2 with a gate."""
        return 1

    @property
    def step_size(self) -> int:
        """Elements of the summed axis per step of the mainloop: one swizzle wide."""
        return STEP

    @property
    def copies(self) -> int:
        """Copies into a pipeline stage: the rows of each consumer, and the matrix of each product."""
        return WARPGROUPS + self.products

    @property
    def part_rows(self) -> int:
        """Rows of a tile per consumer warpgroup."""
        return self.tile_rows // WARPGROUPS

    @property
    def piece_columns(self) -> int:
        """Columns of the result that the epilogue stores at once."""
        return ROW_BYTES // jnp.dtype(self.out_dtype).itemsize

    @property
    def pieces(self) -> int:
        """Pieces in which a tile's columns are stored; a multiple of `out_slots`, so that slots are used in turn."""
        return self.tile_columns // self.piece_columns

    @property
    def column_tiles(self) -> int:
        """Tiles that cover the columns."""
        return -(-self.columns // self.tile_columns)

    @property
    def programs(self) -> int:
        """Clusters of blocks of threads."""
        return MULTIPROCESSORS // self.cluster

    def shared_bytes(self) -> int:
        """Return the bytes of shared memory that a block of threads takes."""
        operands = self.stages * ROW_BYTES * (self.tile_rows + self.products * self.tile_columns)
        out = WARPGROUPS * self.out_slots * self.part_rows * ROW_BYTES
        return operands + out + OVERHEAD

    def sums_per_thread(self) -> int:
        """Return the accumulator registers per thread."""
        return self.products * self.part_rows * self.tile_columns // 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductPlan(GroupedPlan):
    """The launch of a product.

    Attributes:
        transpose_rhs: Whether the matrices are `[groups, n, k]`.
        activation, gated, scaled: As in `GroupedMatmulCall`.
        keep: Whether the products are results too.
        all_groups: The number of group sizes, if some groups have their matrices elsewhere; the first group's number
            follows the sizes.
        has_short_tiles: Whether the last rows of a group may be a tile of half the height.
    """

    transpose_rhs: bool
    activation: str | None = None
    gated: bool = False
    scaled: bool = False
    keep: bool = False
    all_groups: int | None = None
    has_short_tiles: bool = False

    @property
    def products(self) -> int:
        """See `GroupedPlan`."""
        return 2 if self.gated else 1

    @property
    def is_plain(self) -> bool:
        """Whether the epilogue only stores the product."""
        return self.activation is None and not self.gated and not self.scaled

    @property
    def results(self) -> int:
        """Arrays that the kernel writes."""
        return 1 + self.products if self.keep else 1

    @property
    def steps(self) -> int:
        """Steps of a tile."""
        return -(-self.inner // self.step_size)

    @property
    def last(self) -> int:
        """The last group number: `groups` stands for the rows after the groups, `groups + 1` for those before."""
        return self.groups + self.is_part

    @property
    def is_part(self) -> bool:
        """Whether some groups have their matrices elsewhere."""
        return self.all_groups is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WgradPlan(GroupedPlan):
    """The launch of a weight gradient.

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
    """Return the plan of a product; with `keep` the kernel also writes the products before the epilogue."""
    return ProductPlan(
        **_common(call, params),
        rows=max(call.rows, ROWS),
        tile_rows=params.block_m,
        transpose_rhs=call.transpose_rhs,
        activation=call.activation,
        gated=call.gated,
        scaled=call.scaled,
        keep=keep,
        all_groups=call.padded_groups,
        has_short_tiles=call.usual_rows >= ROWS_WITH_SHORT_TILES,
    )


def wgrad_plan(call: GroupedMatmulCall, params: WgradParams) -> WgradPlan:
    """Return the plan of a weight gradient."""
    return WgradPlan(
        **_common(call, params),
        rows=max(padded(call.rows, 8), STEP),  # copies move whole tiles of eight rows
        tile_rows=params.block_k,
        snake=params.snake,
    )


def _common(call: GroupedMatmulCall, params: ProductParams | WgradParams) -> dict[str, Any]:
    """Return the fields that both plans share."""
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
