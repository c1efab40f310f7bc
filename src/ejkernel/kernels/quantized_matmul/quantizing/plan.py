# SPDX-License-Identifier: Apache-2.0
"""The launch parameters, and the description of one launch."""

from __future__ import annotations

import dataclasses

from ejkernel.kernels._hopper import MULTIPROCESSORS
from ejkernel.kernels._hopper.tile_shapes import OVERHEAD
from ejkernel.kernels._options import check_parameters
from ejkernel.ops.utils.messages.names import NamedFields

from .common import BLOCK, QuantizeCall
from .groups import block_count

HALF = BLOCK // 2  # rows that a warpgroup holds at once


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeParams(NamedFields):
    """Launch parameters; they do not change the result.

    Attributes:
        tiles: Tiles of 128x128 numbers that a block of threads has in flight.
        blocks: Blocks of threads per multiprocessor.
    """

    tiles: int = 2
    blocks: int = 2

    def __post_init__(self) -> None:
        check_parameters(self, tiles=range(1, 5), blocks=range(1, 5))


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizingPlan:
    """The description of one launch.

    Attributes:
        rows, columns: Of the matrix.
        dtype: Name of the dtype of the matrix, of 16 bits.
        values: Name of the dtype of the results.
        transposed: Whether the transpose is quantised, too.
        most_programs: Blocks of threads that fit on the GPU at once.
        slots: Tiles that a block of threads has in flight.
        groups, square: As in `QuantizeCall`.
    """

    rows: int
    columns: int
    dtype: str
    values: str
    transposed: bool
    most_programs: int
    slots: int
    groups: int | None = None
    square: bool = False

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles of rows, or blocks of groups; and tiles of columns."""
        rows = -(-self.rows // BLOCK) if self.groups is None else block_count(self.rows, self.groups)
        return rows, -(-self.columns // BLOCK)

    @property
    def programs(self) -> int:
        """Blocks of threads."""
        return min(self.most_programs, self.grid[0] * self.grid[1])

    @property
    def copies(self) -> int:
        """Copies per tile from shared to global memory."""
        return 4 if self.transposed else 2

    def shared_bytes(self) -> int:
        """Return the shared memory of a block of threads."""
        return (self.slots * 2 * BLOCK + self.copies * HALF + 4) * BLOCK + OVERHEAD


def quantizing_plan(call: QuantizeCall, params: QuantizeParams) -> QuantizingPlan:
    """Return the plan of a launch."""
    return QuantizingPlan(
        rows=call.rows,
        columns=call.columns,
        dtype=call.dtype,
        values=call.values,
        transposed=call.transposed,
        most_programs=MULTIPROCESSORS * params.blocks,
        slots=params.tiles,
        groups=call.groups,
        square=call.square,
    )
