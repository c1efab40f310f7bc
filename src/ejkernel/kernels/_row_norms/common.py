# SPDX-License-Identifier: Apache-2.0
"""What the operations that normalise rows say of a call, and how they check what is added before."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from ejkernel.ops.errors import ArgumentError
from ejkernel.ops.implementation import OperationCall
from ejkernel.ops.utils.values.signature import is_array

Normalized = jax.Array | tuple[jax.Array, jax.Array]
"""The output; and the sum that it is of, where there is a residual."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowNormCall(OperationCall):
    """A call without its arrays.

    Attributes:
        rows: How many rows are normalised, those of enclosing `vmap`s left out.
        dim: How long they are.
        dtype: Name of their dtype.
        eps: Added to the mean of squares.
        residual: Whether another array is added before.
    """

    rows: int
    dim: int
    dtype: str
    eps: float
    residual: bool = False

    @property
    def all_rows(self) -> int:
        """How many rows are normalised at once."""
        return self.rows * self.examples


def check_residual(residual: Any, x: Any) -> None:
    """Raise unless `residual` can be added to `x`.

    Raises:
        ArgumentError: it is no array of `x`'s shape and dtype.
    """
    if not is_array(residual) or tuple(residual.shape) != tuple(x.shape) or residual.dtype != x.dtype:
        got = f"{tuple(residual.shape)}, {residual.dtype}" if is_array(residual) else type(residual).__name__
        raise ArgumentError(f"residual must have x's shape and dtype, {tuple(x.shape)}, {x.dtype}; got {got}.")
