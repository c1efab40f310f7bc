# SPDX-License-Identifier: Apache-2.0
"""The launch parameters, and the static description of one launch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ejkernel.kernels._hopper.tile_shapes import ALIGNED, ROWS, WARPGROUPS, padded
from ejkernel.kernels._options import check_parameters
from ejkernel.kernels.grouped_matmul.mosaic_gpu.plan import ProductPlan, WgradParams, WgradPlan
from ejkernel.kernels.quantized_matmul.common import QuantizedMatmulCall
from ejkernel.kernels.quantized_matmul.grouped.common import (
    QuantizedGroupedActivationCall,
    QuantizedGroupedMatmulCall,
    QuantizedGroupedWgradCall,
)
from ejkernel.kernels.quantized_matmul.quantizing.common import BLOCK
from ejkernel.ops.utils.messages.names import NamedFields

STEP = 128  # of `k`, per step of the mainloop: one swizzle of bytes
PROMOTED = 2  # steps whose float8 products are summed in the tensor core; with few rows, steps released together
FEW_ROWS = 64  # the value of `block_m`, and the most rows, of the kernel for few rows
ROW_TILE = 8  # rows of a tile of shared memory
CHUNK = 4  # scales along `k` that a copy brings: 16 bytes
SQUARES = 8  # scales of blocks of columns that a copy brings, of which tiles need three: 128 bytes with `CHUNK`
MOST_SUMS = 192  # registers per thread, of 232, for sums and an accumulator
# Rows per group, on average, for short tiles. With 256 they gained 2 % on one H200.
ROWS_WITH_SHORT_TILES = range(256, 1024)
_OUT_SCALES = 1024  # bytes of the scales of a tile's rows, and the alignment of what follows
_TILES_FOR_CLUSTERS = 16  # rows of tiles; if their number is odd, two blocks compute the last one
PART = 128  # columns that share an accumulator: 256 columns of it do not fit beside as many sums in registers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MosaicGpuParams(NamedFields):
    """Launch parameters. Only `splits` changes the result, in its last bits: it changes the order of sums.

    A block of threads has one producer and two consumer warpgroups; each consumer computes half of the rows of a tile.
    The launch is persistent: one block per multiprocessor takes tile after tile.

    With `block_m=64` the consumers, one to four, share the columns of a tile instead, for calls of at most 64 rows.

    Attributes:
        block_m: Rows of a tile: 64, 128 or 256.
        block_n: Columns of a tile, a multiple of 32; of 64 unless `block_m` is 64.
        stages: Pipeline stages, each with 128 of `k`.
        panel: Rows of tiles in a panel of the tile order; inside a panel rows vary fastest. Unused if `block_m` is 64.
        out_slots: Staging buffers of the epilogue: pieces of the result that are copied at once. Unused if `block_m` is
            64.
        splits: The most blocks of threads that share the `k` of a tile. Each stores float32 sums, which XLA adds in
            order. Whole rounds of tiles remain as they are: only the rest is split. For one matrix only; rows of 16
            bits take 1, because their kernel chooses the number.
    """

    block_m: int = 128
    block_n: int = 256
    stages: int = 4
    panel: int = 16
    out_slots: int = 2
    splits: int = 1

    def __post_init__(self) -> None:
        check_parameters(
            self,
            block_m=(64, 128, 256),
            block_n=range(32, 257, 32),
            stages=range(2, 25),
            panel=range(1, 257),
            out_slots=range(1, 5),
            splits=range(1, 65),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedPlan(ProductPlan):
    """The launch of a product of 8-bit operands; `scaled` is set if rows and columns have scales.

    Attributes:
        w_dtype: Name of the dtype of `w`; `dtype` is that of `x`.
        promoted: Steps summed in the tensor core; 0: all of them.
        blocks: Whether scales are those of 1x128 blocks of rows; else of whole rows.
        thin: Whether the blocks of `w` are 1x128, too; else 128x128.
        clears: Whether rows outside all groups become zero; else they remain unwritten, and the caller cuts them off.
        splits: Parts of `k`. If there are several, the groups are these, each with all rows from `first_row` on, and
            the result has the rows of all groups.
        first_row: The first row of the left operand.
    """

    w_dtype: str
    promoted: int
    blocks: bool = False
    thin: bool = False
    clears: bool = False
    splits: int = 1
    first_row: int = 0

    @property
    def matrices(self) -> int:
        """Matrices of the right operand."""
        return self.groups // self.splits

    @property
    def own_rows(self) -> int:
        """Rows of the product with one matrix."""
        return self.rows // self.splits

    @property
    def tiles(self) -> int:
        """Tiles of the product with one matrix, counting a cluster's as one."""
        return -(-self.own_rows // (self.tile_rows * self.cluster)) * self.column_tiles

    @property
    def whole_rows(self) -> int:
        """Rows of the product with one matrix whose tiles fill whole rounds: those of fewer rows than a round is 0."""
        rounds = self.tiles // self.programs
        return rounds * self.programs // self.column_tiles * self.tile_rows * self.cluster

    @property
    def steps(self) -> int:
        """See `ProductPlan`; the last split may read past the end, where copies find zeros."""
        steps = super().steps
        if self.splits == 1:
            return steps
        # A copy of scales that begins between multiples of 16 bytes is an illegal instruction.
        return padded(-(-steps // self.splits), CHUNK if self.blocks else 1)

    @property
    def step_size(self) -> int:
        """See `GroupedPlan`."""
        return STEP

    @property
    def copies(self) -> int:
        """See `GroupedPlan`; a matrix comes in parts, and scales with their operands."""
        return WARPGROUPS + self.parts + self.blocks + self.products

    @property
    def is_integer(self) -> bool:
        """Whether the sums are int32."""
        return self.dtype == "int8"

    @property
    def parts(self) -> int:
        """Pieces of a tile's columns, each with its own instruction."""
        return max(1, self.tile_columns // PART) if self.promoted else 1

    @property
    def part_columns(self) -> int:
        """Columns of a part."""
        return self.tile_columns // self.parts

    @property
    def factors(self) -> int:
        """Factors of columns, stored per group, for whole tiles."""
        return self.column_tiles * self.tile_columns

    @property
    def chunks(self) -> int:
        """Copies of scales along `k`."""
        return -(-self.steps // CHUNK)

    @property
    def scale_slots(self) -> int:
        """Slots of the ring of scales, so that a slot's steps are released before it is filled again."""
        return self.stages if self.steps % CHUNK else -(-(self.stages + CHUNK - 1) // CHUNK)

    @property
    def row_scales(self) -> tuple[int, ...]:
        """The shape of shared memory for scales of blocks of rows; empty without these."""
        return (self.scale_slots, self.tile_rows, CHUNK) if self.blocks else (0,)

    @property
    def factor_step(self) -> int:
        """The step of a tile that copies the factors of its columns beside its operands.

        If the tile before has so many steps, the consumers have read its factors by then: one slot is enough.
        """
        return min(self.stages, self.steps - 1)

    @property
    def factor_slots(self) -> int:
        """Slots for the factors of a tile's columns."""
        return -(-(self.stages + 1) // self.steps)

    @property
    def column_scales(self) -> tuple[int, ...]:
        """The shape of shared memory for factors of columns, or for scales of blocks of them; per product."""
        if not self.blocks:
            return self.products * self.factor_slots, self.tile_columns
        if self.thin:
            return self.stages, self.tile_columns
        return self.products * self.scale_slots, SQUARES, CHUNK

    def shared_bytes(self) -> int:
        """See `GroupedPlan`."""
        return super().shared_bytes() + _scale_bytes(self)

    def sums_per_thread(self) -> int:
        """Return the registers of sums per thread: of the tile, and of a part's accumulator if sums are promoted."""
        columns = self.tile_columns + (self.part_columns if self.promoted else 0)
        return self.part_rows * columns // 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivatedPlan(QuantizedPlan):
    """The launch of an activation; a tile is whole blocks wide.

    Attributes:
        in_8_bits: Whether the result is in 8 bits, in blocks of 128 columns; `out_dtype` is that of its numbers.
        factored: Whether rows of the result have factors.
    """

    in_8_bits: bool
    factored: bool = False

    @property
    def parts(self) -> int:
        """See `QuantizedPlan`; with a gate, the parts are the product and the gate's."""
        return self.products if self.gated else super().parts

    @property
    def part_columns(self) -> int:
        """See `QuantizedPlan`."""
        return self.tile_columns if self.gated else super().part_columns

    def shared_bytes(self) -> int:
        """See `GroupedPlan`."""
        return super().shared_bytes() + (_OUT_SCALES if self.in_8_bits else 0)

    def sums_per_thread(self) -> int:
        """See `QuantizedPlan`."""
        columns = self.parts * self.part_columns + (self.part_columns if self.promoted else 0)
        return self.part_rows * columns // 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedWgradPlan(WgradPlan):
    """The launch of a weight gradient of 8-bit columns with scales of 1x128 blocks, or 128x128 of the right operand.

    Attributes:
        rhs_dtype: Name of the dtype of the right operand; `dtype` is that of the left one.
        thin: As in `QuantizedPlan`.
    """

    rhs_dtype: str
    thin: bool = True

    @property
    def step_size(self) -> int:
        """See `GroupedPlan`."""
        return STEP

    @property
    def copies(self) -> int:
        """See `GroupedPlan`; scales come with their operands."""
        return WARPGROUPS + 3

    @property
    def row_scales(self) -> tuple[int, ...]:
        """The shape of shared memory for scales of the left operand."""
        return self.stages, self.tile_rows

    @property
    def column_scales(self) -> tuple[int, ...]:
        """The shape of shared memory for scales of the right operand, or of its blocks."""
        return self.stages, self.tile_columns if self.thin else SQUARES * CHUNK

    def shared_bytes(self) -> int:
        """See `GroupedPlan`."""
        return super().shared_bytes() + _scale_bytes(self)

    def sums_per_thread(self) -> int:
        """Return the registers of sums per thread, and of the accumulator."""
        return 2 * super().sums_per_thread()


def quantized_plan(call: QuantizedMatmulCall, params: MosaicGpuParams) -> QuantizedPlan:
    """Return the plan of a launch."""
    blocks = not call.scales_outside
    return QuantizedPlan(
        rows=max(call.rows, ROWS),
        groups=1,
        inner=padded(call.inner, STEP),
        columns=padded(call.columns, ALIGNED),
        dtype=call.x_dtype,
        w_dtype=call.w_dtype,
        out_dtype=call.out_dtype,
        tile_rows=params.block_m,
        tile_columns=params.block_n,
        stages=params.stages,
        panel=params.panel,
        out_slots=params.out_slots,
        transpose_rhs=True,
        cluster=_cluster(call.rows, params.block_m) if blocks else 1,  # whole rows gain nothing
        scaled=not blocks,
        promoted=1 if blocks else 0 if call.is_integer or call.fast else PROMOTED,
        blocks=blocks,
        thin=blocks and call.w_block is not None and call.w_block[0] == 1,
    )


def split_plan(plan: QuantizedPlan, splits: int) -> QuantizedPlan:
    """Return the plan of the split launch of a dense product: it has the tiles after the last whole round.

    Its rows are those of whole consumers, so that sums are stored in whole copies.
    """
    steps = dataclasses.replace(plan, splits=splits).steps
    splits = -(-plan.steps // steps)
    rows = padded(plan.rows - plan.whole_rows, plan.part_rows)
    return dataclasses.replace(
        plan,
        rows=rows * splits,
        groups=splits,
        out_dtype="float32",
        cluster=_cluster(rows, plan.tile_rows) if plan.cluster > 1 else 1,
        splits=splits,
        first_row=plan.whole_rows,
    )


def _cluster(rows: int, tile_rows: int) -> int:
    """Return the blocks of threads in a cluster: 2 if nearly all of them have their own rows."""
    tiles = -(-rows // tile_rows)
    return 2 if tiles % 2 == 0 or tiles >= _TILES_FOR_CLUSTERS else 1


def grouped_plan(call: QuantizedGroupedMatmulCall, params: MosaicGpuParams) -> QuantizedPlan:
    """Return the plan of a launch for groups of rows."""
    return dataclasses.replace(
        quantized_plan(call.as_dense, params),
        groups=call.groups,
        all_groups=call.padded_groups,
        cluster=1,
        clears=True,
        has_short_tiles=call.usual_rows in ROWS_WITH_SHORT_TILES,
    )


def activated_plan(call: QuantizedGroupedActivationCall, params: MosaicGpuParams) -> ActivatedPlan:
    """Return the plan of a launch for an activation."""
    base = grouped_plan(call, params)
    fields = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
    more: dict[str, Any] = {"activation": call.activation, "gated": call.gated, "has_short_tiles": False}
    if call.values is not None:
        more |= {"out_dtype": call.values, "columns": padded(call.columns, BLOCK)}
    return ActivatedPlan(**fields | more, in_8_bits=call.values is not None, factored=call.scaled)


def quantized_wgrad_plan(call: QuantizedGroupedWgradCall, params: WgradParams) -> QuantizedWgradPlan:
    """Return the plan of a weight gradient."""
    return QuantizedWgradPlan(
        rows=call.rows,
        groups=call.groups,
        inner=padded(call.inner, ALIGNED),
        columns=padded(call.columns, ALIGNED),
        dtype=call.dtype,
        rhs_dtype=call.rhs_dtype,
        out_dtype=call.out_dtype,
        tile_rows=params.block_k,
        tile_columns=params.block_n,
        stages=params.stages,
        panel=params.panel,
        out_slots=params.out_slots,
        snake=params.snake,
        thin=not call.square,
    )


def _scale_bytes(plan: QuantizedPlan | QuantizedWgradPlan) -> int:
    return 4 * (math.prod(plan.row_scales) + math.prod(plan.column_scales))
