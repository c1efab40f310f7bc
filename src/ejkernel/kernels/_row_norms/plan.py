# SPDX-License-Identifier: Apache-2.0
"""The static description of one launch, and the shared memory and registers that it takes."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from ejkernel.kernels import _hopper as hopper
from ejkernel.kernels._options import POSITIVE, check_parameters
from ejkernel.ops.utils.messages.names import NamedFields

from .common import Formula

THREADS = 128  # of a block: one warpgroup
MINOR = 256  # elements, the most that a TMA copy takes along one axis
SHORT = 512  # elements; a warpgroup holds several shorter rows in registers
SLAB = 16  # short rows that a warpgroup computes at once
_CHUNK = 1024  # elements of a longer row in registers at once
# Limits of the estimated registers per thread, and of the elements that a warpgroup reads of one array. No compiled
# kernel within both limits spilled.
_REGISTERS, _ELEMENTS = 256, 24_576


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowNormParams(NamedFields):
    """Launch parameters of the row norms.

    Attributes:
        block_rows: Rows per copy; a multiple of 16 for rows shorter than 512, which stay in registers.
        stages: Pipeline stages, each with `block_rows` rows; 1 for short rows.
        occupancy: Blocks of threads per multiprocessor.
    """

    block_rows: int = 1
    stages: int = 2
    occupancy: int = 4

    def __post_init__(self) -> None:
        check_parameters(self, block_rows=POSITIVE, stages=POSITIVE, occupancy=POSITIVE)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowNormPlan:
    """The static description of one launch.

    Attributes:
        rows: The number of rows.
        dim: Their length.
        dtype: Of the rows.
        formula: The formula of a row.
        backward: Whether the launch computes gradients.
        params: The launch parameters.
    """

    rows: int
    dim: int
    dtype: str
    formula: Formula
    backward: bool
    params: RowNormParams

    @property
    def is_short(self) -> bool:
        """Whether whole rows fit in registers."""
        return self.dim < SHORT

    @property
    def stats(self) -> int:
        """Statistics per row that the forward passes to the backward."""
        return self.backward * (1 + self.formula.centred)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of a row in the kernel; TMA copies long rows."""
        return (self.dim,) if self.is_short else (self.dim // self.minor, self.minor)

    @property
    def sum_shape(self) -> tuple[int, ...]:
        """The shape of the sums over rows of one block of threads; short rows have one sum for each row of a slab."""
        return (SLAB, self.dim) if self.is_short else self.row_shape

    @property
    def minor(self) -> int:
        """The length of the last axis of `row_shape`."""
        return min(MINOR, self.chunk)

    @property
    def chunk(self) -> int:
        """Elements of a row in registers at once."""
        return next(size for size in (_CHUNK, 512, 256, 128) if self.dim % size == 0)

    @property
    def programs(self) -> int:
        """Blocks of threads."""
        return min(hopper.MULTIPROCESSORS * self.params.occupancy, self.blocks)

    @property
    def blocks(self) -> int:
        """Blocks of rows."""
        return self.rows // self.params.block_rows

    @property
    def sources(self) -> int:
        """Number of arrays of rows that the kernel reads."""
        return 1 + self.backward + self.formula.residual

    @property
    def results(self) -> int:
        """Number of arrays of rows that the kernel writes."""
        return 1 + (self.formula.residual and not self.backward)

    @property
    def sums(self) -> int:
        """Number of vectors that the backward sums over rows: the gradients of weight and bias."""
        return self.backward * ((self.formula.weight is not None) + self.formula.bias)

    def registers(self) -> int:
        """Return an estimate of the registers per thread for short rows, vectors, sums and the work on a slab."""
        read = self.sources * self.params.block_rows * self.dim * jnp.dtype(self.dtype).itemsize // 4
        vectors = (self.formula.weight is not None) + (self.formula.bias and not self.backward)
        kept = self.sums + vectors + (3 if self.backward else 1)
        return (read + kept * SLAB * self.dim) // THREADS

    def short_fault(self) -> str | None:
        """Return why the parameters do not fit short rows; `None` if they do."""
        block_rows, stages = self.params.block_rows, self.params.stages
        if block_rows % SLAB or stages != 1:
            needed = f"block_rows to be a multiple of {SLAB} and stages=1"
            return f"rows of {self.dim} elements need {needed}, got {block_rows} and {stages}."
        if block_rows * self.dim > _ELEMENTS:
            return f"it reads {block_rows * self.dim} elements at once; registers hold {_ELEMENTS}."
        if self.registers() > _REGISTERS:
            return f"it needs about {self.registers()} registers per thread; {_REGISTERS} are available."
        return None

    def shared_bytes(self) -> int:
        """Return the bytes of shared memory of a block of threads."""
        if self.is_short:
            return 0
        row = self.dim * jnp.dtype(self.dtype).itemsize
        rows = (self.sources + self.results) * self.params.stages * self.params.block_rows * row
        return rows + self.sums * 4 * self.dim + 1024  # float32 sums, barriers, and scratch memory of the means
