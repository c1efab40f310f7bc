# SPDX-License-Identifier: Apache-2.0
"""The plan of a launch, computed from shapes and parameters before compilation."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from ejkernel.kernels import _hopper as hopper
from ejkernel.ops.errors import ConfigError

THREADS = 128  # threads per block: one warpgroup, which processes one row
MINOR = 256  # the most elements of a copy along its last axis
SHORT = 512  # elements; a warpgroup holds several shorter rows at once, in registers
SLAB = 16  # short rows processed together
_CHUNK = 1024  # elements of a longer row held in registers at once
# Limits for short rows: estimated registers of a thread, and elements of one array per warpgroup. Below both, no spill
# was observed.
_REGISTERS, _ELEMENTS = 256, 24_576


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowNormParams:
    """Launch parameters of the kernels.

    Attributes:
        block_rows: Rows per copy; for rows shorter than 512, which are read into registers, a multiple of 16.
        stages: Number of pipeline stages, each of one copy; 1 for short rows.
        occupancy: Thread blocks per multiprocessor.
    """

    block_rows: int = 1
    stages: int = 2
    occupancy: int = 4

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{field.name} must be a positive integer, got {value!r}.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """The normalisation of one row.

    Attributes:
        centred: Whether the mean is subtracted.
        eps: Added to the mean of squares.
        weight: The offset to add to the weight; `None` without a weight.
        bias: Whether a bias is added.
        residual: Whether a residual is added first, and the sum returned.
    """

    centred: bool
    eps: float
    weight: float | None = 0.0
    bias: bool = False
    residual: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowNormPlan:
    """The sizes of one launch.

    Attributes:
        rows: Number of rows.
        dim: Elements per row.
        dtype: Name of the dtype of the rows.
        formula: The normalisation of each row.
        backward: Whether the kernel computes gradients.
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
        """Whether registers hold whole rows."""
        return self.dim < SHORT

    @property
    def stats(self) -> int:
        """Number of statistics per row that the kernel reads."""
        return self.backward * (1 + self.formula.centred)

    @property
    def row_shape(self) -> tuple[int, int]:
        """The shape of a row in a copy."""
        return self.dim // self.minor, self.minor

    @property
    def minor(self) -> int:
        """The length of the last axis of `row_shape`."""
        return min(MINOR, self.chunk)

    @property
    def chunk(self) -> int:
        """Elements of a row that registers hold at once."""
        return next(size for size in (_CHUNK, 512, 256, 128) if self.dim % size == 0)

    @property
    def programs(self) -> int:
        """Number of thread blocks in the launch."""
        return min(hopper.MULTIPROCESSORS * self.params.occupancy, self.blocks)

    @property
    def blocks(self) -> int:
        """Number of blocks of rows."""
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
        """Number of vectors that the kernel sums over rows."""
        return self.backward * ((self.formula.weight is not None) + self.formula.bias)

    def registers(self) -> int:
        """Estimate the registers of a thread for short rows, vectors, sums, and the computation on a slab."""
        read = self.sources * self.params.block_rows * self.dim * jnp.dtype(self.dtype).itemsize // 4
        vectors = (self.formula.weight is not None) + (self.formula.bias and not self.backward)
        kept = self.sums + vectors + (3 if self.backward else 1)
        return (read + kept * SLAB * self.dim) // THREADS

    def short_fault(self) -> str | None:
        """Return why the kernel for short rows cannot run with these parameters; `None` if it can."""
        block_rows, stages = self.params.block_rows, self.params.stages
        if block_rows % SLAB or stages != 1:
            wanted = f"block_rows to be a multiple of {SLAB}, and stages to be 1"
            return f"rows of {self.dim} elements need {wanted}; got {block_rows} and {stages}."
        if block_rows * self.dim > _ELEMENTS:
            return f"it reads {block_rows * self.dim} elements at once, and registers hold {_ELEMENTS}."
        if self.registers() > _REGISTERS:
            return f"it takes about {self.registers()} registers per thread, more than {_REGISTERS}."
        return None

    def shared_bytes(self) -> int:
        """Return the bytes of shared memory that a thread block needs."""
        if self.is_short:
            return 0
        row = self.dim * jnp.dtype(self.dtype).itemsize
        rows = (self.sources + self.results) * self.params.stages * self.params.block_rows * row
        return rows + self.sums * 4 * self.dim + 1024  # float32 sums; barriers and scratch for means
