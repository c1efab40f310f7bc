# SPDX-License-Identifier: Apache-2.0
"""The operation behind `layer_norm`: arguments, reference, cost, and implementations."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._numbers import accumulator
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
from ejkernel.ops.implementation import Implementations, LazyImplementation, OperationConfig

_Invocation = Invocation["LayerNormConfig", Normalized]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerNormCall(RowNormCall):
    """A call without its arrays; `eps` is added to the variance."""

    @property
    def formula(self) -> Formula:
        """See `RowNormCall`."""
        return Formula(centred=True, eps=self.eps, bias=True, residual=self.residual)

    @property
    def features(self) -> frozenset[str]:
        """See `OperationCall`."""
        return frozenset(("residual",) if self.residual else ())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerNormConfig(OperationConfig):
    """How one call of `layer_norm` runs, forward or backward; see `OperationConfig`."""

    implementation: str = "xla"


class LayerNorm(RowNorm[LayerNormConfig, LayerNormCall]):
    """The operation behind `layer_norm`; see there for the arguments."""

    flops = 7
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
        super().__init__(name="layer_norm")

    def prepare(
        self, x: Any, weight: Any, bias: Any, residual: Any = None, *, eps: Any = 1e-5, implementation: Any = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the arguments, and drop an absent residual, which the key omits."""
        check_rows(x, weight=weight, bias=bias)
        return (x, weight, bias, *given_residual(residual, x)), {
            "eps": canonical_eps(eps),
            "implementation": self.requested(implementation),
        }

    def describe(self, x: Any, weight: Any, bias: Any, residual: Any = None, *, eps: float = 1e-5) -> LayerNormCall:
        """Return the number of rows, their length, and their dtype."""
        return LayerNormCall(
            rows=math.prod(x.shape[:-1]),
            dim=x.shape[-1],
            dtype=str(x.dtype),
            eps=eps,
            residual=residual is not None,
        )

    def reference(self, *args: Any, **options: Any) -> Any:
        """Return the output by the plain formula, computed in float32."""
        x, weight, bias, *residual = args
        x = x + residual[0] if residual else x
        wide = x.astype(accumulator(x.dtype))
        centred = wide - wide.mean(axis=-1, keepdims=True)
        normal = centred / jnp.sqrt((centred**2).mean(axis=-1, keepdims=True) + options["eps"])
        # The user may have disabled JAX's rank promotion.
        weight, bias = (y.astype(wide.dtype).reshape((1,) * (x.ndim - 1) + y.shape) for y in (weight, bias))
        out = (normal * weight + bias).astype(x.dtype)
        return (out, x) if residual else out

    def sharding_rule(self, inv: _Invocation) -> ShardingRule:
        """Return a rule that splits the rows."""
        more = ", ... dim" * (len(inv.args) - 3)
        return ShardingRule(f"... dim, dim, dim{more} -> ... dim{more}", split="...", residuals="..., ...")

    def typical_call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call with 1024 rows of 1024 elements."""
        vector = jax.ShapeDtypeStruct((1024,), jnp.bfloat16)
        return (jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16), vector, vector), {}


layer_norm = LayerNorm()
