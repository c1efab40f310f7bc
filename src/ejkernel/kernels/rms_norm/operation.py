# SPDX-License-Identifier: Apache-2.0
"""The operation behind `rms_norm`: arguments, reference, cost, and implementations."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._numbers import accumulator, is_number
from ejkernel.kernels._row_norms.common import (
    Formula,
    Normalized,
    RowNorm,
    RowNormCall,
    canonical_eps,
    check_rows,
    given_residual,
)
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.sharding.rule import ShardingRule
from ejkernel.ops.errors import ArgumentError
from ejkernel.ops.implementation import Implementations, LazyImplementation, OperationConfig
from ejkernel.ops.utils.values.scalars import given_text

_Invocation = Invocation["RmsNormConfig", Normalized]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RmsNormCall(RowNormCall):
    """A call without its arrays.

    Attributes:
        weight: Whether the call has a weight.
        weight_offset: Added to the weight.
    """

    weight: bool = True
    weight_offset: float = 0.0

    @property
    def formula(self) -> Formula:
        """See `RowNormCall`."""
        weight = self.weight_offset if self.weight else None
        return Formula(centred=False, eps=self.eps, weight=weight, residual=self.residual)

    @property
    def features(self) -> frozenset[str]:
        """See `OperationCall`."""
        asked = {
            "weight=None": not self.weight,
            "weight_offset": self.weight_offset != 0,
            "residual": self.residual,
        }
        return frozenset(name for name, is_asked in asked.items() if is_asked)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RmsNormConfig(OperationConfig):
    """How one call of `rms_norm` runs, forward or backward; see `OperationConfig`."""

    implementation: str = "xla"


class RmsNorm(RowNorm[RmsNormConfig, RmsNormCall]):
    """The operation behind `rms_norm`; see there for the arguments."""

    flops = 4
    implementations = Implementations(
        {
            "mosaic_gpu": LazyImplementation(
                "ejkernel.kernels._row_norms.implementation:MosaicGpu", platforms=("gpu",)
            ),
            "xla": f"{__package__}.xla:Xla",
            "pallas": LazyImplementation("ejkernel.kernels._row_norms.pallas:Pallas", platforms=("tpu",)),
        }
    )

    def __init__(self) -> None:
        super().__init__(name="rms_norm")

    def prepare(
        self,
        x: Any,
        weight: Any = None,
        residual: Any = None,
        *,
        eps: Any = 1e-6,
        weight_offset: Any = 0.0,
        implementation: Any = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the arguments, and drop absent ones, which the key omits."""
        check_rows(x, **({} if weight is None else {"weight": weight}))
        eps = canonical_eps(eps)
        if not is_number(weight_offset) or not math.isfinite(weight_offset) or (weight is None and weight_offset):
            raise ArgumentError(
                f"weight_offset must be a number, and 0 if weight is None, got {given_text(weight_offset)}."
            )
        # Omitting an offset of 0 keeps the keys of earlier versions.
        offset = {"weight_offset": float(weight_offset)} if weight_offset else {}
        return (x, weight, *given_residual(residual, x)), {
            "eps": float(eps),
            "implementation": self.requested(implementation),
        } | offset

    def describe(
        self, x: Any, weight: Any, residual: Any = None, *, eps: float = 1e-6, weight_offset: float = 0.0
    ) -> RmsNormCall:
        """Return the number of rows, their length, and their dtype."""
        return RmsNormCall(
            rows=math.prod(x.shape[:-1]),
            dim=x.shape[-1],
            dtype=str(x.dtype),
            eps=eps,
            residual=residual is not None,
            weight=weight is not None,
            weight_offset=weight_offset,
        )

    def reference(self, *args: Any, **options: Any) -> Any:
        """Return the output by the plain formula."""
        x, weight, *residual = args
        x = x + residual[0] if residual else x
        out = normalize(x, weight, options["eps"], options.get("weight_offset", 0.0)).astype(x.dtype)
        return (out, x) if residual else out

    def sharding_rule(self, inv: _Invocation) -> ShardingRule:
        """Return a rule that splits the rows."""
        weight = "" if inv.args[1] is None else ", dim"
        more = ", ... dim" * (len(inv.args) - 2)
        return ShardingRule(f"... dim{weight}{more} -> ... dim{more}", split="...", residuals="...")

    def typical_call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call with 1024 rows of 1024 elements."""
        return (jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((1024,), jnp.bfloat16)), {}


rms_norm = RmsNorm()


def normalize(x: jax.Array, weight: jax.Array | None, eps: float, offset: float = 0.0) -> jax.Array:
    """Return `x / sqrt(mean(x²) + eps) * (weight + offset)` over the last axis, in float32 (float64 for float64)."""
    wide = x.astype(accumulator(x.dtype))
    normal = wide / jnp.sqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)
    if weight is None:
        return normal
    # The user may have disabled JAX's rank promotion.
    return normal * (weight.astype(wide.dtype) + offset).reshape((1,) * (x.ndim - 1) + weight.shape)
