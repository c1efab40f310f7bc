# SPDX-License-Identifier: Apache-2.0
"""The launch parameters, and the static description of one launch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from ejkernel.kernels._hopper.device import MULTIPROCESSORS
from ejkernel.kernels._hopper.tile_shapes import ALIGNED, OVERHEAD, ROWS, WARPGROUPS, padded
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
HALF = STEP // 2  # pairs of numbers in a step
PROMOTED = 2  # steps whose float8 products are summed in the tensor core; with few rows, steps released together
LEAST_STEPS = 4  # of a split
FEW_ROWS = 64  # the value of `block_m`, and the most rows, of the kernel for few rows
ROW_TILE = 8  # rows of a tile of shared memory
CHUNK = 4  # scales along `k` that a copy brings: 16 bytes
SQUARES = 8  # scales of blocks of columns that a copy brings, of which tiles need three: 128 bytes with `CHUNK`
MOST_SUMS = 192  # registers per thread, of 232, for sums and an accumulator
# Rows per group, on average, for short tiles. With 256 they gained 2 % on one H200.
ROWS_WITH_SHORT_TILES = range(256, 1024)
_OUT_SCALES = 1024  # bytes of the scales of a tile's rows, and the alignment of what follows
_TILES_FOR_CLUSTERS = 16  # rows of tiles; if their number is odd, two blocks compute the last one
_CACHED = 0.15  # cost of bytes that lie in the L2 cache
_PER_STEP = 1_000  # bytes that are read while a step begins
_LEAST_STEP = 15_000  # bytes that are read during a step of few columns
_SPLIT = 20_000  # bytes that are read while the results of a split are summed
_PART = 128  # columns that share an accumulator: 256 columns of it do not fit beside as many sums in registers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MosaicGpuParams(NamedFields):
    """Launch parameters; they do not change the result.

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
    """

    block_m: int = 128
    block_n: int = 256
    stages: int = 4
    panel: int = 16
    out_slots: int = 2

    def __post_init__(self) -> None:
        check_parameters(
            self,
            block_m=(64, 128, 256),
            block_n=range(32, 257, 32),
            stages=range(2, 25),
            panel=range(1, 257),
            out_slots=range(1, 5),
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
    """

    w_dtype: str
    promoted: int
    blocks: bool = False
    thin: bool = False
    clears: bool = False

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
        return max(1, self.tile_columns // _PART) if self.promoted else 1

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewRowsPlan:
    """The launch of a product with at most 64 rows.

    Attributes:
        rows, inner, columns: Sizes, padded to what copies can begin and end with.
        dtype, w_dtype, out_dtype: Names of the dtypes.
        tile_columns: Columns of a tile.
        stages: Pipeline stages.
        promoted: As in `QuantizedPlan`.
    """

    rows: int
    inner: int
    columns: int
    dtype: str
    w_dtype: str
    out_dtype: str
    tile_columns: int
    stages: int
    promoted: int = 0

    @property
    def splits(self) -> int:
        """Blocks of threads that share the steps of a tile."""
        return -(-self.all_steps // self.steps)

    @property
    def result_dtype(self) -> str:
        """The dtype that the kernel stores."""
        return self.out_dtype if self.splits == 1 else "float32"

    @property
    def result_shape(self) -> tuple[int, int]:
        """The shape that the kernel stores: the result, or its transpose from each split."""
        return (self.rows, self.columns) if self.splits == 1 else (self.splits * self.factors, self.tile_rows)

    @property
    def buffer_shape(self) -> tuple[int, int]:
        """The shape of a consumer's part of a tile."""
        shape = self.tile_rows, self.part_columns
        return shape if self.splits == 1 else shape[::-1]

    @property
    def is_integer(self) -> bool:
        """Whether the sums are int32."""
        return self.dtype == "int8"

    @property
    def wide(self) -> bool:
        """Whether the rows have 16 bits, so that the matrix is widened."""
        return jnp.dtype(self.dtype).itemsize == 2

    @property
    def divisor(self) -> int:
        """The divisor of the widened numbers of the matrix."""
        return 64 if self.wide and self.w_dtype == "int8" and self.dtype == "bfloat16" else 1

    @property
    def tile_rows(self) -> int:
        """Rows of a tile: those of an instruction, or its columns if the result is transposed."""
        return padded(self.rows, ROW_TILE) if self.wide else ROWS

    @property
    def consumers(self) -> int:
        """Warpgroups that share a tile's columns."""
        if self.wide:
            return self.tile_columns // ROWS
        return 1 if self.tile_columns <= _PART else 2

    @property
    def part_columns(self) -> int:
        """Columns of a consumer."""
        return self.tile_columns // self.consumers

    @property
    def steps(self) -> int:
        """Steps of a block of threads for a tile; the last split may have fewer."""
        blocks = MULTIPROCESSORS if self.wide else 1
        splits = max(1, min(blocks // self.column_tiles, self.all_steps // LEAST_STEPS))
        return -(-self.all_steps // splits)

    @property
    def all_steps(self) -> int:
        """Steps of a tile."""
        return self.inner // STEP

    @property
    def column_tiles(self) -> int:
        """Tiles of the result."""
        return -(-self.columns // self.tile_columns)

    @property
    def programs(self) -> int:
        """Blocks of threads."""
        return min(MULTIPROCESSORS, self.column_tiles * self.splits)

    @property
    def factors(self) -> int:
        """Factors of columns, for whole tiles."""
        return self.column_tiles * self.tile_columns

    @property
    def stage_bytes(self) -> int:
        """Bytes of a pipeline stage."""
        return (self.tile_rows * jnp.dtype(self.dtype).itemsize + self.tile_columns) * STEP

    @property
    def columns_per_program(self) -> int:
        """Columns that a block of threads computes."""
        return -(-self.column_tiles // self.programs) * self.tile_columns

    def cost(self) -> float:
        """Return the time of rows of 16 bits, in bytes of `w` that a block of threads reads meanwhile.

        The factors were fitted to a few shapes on one H200.
        """
        rows = self.tile_rows * STEP * jnp.dtype(self.dtype).itemsize  # they come from the L2 cache
        step = max(self.tile_columns * STEP + _CACHED * rows + _PER_STEP, _LEAST_STEP)
        tiles = -(-self.column_tiles * self.splits // self.programs)
        summed = 8 * math.prod(self.result_shape) / MULTIPROCESSORS + _SPLIT * self.splits if self.splits > 1 else 0
        return tiles * self.steps * step + summed

    def shared_bytes(self) -> int:
        """Return the shared memory of a block of threads."""
        return (
            self.stages * self.stage_bytes
            + self.tile_rows * self.tile_columns * jnp.dtype(self.result_dtype).itemsize
            + OVERHEAD
        )


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
        cluster=_cluster(call.rows, params) if blocks else 1,  # whole rows gain nothing
        scaled=not blocks,
        promoted=1 if blocks else 0 if call.is_integer or call.fast else PROMOTED,
        blocks=blocks,
        thin=blocks and call.w_block is not None and call.w_block[0] == 1,
    )


def _cluster(rows: int, params: MosaicGpuParams) -> int:
    """Return the blocks of threads in a cluster: 2 if nearly all of them have their own rows."""
    tiles = -(-rows // params.block_m)
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


def few_rows_plan(call: QuantizedMatmulCall, params: MosaicGpuParams) -> FewRowsPlan:
    """Return the plan of a launch for at most 64 rows."""
    return FewRowsPlan(
        rows=call.rows,
        inner=padded(call.inner, STEP),
        columns=padded(call.columns, ALIGNED),
        # The instruction that widens float8 has float16 as its only target.
        dtype=call.x_dtype if call.is_narrow or call.w_dtype == "int8" else "float16",
        w_dtype=call.w_dtype,
        out_dtype=call.out_dtype,
        tile_columns=params.block_n,
        stages=params.stages,
        promoted=0 if not call.is_narrow or call.is_integer or call.fast else PROMOTED,
    )


def _scale_bytes(plan: QuantizedPlan | QuantizedWgradPlan) -> int:
    return 4 * (math.prod(plan.row_scales) + math.prod(plan.column_scales))
