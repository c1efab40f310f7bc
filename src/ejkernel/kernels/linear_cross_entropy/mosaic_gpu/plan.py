# SPDX-License-Identifier: Apache-2.0
"""The static descriptions of launches, and the shared memory that they take."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from ejkernel.kernels._hopper import MULTIPROCESSORS
from ejkernel.kernels._hopper.tile_shapes import (
    ALIGNED,
    ALIGNED_ROW,
    OVERHEAD,
    PIECE,
    ROW_BYTES,
    ROWS,
    STEP,
    WARPGROUPS,
    in_whole_tiles,
    padded,
)
from ejkernel.kernels.linear_cross_entropy.common import LinearCrossEntropyCall

from .params import MosaicGpuParams

TILE_ROWS = WARPGROUPS * ROWS
WIDEST_TILE = 256  # columns

STATISTICS = "statistics"  # statistics of the logits
MAXIMA = "maxima"  # the largest logits alone
EXPONENTIALS = "exponentials"  # exponentials of the logits relative to a given number per row, and their sum
GRADIENT = "gradient"  # the gradient of the logits, from the log-sum-exp
PRODUCT = "product"  # a product of any rows and any matrix, times a factor per row
# A product is XLA's if tiles would keep a smaller part of the multiprocessors busy, and for shorter rows, which were
# not measured. XLA's choice varies: with 2,048 columns one kernel took 7 % longer than ours on a warm H100, another as
# long. Tiles of 192 columns fit 4,096 x 2,304, but took 1 % longer than XLA's kernel.
_LEAST_USE = 0.95
_LEAST_COLUMNS = 2048
_MANY_ROWS = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadPlan:
    """The launch of one kernel.

    Attributes:
        mode: `STATISTICS`, `MAXIMA`, `EXPONENTIALS`, `GRADIENT` or `PRODUCT`.
        rows: Those of whole tiles; the operand may have fewer.
        inner, columns: Sizes of the operands. `columns` are those of this launch, a multiple of 8, as rows of a matrix
            need it.
        last: Columns of the weight before padding.
        width: Columns of a matrix of all logits: those of the padded weight, rounded up to a multiple of 8.
        transpose_weight, soft_cap, scale, bias: As in the call.
        statistics: Optional results, members of `STATISTICS` of the operation.
        conditional: Whether the launch does nothing unless an operand says so.
        has_constant, has_expected: Whether the gradient has these coefficients.
        block_n, stages, panel, out_slots, lag: As in the parameters.
        cluster: As in the parameters; 1 if the rows of tiles are not a multiple.
    """

    mode: str
    rows: int
    inner: int
    columns: int
    last: int
    width: int
    transpose_weight: bool
    soft_cap: float | None
    scale: float
    bias: bool
    statistics: tuple[str, ...] = ()
    conditional: bool = False
    has_constant: bool = False
    has_expected: bool = False
    block_n: int
    stages: int
    panel: int
    out_slots: int
    lag: int = 0
    cluster: int = 1

    @property
    def row_tiles(self) -> int:
        """Tiles that cover the rows."""
        return self.rows // TILE_ROWS

    @property
    def column_tiles(self) -> int:
        """Tiles that cover the columns."""
        return -(-self.columns // self.block_n)

    @property
    def steps(self) -> int:
        """Steps of a tile."""
        return -(-self.inner // STEP)

    @property
    def whole(self) -> bool:
        """Whether the weight is in whole tiles of shared memory."""
        return in_whole_tiles((self.inner, self.width)) and not self.transpose_weight

    @property
    def pieces(self) -> int:
        """Pieces of a tile in the epilogue."""
        return self.block_n // PIECE

    @property
    def programs(self) -> int:
        """Clusters of blocks of threads."""
        return MULTIPROCESSORS // self.cluster

    @property
    def may_exceed(self) -> bool:
        """Whether a tile may contain columns beyond the last."""
        # A gradient is not stored beyond the end of its rows.
        rest = self.width - self.last if self.mode == GRADIENT else self.last % self.block_n
        # The bias is padded with -inf, which removes them as well.
        return bool(rest) and not self.bias

    @property
    def exceeds_by_pieces(self) -> bool:
        """Whether a piece is removed completely or not at all."""
        return self.last % PIECE == 0

    @property
    def per_tile(self) -> tuple[str, ...]:
        """Names of the results with one number per row and column of tiles."""
        if self.mode == STATISTICS:
            return ("max", "total", "label", *(name for name in ("sum", "expected") if name in self.statistics))
        if self.mode == MAXIMA:
            return ("max",)
        if self.mode == EXPONENTIALS:
            return ("total", "label", *(["max"] if "max" in self.statistics else []))
        return ()

    @property
    def has_matrix(self) -> bool:
        """Whether a matrix as large as the logits is a result."""
        return self.mode in (EXPONENTIALS, GRADIENT, PRODUCT)

    def shared_bytes(self) -> int:
        """Return the bytes of shared memory that a block of threads takes."""
        operands = self.stages * STEP * (TILE_ROWS + self.block_n) * 2
        return operands + WARPGROUPS * self.out_slots * ROWS * ROW_BYTES + OVERHEAD


@dataclasses.dataclass(frozen=True, kw_only=True)
class SumPlan:
    """The launch of a weight's gradient: a product, stored or added to a sum.

    Attributes:
        adds: Whether it is added.
        inner: Rows of the operands: the length of the sums.
        rows, columns: Sizes of the result.
        dtype, sum_dtype: Names of the dtypes of the operands and of the result.
    """

    adds: bool
    inner: int
    rows: int
    columns: int
    dtype: str
    sum_dtype: str

    @property
    def steps(self) -> int:
        """Steps of a tile."""
        return -(-self.inner // STEP)

    @property
    def block_n(self) -> int:
        """Columns of a tile."""
        return next((size for size in (256, 128) if size <= self.columns), 64)

    @property
    def whole(self) -> bool:
        """Whether the right operand is in whole tiles of shared memory."""
        return in_whole_tiles((self.inner, self.columns))

    @property
    def piece(self) -> int:
        """Columns that the epilogue stores at once: one swizzle."""
        return ROW_BYTES // int(jnp.dtype(self.sum_dtype).itemsize)

    @property
    def out_slots(self) -> int:
        """Staging buffers of the epilogue: up to four, a divisor of the pieces of a tile."""
        return min(4, self.block_n // self.piece)

    @property
    def programs(self) -> int:
        """Blocks of threads."""
        return MULTIPROCESSORS

    @property
    def row_tiles(self) -> int:
        """Tiles that cover the rows."""
        return -(-self.rows // TILE_ROWS)

    @property
    def column_tiles(self) -> int:
        """Tiles that cover the columns."""
        return -(-self.columns // self.block_n)


def head_plan(
    call: LinearCrossEntropyCall,
    params: MosaicGpuParams,
    mode: str,
    *,
    rows: int,
    columns: int | None = None,
    has_constant: bool = False,
    has_expected: bool = False,
    statistics: tuple[str, ...] | None = None,
    conditional: bool = False,
) -> HeadPlan:
    """Return the plan of a launch on `rows` padded rows, and on all columns unless their number is given."""
    inner, width = padded_sizes(call, params)
    width = padded(width, ALIGNED_ROW)
    return HeadPlan(
        mode=mode,
        rows=rows,
        inner=inner,
        columns=width if columns is None else padded(columns, ALIGNED_ROW),
        last=call.columns,
        width=width,
        transpose_weight=call.transpose_weight,
        soft_cap=call.logits_soft_cap,
        scale=call.logits_scale,
        bias=call.bias,
        statistics=call.statistics if statistics is None else statistics,
        conditional=conditional,
        has_constant=has_constant,
        has_expected=has_expected,
        block_n=params.block_n,
        stages=params.stages,
        panel=params.panel,
        out_slots=params.out_slots,
        lag=params.lag,
        cluster=params.cluster if rows // TILE_ROWS % params.cluster == 0 else 1,
    )


def product_plan(
    params: MosaicGpuParams, *, rows: int, inner: int, columns: int, transpose_weight: bool
) -> HeadPlan | None:
    """Return the plan of a product, or `None` if it is XLA's; rows are those of whole tiles."""
    plan = HeadPlan(
        mode=PRODUCT,
        rows=rows,
        inner=inner,
        columns=columns,
        last=columns,
        width=columns,
        transpose_weight=transpose_weight,
        soft_cap=None,
        scale=1.0,
        bias=False,
        block_n=params.block_n,
        stages=params.stages,
        panel=params.panel,
        out_slots=params.out_slots,
    )
    rounds = -(-plan.row_tiles * plan.column_tiles // plan.programs)
    whole = rounds * plan.programs * TILE_ROWS * plan.block_n
    return plan if columns >= _LEAST_COLUMNS and rows * columns >= _LEAST_USE * whole else None


def padded_sizes(call: LinearCrossEntropyCall, params: MosaicGpuParams) -> tuple[int, int]:
    """Return `d` and the number of columns of the weight that the kernels read; a padded weight is a copy.

    TMA needs rows of a multiple of 8 elements, and clips copies at the end of the other axis. A copy has whole tiles.
    """
    inner, columns, multiple = padded(call.inner, ALIGNED_ROW), call.columns, 1
    if not call.transpose_weight:
        # With many rows, products in pieces would lose more time than a copy takes.
        multiple = ALIGNED_ROW if call.tokens < _MANY_ROWS else ALIGNED
    elif has_gradients(call) and params.form == "rows":
        # XLA multiplies the weight by the exponentials, which TMA stored in aligned rows. Cropped exponentials would
        # not be aligned. Of chunks of the vocabulary only the last is cropped.
        multiple = ALIGNED_ROW
    is_copied = inner != call.inner or columns % multiple
    return inner, padded(columns, ALIGNED) if is_copied else columns


def has_gradients(call: LinearCrossEntropyCall) -> bool:
    """Return whether a call computes gradients."""
    return call.backward or bool(call.gradients)
