# SPDX-License-Identifier: Apache-2.0
"""The operation behind `rms_norm`: its arguments, its reference, its cost, and which implementations it has."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.types import Cost
from ejkernel.ops.errors import ArgumentError
from ejkernel.ops.implementation import Implementations, OperationCall, OperationConfig
from ejkernel.ops.operation import Operation
from ejkernel.ops.utils.values.signature import is_array

from .reference import normalize

_Invocation = Invocation["RmsNormConfig", jax.Array]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RmsNormCall(OperationCall):
    """A call without its arrays.

    Attributes:
        rows: How many rows are normalised, those of enclosing `vmap`s left out.
        dim: How long they are.
        dtype: Name of their dtype.
        eps: Added to the mean of squares.
    """

    rows: int
    dim: int
    dtype: str
    eps: float

    @property
    def all_rows(self) -> int:
        """How many rows are normalised at once."""
        return self.rows * self.examples


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RmsNormConfig(OperationConfig):
    """How one call of `rms_norm` runs, forward or backward; see `OperationConfig`."""

    implementation: str = "xla"


class RmsNorm(Operation[RmsNormConfig, RmsNormCall, jax.Array]):
    """The operation behind `rms_norm`, which documents the arguments."""

    implementations = Implementations({"xla": f"{__package__}.xla:Xla"})

    def __init__(self) -> None:
        super().__init__(name="rms_norm")

    def prepare(
        self, x: Any, weight: Any, *, eps: Any = 1e-6, implementation: Any = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the arguments."""
        for name, array, axes in (("x", x, "[..., dim]"), ("weight", weight, "[dim]")):
            if not is_array(array) or not jnp.issubdtype(array.dtype, jnp.floating):
                got = f"dtype {array.dtype}" if is_array(array) else type(array).__name__
                raise ArgumentError(f"{name} must be a floating-point array {axes}, got {got}.")
        if not x.shape or tuple(weight.shape) != tuple(x.shape[-1:]) or not x.shape[-1]:
            raise ArgumentError(
                f"weight must have the length of x's last axis; got shapes {tuple(weight.shape)} and {tuple(x.shape)}."
            )
        if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps < math.inf:
            raise ArgumentError(f"eps must be a number >= 0, got {eps!r}; it is static under jit.")
        return (x, weight), {"eps": float(eps), "implementation": self.requested(implementation)}

    def describe(self, x: Any, weight: Any, *, eps: float = 1e-6) -> RmsNormCall:
        """Return the number of rows, their length, and their dtype."""
        return RmsNormCall(rows=math.prod(x.shape[:-1]), dim=x.shape[-1], dtype=str(x.dtype), eps=eps)

    def reference(self, *args: Any, **options: Any) -> Any:
        """Return the output, as the formula says."""
        x, weight = args
        return normalize(x, weight, options["eps"]).astype(x.dtype)

    def cost(self, inv: _Invocation) -> Cost | None:
        """Return the forward's work: four operations an element; `x` and the weight are read, the output is written."""
        if inv.direction != "fwd":
            return None
        call = self.call_of(inv)
        elements = call.all_rows * call.dim
        return Cost(flops=4 * elements, bytes=inv.input_bytes + elements * jnp.dtype(call.dtype).itemsize)

    def typical_call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call with some rows."""
        return (jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((1024,), jnp.bfloat16)), {}


rms_norm = RmsNorm()
