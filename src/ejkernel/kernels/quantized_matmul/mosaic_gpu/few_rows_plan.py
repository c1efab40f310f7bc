# SPDX-License-Identifier: Apache-2.0
"""The static description of a launch with few rows."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from ejkernel.kernels._hopper.device import MULTIPROCESSORS
from ejkernel.kernels._hopper.tile_shapes import ALIGNED, OVERHEAD, ROWS, padded
from ejkernel.kernels.quantized_matmul.common import QuantizedMatmulCall
from ejkernel.kernels.quantized_matmul.grouped.common import QuantizedGroupedMatmulCall
from ejkernel.ops.implementation import OperationCall

from .plan import FEW_ROWS, PART, PROMOTED, ROW_TILE, STEP, MosaicGpuParams

HALF = STEP // 2  # pairs of numbers in a step
LEAST_STEPS = 4  # of a split
_CACHED = 0.15  # cost of bytes in the L2 cache
_PER_STEP = 1_000  # bytes read while a step begins
_LEAST_STEP = 15_000  # bytes read during a step of few columns
_SPLIT = 20_000  # bytes read while the results of a split are summed
_ROOM = 4  # rows of a tile for each row that a group has on average, so that most groups need one tile


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewRowsPlan:
    """The launch of a product with at most 64 rows, or with few rows for each group.

    Attributes:
        rows, inner, columns: Sizes, padded so that copies can begin and end with them.
        dtype, w_dtype, out_dtype: Names of the dtypes.
        tile_columns: Columns of a tile.
        stages: Pipeline stages.
        promoted: As in `QuantizedPlan`.
        group_tiles: The most tiles that the rows of all groups take; each group's rows begin with a tile. 0 for
            one matrix.
        group_rows: Rows of such a tile.
        activation: Name of the function applied to the product, or `None`.
        gated: Whether the result is multiplied by the product with a second matrix.
        factored: Whether rows of the result have factors.
        clears: Whether rows behind the only group become zero.
        most_splits: The most splits of rows in 8 bits.
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
    group_tiles: int = 0
    group_rows: int = 0
    activation: str | None = None
    gated: bool = False
    factored: bool = False
    clears: bool = False
    most_splits: int = 1

    @property
    def products(self) -> int:
        """Number of products."""
        return 2 if self.gated else 1

    @property
    def splits(self) -> int:
        """Blocks of threads that share the steps of a tile."""
        return -(-self.all_steps // self.steps)

    @property
    def results(self) -> int:
        """Number of results: of the epilogue, or with splits, the products."""
        return self.products if self.splits > 1 else 1

    @property
    def result_dtype(self) -> str:
        """The dtype that the kernel stores."""
        return self.out_dtype if self.splits == 1 else "float32"

    @property
    def turned(self) -> bool:
        """Whether the kernel stores the transpose of each tile: of products, or of float32, which it cannot turn."""
        return self.wide and (self.splits > 1 or self.out_dtype == "float32")

    @property
    def turned_shape(self) -> tuple[int, ...]:
        """Products, splits, tiles of rows, columns and rows of a tile, if the kernel stores transposes."""
        return self.results, self.splits, max(1, self.group_tiles), self.factors, self.tile_rows

    @property
    def result_shape(self) -> tuple[int, ...]:
        """The shape that the kernel stores."""
        if self.turned:
            return math.prod(self.turned_shape[:-1]), self.tile_rows
        return (self.rows, self.columns) if self.splits == 1 else (self.splits, self.rows, self.columns)

    @property
    def buffer_shape(self) -> tuple[int, int]:
        """The shape of a consumer's part of a tile."""
        shape = self.tile_rows, self.part_columns
        return shape[::-1] if self.turned else shape

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
        if self.group_tiles:
            return self.group_rows
        return padded(self.rows, ROW_TILE) if self.wide else ROWS

    @property
    def parts(self) -> int:
        """Parts of a tile's columns; each product of a part has a warpgroup."""
        if self.wide:
            return self.tile_columns // ROWS
        return 1 if self.tile_columns <= PART else 2

    @property
    def consumers(self) -> int:
        """Warpgroups that share a tile."""
        return self.products * self.parts

    @property
    def part_columns(self) -> int:
        """Columns of a consumer."""
        return self.tile_columns // self.parts

    @property
    def gate_shape(self) -> tuple[int, int, int] | None:
        """The shape of shared memory for the gate's products; `None` if the kernel does not apply the gate."""
        return (self.parts, ROWS, self.tile_rows) if self.gated and self.splits == 1 else None

    @property
    def steps(self) -> int:
        """Steps of a block of threads for a tile; the last split of rows in 16 bits may have fewer."""
        splits = self.most_splits
        if self.wide and not self.group_tiles:
            splits = max(1, min(MULTIPROCESSORS // self.column_tiles, self.all_steps // LEAST_STEPS))
        return -(-self.all_steps // splits)

    @property
    def all_steps(self) -> int:
        """Steps of a tile."""
        return self.inner // STEP

    @property
    def column_tiles(self) -> int:
        """Tiles of the columns."""
        return -(-self.columns // self.tile_columns)

    @property
    def tiles(self) -> int:
        """Tiles of the result; with groups, the most."""
        return self.column_tiles * max(1, self.group_tiles)

    @property
    def programs(self) -> int:
        """Blocks of threads."""
        return min(MULTIPROCESSORS, self.tiles * self.splits)

    @property
    def factors(self) -> int:
        """Factors of columns, for whole tiles; per group."""
        return self.column_tiles * self.tile_columns

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the matrices in a pipeline stage."""
        return self.products * self.tile_columns * STEP

    @property
    def stage_bytes(self) -> int:
        """Bytes of a pipeline stage."""
        return self.tile_rows * jnp.dtype(self.dtype).itemsize * STEP + self.matrix_bytes

    @property
    def columns_per_program(self) -> int:
        """Columns that a block of threads computes."""
        return -(-self.column_tiles // self.programs) * self.tile_columns

    def cost(self) -> float:
        """Return the time of rows of 16 bits, in bytes of `w` that a block of threads reads in this time.

        The factors were fitted to a few shapes on one H200.
        """
        rows = self.tile_rows * STEP * jnp.dtype(self.dtype).itemsize  # they come from the L2 cache
        step = max(self.matrix_bytes + _CACHED * rows + _PER_STEP, _LEAST_STEP)
        tiles = -(-self.tiles * self.splits // self.programs)
        summed = 8 * math.prod(self.result_shape) / MULTIPROCESSORS + _SPLIT * self.splits if self.splits > 1 else 0
        return tiles * self.steps * step + summed

    def shared_bytes(self) -> int:
        """Return the shared memory of a block of threads."""
        return (
            self.stages * self.stage_bytes
            + self.results * self.tile_rows * self.tile_columns * jnp.dtype(self.result_dtype).itemsize
            + (4 * math.prod(self.gate_shape) if self.gate_shape else 0)
            + OVERHEAD
        )


def few_rows_plan(call: OperationCall, params: MosaicGpuParams) -> FewRowsPlan:
    """Return the plan of a launch for at most 64 rows, or with few rows for each group."""
    if isinstance(call, QuantizedMatmulCall):
        return _dense_plan(call, params)
    if not isinstance(call, QuantizedGroupedMatmulCall):
        raise TypeError(f"call must be that of a quantised product, got {call!r}.")
    more: dict[str, Any] = {"clears": True}
    if call.groups > 1 or call.all_groups is not None:
        rows = min(FEW_ROWS, max(16, padded(_ROOM * max(1, call.usual_rows), ROW_TILE)))
        tiles = min(call.groups, call.rows) + call.rows // rows
        more = {"group_tiles": tiles, "group_rows": rows, "rows": tiles * rows}
    epilogue: dict[str, Any] = {"activation": call.activation, "gated": call.gated, "factored": call.scaled}
    return dataclasses.replace(_dense_plan(call.as_dense, params), **epilogue, **more)


def _dense_plan(call: QuantizedMatmulCall, params: MosaicGpuParams) -> FewRowsPlan:
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
        most_splits=params.splits,
    )
