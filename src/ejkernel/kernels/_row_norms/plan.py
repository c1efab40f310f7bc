# SPDX-License-Identifier: Apache-2.0
"""What a launch is made of: told from shapes and parameters, before anything is compiled."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from ejkernel.kernels import _hopper as hopper
from ejkernel.ops.errors import ConfigError

THREADS = 128  # of a block: one warpgroup, which has a row to itself
MINOR = 256  # elements along an axis that one copy takes
_CHUNK = 1024  # elements of a row that are in registers at once


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowNormParams:
    """How rows are gone through by the kernels.

    Attributes:
        block_rows: Rows that are copied together.
        stages: How many such copies are under way or being worked on.
        occupancy: Blocks of threads that a multiprocessor is given.
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
    """What is computed of a row.

    Attributes:
        centred: Whether the mean is taken off.
        eps: Added to the mean of squares.
        weight: Whether there is one, and what is added to it; `None`: there is none.
        bias: Whether there is one.
        residual: Whether another array is added before, and the sum is a result, too.
    """

    centred: bool
    eps: float
    weight: float | None = 0.0
    bias: bool = False
    residual: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowNormPlan:
    """A launch.

    Attributes:
        rows: How many rows there are.
        dim: How long they are.
        dtype: Of the rows.
        formula: What is computed of each.
        backward: Whether gradients are asked for.
        params: How it is done.
    """

    rows: int
    dim: int
    dtype: str
    formula: Formula
    backward: bool
    params: RowNormParams

    @property
    def row_shape(self) -> tuple[int, int]:
        """A row as copies take it."""
        return self.dim // self.minor, self.minor

    @property
    def minor(self) -> int:
        """The length of the last axis of `row_shape`."""
        return min(MINOR, self.chunk)

    @property
    def chunk(self) -> int:
        """How many elements of a row are in registers at once."""
        return next(size for size in (_CHUNK, 512, 256, 128) if self.dim % size == 0)

    @property
    def programs(self) -> int:
        """How many blocks of threads are launched."""
        return min(hopper.MULTIPROCESSORS * self.params.occupancy, self.blocks)

    @property
    def blocks(self) -> int:
        """How many blocks of rows there are."""
        return self.rows // self.params.block_rows

    @property
    def sources(self) -> int:
        """How many arrays of rows are read."""
        return 1 + self.backward + self.formula.residual

    @property
    def results(self) -> int:
        """How many arrays of rows are written."""
        return 1 + (self.formula.residual and not self.backward)

    @property
    def sums(self) -> int:
        """How many vectors are summed over rows."""
        return self.backward * ((self.formula.weight is not None) + self.formula.bias)

    def shared_bytes(self) -> int:
        """Return how much shared memory a block of threads needs."""
        row = self.dim * jnp.dtype(self.dtype).itemsize
        rows = (self.sources + self.results) * self.params.stages * self.params.block_rows * row
        return rows + self.sums * 4 * self.dim + 1024  # sums in float32, barriers, and what means go through
