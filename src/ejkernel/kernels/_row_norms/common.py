# SPDX-License-Identifier: Apache-2.0
"""The description of a call, and the argument checks, of the operations that normalise rows."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp

from ejkernel.kernels._numbers import is_number
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.types import Cost
from ejkernel.ops.errors import ArgumentError
from ejkernel.ops.implementation import OperationCall, OperationConfig
from ejkernel.ops.operation import Operation
from ejkernel.ops.utils.values.scalars import given_text
from ejkernel.ops.utils.values.signature import is_array

Normalized = jax.Array | tuple[jax.Array, jax.Array]
"""The output; with a residual, also the sum that was normalised."""

RESIDUALS = "statistics of every row, in float32"
"""Format of the residuals of all forwards: 1 / standard deviation or 1 / rms of a row, after its mean if subtracted."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """The formula of a row.

    Attributes:
        centred: Whether the mean is subtracted.
        eps: Added to the mean of squares.
        weight: The number added to the weight; `None` without a weight.
        bias: Whether a bias is added.
        residual: Whether another array is added first; the sum is then a result too.
    """

    centred: bool
    eps: float
    weight: float | None = 0.0
    bias: bool = False
    residual: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowNormCall(OperationCall):
    """A call without its arrays.

    Attributes:
        rows: The number of rows, without those of enclosing `vmap`s.
        dim: Their length.
        dtype: Name of their dtype.
        eps: Added to the mean of squares.
        residual: Whether another array is added first.
    """

    rows: int
    dim: int
    dtype: str
    eps: float
    residual: bool = False

    @property
    def formula(self) -> Formula:
        """The formula of a row."""
        raise NotImplementedError

    @property
    def all_rows(self) -> int:
        """The number of rows, with those of enclosing `vmap`s."""
        return self.rows * self.examples


Cfg = TypeVar("Cfg", bound=OperationConfig)
CallT = TypeVar("CallT", bound=RowNormCall)


class RowNorm(Operation[Cfg, CallT, Normalized], Generic[Cfg, CallT]):
    """Base of the operations.

    Attributes:
        flops: Operations per element of the forward.
    """

    flops: int

    def cost(self, inv: Invocation[Cfg, Normalized]) -> Cost | None:
        """Return the work of the forward, with each array read or written once."""
        if inv.direction != "fwd":
            return None
        call = self.call_of(inv)
        elements = call.all_rows * call.dim
        written = (1 + call.residual) * elements * jnp.dtype(call.dtype).itemsize
        return Cost(flops=self.flops * elements, bytes=inv.input_bytes + written)


def check_rows(x: Any, **vectors: Any) -> None:
    """Check that `x` has rows to normalise and that each vector has the length of a row.

    Raises:
        ArgumentError: An argument has the wrong shape or dtype.
    """
    for name, array in {"x": x, **vectors}.items():
        if not is_array(array) or not jnp.issubdtype(array.dtype, jnp.floating):
            got = f"dtype {array.dtype}" if is_array(array) else type(array).__name__
            axes = "[..., dim]" if name == "x" else "[dim]"
            raise ArgumentError(f"{name} must be a floating-point array {axes}, got {got}.")
    if not x.shape or not x.shape[-1]:
        raise ArgumentError(f"x must have a last axis that is not empty; got shape {tuple(x.shape)}.")
    for name, vector in vectors.items():
        if tuple(vector.shape) != tuple(x.shape[-1:]):
            shapes = f"{tuple(vector.shape)} and {tuple(x.shape)}"
            raise ArgumentError(f"{name} must be a vector of the length of x's last axis; got shapes {shapes}.")


def canonical_eps(eps: Any) -> float:
    """Return `eps` as a Python float.

    Raises:
        ArgumentError: It is not a number, or negative.
    """
    if not is_number(eps) or not 0 <= eps < math.inf:
        raise ArgumentError(f"eps must be a number >= 0, got {given_text(eps)}.")
    return float(eps)


def given_residual(residual: Any, x: Any) -> tuple[Any, ...]:
    """Return the residual as a tuple of positional arguments; empty without a residual.

    A call without a residual thus keeps the key that it had before the argument existed.

    Raises:
        ArgumentError: It is not an array of `x`'s shape and dtype.
    """
    if residual is None:
        return ()
    if not is_array(residual) or tuple(residual.shape) != tuple(x.shape) or residual.dtype != x.dtype:
        got = f"{tuple(residual.shape)}, {residual.dtype}" if is_array(residual) else type(residual).__name__
        raise ArgumentError(f"residual must have x's shape and dtype, {tuple(x.shape)}, {x.dtype}; got {got}.")
    return (residual,)
