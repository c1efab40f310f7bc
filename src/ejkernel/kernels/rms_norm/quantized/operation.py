# SPDX-License-Identifier: Apache-2.0
"""The operation behind `rms_norm(quantize=)`.

The contract of an implementation. It sees the arguments of `rms_norm`, and returns the normalised rows in `call.values`
and the float32 scales of their 1x128 blocks; with a residual also the sum. Rows are quantised from float32.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.quantized_matmul.quantized import LARGEST, canonical_dtype, quantize
from ejkernel.kernels.quantized_matmul.quantizing.common import BLOCK
from ejkernel.kernels.rms_norm.operation import RmsNormCall, normalize, rms_norm
from ejkernel.ops.core.invocation import Invocation
from ejkernel.ops.core.sharding.rule import ShardingRule
from ejkernel.ops.core.types import Cost
from ejkernel.ops.implementation import Implementations, LazyImplementation, OperationConfig
from ejkernel.ops.operation import Operation

_Invocation = Invocation["QuantizedRmsNormConfig", Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedRmsNormCall(RmsNormCall):
    """A call without its arrays.

    Attributes:
        values: Name of the dtype of the result.
    """

    values: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedRmsNormConfig(OperationConfig):
    """Configuration of one call of `rms_norm` with a result in 8 bits; only `fwd` counts: there is no gradient."""

    implementation: str = "xla"


class QuantizedRmsNorm(Operation[QuantizedRmsNormConfig, QuantizedRmsNormCall, Any]):
    """The operation behind `rms_norm(quantize=)`; see there for the arguments."""

    implementations = Implementations(
        {
            "mosaic_gpu": LazyImplementation(f"{__package__}.mosaic_gpu:MosaicGpu", platforms=("gpu",)),
            "xla": f"{__package__}.xla:Xla",
        }
    )
    why_no_gradient = "its result is quantised. Use rms_norm without quantize, and quantized_dense to train."

    def __init__(self) -> None:
        super().__init__(name="quantized_rms_norm")

    def prepare(
        self,
        x: Any,
        weight: Any = None,
        residual: Any = None,
        *,
        quantize: Any = "float8_e4m3fn",
        eps: Any = 1e-6,
        weight_offset: Any = 0.0,
        implementation: Any = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Check the arguments, as `rms_norm` does."""
        args, found = rms_norm.prepare(x, weight, residual, eps=eps, weight_offset=weight_offset)
        return args, found | {
            "quantize": canonical_dtype("quantize", quantize, tuple(LARGEST)),
            "implementation": self.requested(implementation),
        }

    def describe(
        self, x: Any, weight: Any, residual: Any = None, *, quantize: str, **options: Any
    ) -> QuantizedRmsNormCall:
        """Return the number of rows, their length, and dtypes."""
        call = rms_norm.describe(x, weight, residual, **options)
        fields = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
        return QuantizedRmsNormCall(**fields, values=quantize)

    def reference(self, *args: Any, **options: Any) -> Any:
        """Return the results in plain JAX."""
        x, weight, *residual = args
        return quantized_norm(
            x,
            weight,
            *residual,
            quantize=options["quantize"],
            eps=options["eps"],
            weight_offset=options.get("weight_offset", 0.0),
        )

    def sharding_rule(self, inv: _Invocation) -> ShardingRule:
        """Return a rule that splits the rows."""
        weight = "" if inv.args[1] is None else ", dim"
        more = ", ... dim" * (len(inv.args) - 2)
        return ShardingRule(f"... dim{weight}{more} -> ... dim, ... _{more}", split="...")

    def cost(self, inv: _Invocation) -> Cost | None:
        """Return the work of the call, with each array read or written once."""
        call = self.call_of(inv)
        elements = call.all_rows * call.dim
        written = call.residual * elements * jnp.dtype(call.dtype).itemsize + elements + elements // 32
        return Cost(flops=7 * elements, bytes=inv.input_bytes + written)

    def typical_call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call with 1024 rows of 1024 elements."""
        return (jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((1024,), jnp.bfloat16)), {}


quantized_rms_norm = QuantizedRmsNorm()


def quantized_norm(
    x: jax.Array,
    weight: jax.Array | None,
    residual: jax.Array | None = None,
    *,
    quantize: str,
    eps: float,
    weight_offset: float = 0.0,
) -> tuple[jax.Array, ...]:
    """Return numbers and scales of the normalised rows, and their sum with the residual if there is one."""
    x = x if residual is None else x + residual
    found = _quantize(normalize(x, weight, eps, weight_offset), dtype=quantize, block=BLOCK)
    return (found.values, found.scale) if residual is None else (found.values, found.scale, x)


_quantize = quantize  # arguments are called like it
