# SPDX-License-Identifier: Apache-2.0
"""What a launch is made of: told from shapes and parameters, before anything is compiled."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from ejkernel.kernels import _hopper as hopper
from ejkernel.ops.errors import ConfigError

THREADS = 128  # of a block: one warpgroup, which has a row to itself
MINOR = 256  # elements along an axis that one copy takes
SHORT = 512  # elements: of shorter rows a warpgroup has several at once, in registers
SLAB = 16  # of them
_CHUNK = 1024  # elements of a longer row that are in registers at once
# Of a thread, by a guess of what it needs, and elements of one array that a warpgroup has read: up to both of them no
# compiler was seen to spill.
_REGISTERS, _ELEMENTS = 256, 24_576


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowNormParams:
    """How rows are gone through by the kernels.

    Attributes:
        block_rows: Rows that are copied together; of rows shorter than 512, which are read into registers, a multiple
            of 16.
        stages: How many such copies are under way or being worked on; of short rows 1.
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
    def is_short(self) -> bool:
        """Whether rows are short, so that each is in registers as a whole."""
        return self.dim < SHORT

    @property
    def stats(self) -> int:
        """How many numbers are known of each row before it is read."""
        return self.backward * (1 + self.formula.centred)

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

    def registers(self) -> int:
        """Return a guess of how many registers a thread needs for short rows, vectors, sums, and the work on a slab."""
        read = self.sources * self.params.block_rows * self.dim * jnp.dtype(self.dtype).itemsize // 4
        vectors = (self.formula.weight is not None) + (self.formula.bias and not self.backward)
        kept = self.sums + vectors + (3 if self.backward else 1)
        return (read + kept * SLAB * self.dim) // THREADS

    def short_fault(self) -> str | None:
        """Return why short rows cannot be gone through like this; `None` if they can."""
        block_rows, stages = self.params.block_rows, self.params.stages
        if block_rows % SLAB or stages != 1:
            asked = f"block_rows a multiple of {SLAB}, and stages 1"
            return f"rows of {self.dim} elements take {asked}; they are {block_rows} and {stages}."
        if block_rows * self.dim > _ELEMENTS:
            return f"it reads {block_rows * self.dim} elements at once, and registers have room for {_ELEMENTS}."
        if self.registers() > _REGISTERS:
            return f"it takes about {self.registers()} registers of a thread, and there are {_REGISTERS}."
        return None

    def shared_bytes(self) -> int:
        """Return how much shared memory a block of threads needs."""
        if self.is_short:
            return 0
        row = self.dim * jnp.dtype(self.dtype).itemsize
        rows = (self.sources + self.results) * self.params.stages * self.params.block_rows * row
        return rows + self.sums * 4 * self.dim + 1024  # sums in float32, barriers, and what means go through
