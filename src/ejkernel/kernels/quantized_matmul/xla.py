# SPDX-License-Identifier: Apache-2.0
"""Quantised products in plain JAX: on 8-bit operands as they are, or on operands widened to bfloat16 or float32."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._options import check_parameters
from ejkernel.ops.implementation import Implementation
from ejkernel.ops.utils.messages.names import NamedFields
from ejkernel.ops.utils.values.signature import is_known

from .common import LONGEST_INT8, QuantizedMatmulCall
from .quantized import Block, spread


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class XlaParams(NamedFields):
    """Parameters of the plain product.

    Attributes:
        products: Dtype in which operands are multiplied: `float32`, `bfloat16`, which holds every 8-bit number exactly,
            or `native`, the operands' own. Numbers whose scales vary along `k` are multiplied by them first, which
            bfloat16 rounds. With native float8 XLA calls cuBLASLt on GPUs, whose sums are coarse.
    """

    products: str = "float32"

    def __post_init__(self) -> None:
        check_parameters(self, products=("float32", "bfloat16", "native"))


class Xla(Implementation[QuantizedMatmulCall]):
    """The product on every platform, with every kind of scales."""

    name = "xla"
    params = XlaParams
    differentiable = True

    def params_fault(self, call: QuantizedMatmulCall, params: XlaParams) -> str | None:
        """Return why the call cannot run with these parameters; `None` if it can."""
        return _native_fault(call) if params.products == "native" else None

    def heuristic(self, call: QuantizedMatmulCall) -> XlaParams:
        """Return native products of int8, or of float8 on GPUs where fast sums are allowed; else widened ones."""
        if _native_fault(call) is None and (call.is_integer or call.platform == "gpu"):
            return XlaParams(products="native")
        # float32 on CPUs, where bfloat16 is emulated, and where a wide operand has more digits than bfloat16
        wide = {"float32", "float16"} & {call.x_dtype, call.w_dtype}
        return XlaParams() if wide or call.platform not in ("gpu", "tpu") else XlaParams(products="bfloat16")

    def space(self, call: QuantizedMatmulCall) -> list[XlaParams]:
        """Return all kinds of products that the call allows."""
        found = [XlaParams(products=name) for name in ("native", "bfloat16", "float32")]
        return [self.heuristic(call), *(p for p in found if p != self.heuristic(call) and self._fits(call, p))]

    def _fits(self, call: QuantizedMatmulCall, params: XlaParams) -> bool:
        wide = {"float32", "float16"} & {call.x_dtype, call.w_dtype}
        return self.params_fault(call, params) is None and not (wide and params.products == "bfloat16")

    def forward(self, call: QuantizedMatmulCall, /, *args: Any, params: XlaParams) -> tuple[jax.Array, Any]:
        """Return the product, without residuals."""
        x, w, x_scale, w_scale = args
        transposed, native = call.transpose_w, params.products == "native"
        w_block = call.w_block if call.w_block is None or transposed else call.w_block[::-1]
        sides = [(x, _spread(x_scale, x, call.x_block)), (w, _spread(w_scale, w, w_block))]
        if not native:
            sides = [(array.astype(params.products), scale) for array, scale in sides]
        if not call.scales_outside:
            sides = [(_scaled(array, scale), None) for array, scale in sides]
        (left, row_scale), (right, column_scale) = sides
        out = lax.dot_general(
            left,
            right,
            (((1,), (1 if transposed else 0,)), ((), ())),
            # By default TPUs round float32 operands.
            precision="highest" if params.products == "float32" else None,
            preferred_element_type=jnp.int32 if native and call.is_integer else jnp.float32,
        ).astype(jnp.float32)
        if row_scale is not None:
            out = out * row_scale
        if column_scale is not None:
            out = out * (column_scale.T if transposed else column_scale)
        return out.astype(call.out_dtype), ()


def _native_fault(call: QuantizedMatmulCall) -> str | None:
    if not call.is_narrow or not call.scales_outside or (call.x_dtype == "int8") != (call.w_dtype == "int8"):
        return "products='native' needs two float8 or two int8 operands whose scales do not vary along k."
    if not call.is_integer and not call.fast:
        return "products='native' sums float8 in the tensor core's coarse accumulator: it needs accumulation='fast'."
    if call.is_integer and not (is_known(call.inner) and call.inner <= LONGEST_INT8):
        return f"products='native' sums int8 in int32, which may overflow where k exceeds {LONGEST_INT8}."
    return None


def _spread(scale: Any, array: Any, block: Block | None) -> Any:
    """Return float32 scales that broadcast to the array."""
    return None if scale is None or block is None else spread(scale.astype(jnp.float32), array.shape, block)


def _scaled(array: jax.Array, scale: jax.Array | None) -> jax.Array:
    return array if scale is None else (array.astype(jnp.float32) * scale).astype(array.dtype)
