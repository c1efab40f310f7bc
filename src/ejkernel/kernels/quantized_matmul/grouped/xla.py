# SPDX-License-Identifier: Apache-2.0
"""Quantised products of groups in plain JAX: loops over tiles of rows, which widen the operands of each."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._options import POSITIVE, check_parameters
from ejkernel.kernels.grouped_matmul import reference
from ejkernel.kernels.grouped_matmul import xla as plain
from ejkernel.kernels.grouped_matmul.common import own_rows, scaled_rows
from ejkernel.kernels.quantized_matmul.operation import widened
from ejkernel.kernels.quantized_matmul.quantized import Block, spread
from ejkernel.kernels.quantized_matmul.quantizing.common import BLOCK
from ejkernel.kernels.quantized_matmul.quantizing.groups import whole_blocks
from ejkernel.ops.implementation import Implementation
from ejkernel.ops.utils.messages.names import NamedFields

from .common import QuantizedGroupedActivationCall, QuantizedGroupedMatmulCall, QuantizedGroupedWgradCall, activation_of

_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class XlaGroupedParams(NamedFields):
    """Parameters of the plain product.

    Attributes:
        block_rows: Rows per step, or `None` for one `jax.lax.ragged_dot_general`; see `grouped_matmul`.
        products: Dtype of the multiplied operands: `float32`, or `bfloat16`, which holds every 8-bit number.
    """

    block_rows: int | None = None
    products: str = "float32"

    def __post_init__(self) -> None:
        check_parameters(self, block_rows=POSITIVE, products=_DTYPES)


class XlaGrouped(Implementation[QuantizedGroupedMatmulCall]):
    """The product on every platform, with every kind of scales."""

    name = "xla"
    params = XlaGroupedParams
    differentiable = True
    features = frozenset({"row_scale", "first_group"})

    def heuristic(self, call: QuantizedGroupedMatmulCall) -> XlaGroupedParams:
        """Return tiles of about the size of the groups, in float32 where bfloat16 is emulated or has too few digits."""
        rows = plain.Xla().heuristic(call).block_rows
        exact = call.platform not in ("gpu", "tpu") or _is_wide(call)
        return XlaGroupedParams(block_rows=rows, products="float32" if exact else "bfloat16")

    def space(self, call: QuantizedGroupedMatmulCall) -> list[XlaGroupedParams]:
        """Return all tile sizes that `grouped_matmul` tries, in each dtype."""
        dtypes = _DTYPES[:1] if _is_wide(call) else _DTYPES
        sizes = [params.block_rows for params in plain.Xla().space(call)]
        return [XlaGroupedParams(block_rows=size, products=dtype) for size in sizes for dtype in dtypes]

    def forward(
        self, call: QuantizedGroupedMatmulCall, /, *args: Any, params: XlaGroupedParams
    ) -> tuple[jax.Array, Any]:
        """Return the product, without residuals."""
        lhs, rhs, groups, lhs_scale, rhs_scale, *factors = args
        product = _whole if params.block_rows is None else _by_tiles
        out = product(call, (lhs, lhs_scale), (rhs, rhs_scale), groups, params)
        for row_scale in factors:
            out = scaled_rows(out, row_scale, own_rows(groups, call.rows, call.groups))
        return out.astype(call.out_dtype), ()


class XlaGroupedActivation(Implementation[QuantizedGroupedActivationCall]):
    """The activation on every platform: both products, then plain JAX."""

    name = "xla"
    params = XlaGroupedParams
    differentiable = True
    features = frozenset({"activation", "gate", "row_scale", "first_group"})

    def heuristic(self, call: QuantizedGroupedActivationCall) -> XlaGroupedParams:
        """Return the parameters of the products; see `XlaGrouped`."""
        return XlaGrouped().heuristic(call)

    def space(self, call: QuantizedGroupedActivationCall) -> list[XlaGroupedParams]:
        """Return the parameters of the products; see `XlaGrouped`."""
        return XlaGrouped().space(call)

    def forward(self, call: QuantizedGroupedActivationCall, /, *args: Any, params: XlaGroupedParams) -> tuple[Any, Any]:
        """Return numbers and scales, or one array, without residuals."""
        lhs, rhs, groups, lhs_scale, rhs_scale, *more = args
        gate, *factors = more or (None,)
        wide = dataclasses.replace(call, out_dtype="float32", scaled=False)
        products = [
            XlaGrouped().forward(wide, lhs, values, groups, lhs_scale, scale, params=params)[0]
            for values, scale in ((rhs, rhs_scale), *([] if gate is None else [gate]))
        ]
        return activation_of(call, products, groups, *factors), ()


class XlaGroupedWgrad(Implementation[QuantizedGroupedWgradCall]):
    """The weights' gradient on every platform."""

    name = "xla"
    params = XlaGroupedParams
    features = frozenset({"first_group"})

    def heuristic(self, call: QuantizedGroupedWgradCall) -> XlaGroupedParams:
        """Return tiles of about the size of the groups; see `XlaGrouped`."""
        exact = call.platform not in ("gpu", "tpu")
        rows = plain.XlaWgrad().heuristic(call).block_rows
        return XlaGroupedParams(block_rows=rows, products="float32" if exact else "bfloat16")

    def space(self, call: QuantizedGroupedWgradCall) -> list[XlaGroupedParams]:
        """Return all tile sizes that `grouped_matmul_wgrad` tries, in each dtype."""
        sizes = [params.block_rows for params in plain.XlaWgrad().space(call)]
        return [XlaGroupedParams(block_rows=size, products=dtype) for size in sizes for dtype in _DTYPES]

    def forward(
        self, call: QuantizedGroupedWgradCall, /, *args: Any, params: XlaGroupedParams
    ) -> tuple[jax.Array, Any]:
        """Return the gradient, without residuals."""
        lhs, rhs, groups, lhs_scale, rhs_scale = args
        left = widened(lhs, lhs_scale, (1, BLOCK), params.products).T
        right = widened(rhs, rhs_scale, (BLOCK if call.square else 1, BLOCK), params.products).T
        wide = dataclasses.replace(call, dtype=params.products, precision=_precision(params))
        own = whole_blocks(groups, call.rows)
        return plain.XlaWgrad().forward(wide, left, right, own, params=plain.XlaParams(block_rows=params.block_rows))


def _is_wide(call: QuantizedGroupedMatmulCall) -> bool:
    """Return whether an operand has more digits than bfloat16."""
    return bool({"float32", "float16"} & {call.dtype, call.rhs_dtype})


def _precision(params: XlaGroupedParams) -> str | None:
    return "highest" if params.products == "float32" else None  # by default TPUs round float32 operands


def _rhs_block(call: QuantizedGroupedMatmulCall) -> Block | None:
    """Return the blocks along the axes of `rhs` as it is stored."""
    block = call.rhs_block
    return block if block is None or call.transpose_rhs else (block[0], block[2], block[1])


def _whole(call: QuantizedGroupedMatmulCall, lhs: Any, rhs: Any, groups: Any, params: XlaGroupedParams) -> jax.Array:
    """Return the product by XLA's ragged dot, of dequantised operands."""
    (left, left_scale), (right, right_scale) = lhs, rhs
    left = widened(left, left_scale, call.lhs_block, params.products)
    right = widened(right, right_scale, _rhs_block(call), params.products)
    wide = dataclasses.replace(call, dtype=params.products, precision=_precision(params))
    return plain.product(wide, left, right, groups, plain.XlaParams())


def _by_tiles(call: QuantizedGroupedMatmulCall, lhs: Any, rhs: Any, groups: Any, params: XlaGroupedParams) -> jax.Array:
    """Return the product in tiles of rows; only a tile's operands are widened at a time."""
    contracted = (((1,), (1 if call.transpose_rhs else 0,)), ((), ()))
    lhs_block, rhs_block = call.lhs_block, _rhs_block(call)

    def multiply(part: Any, matrix: Any) -> jax.Array:
        sides = [
            _spread(part, None if lhs_block is None else (1, lhs_block[1])),
            _spread(matrix, None if rhs_block is None else rhs_block[1:]),
        ]
        if not call.as_dense.scales_outside:
            sides = [(array.astype(jnp.float32) * scale, jnp.float32(1)) for array, scale in sides]
        (left, of_rows), (right, of_columns) = [(array.astype(params.products), scale) for array, scale in sides]
        out = lax.dot_general(left, right, contracted, precision=_precision(params), preferred_element_type=jnp.float32)
        return out * of_rows * (of_columns.T if call.transpose_rhs else of_columns)

    lhs, rhs = _with_all_scales(lhs, lhs_block), _with_all_scales(rhs, rhs_block)
    out = jnp.zeros((call.rows, call.columns), jnp.float32)
    return reference.by_tiles(multiply, lhs, rhs, groups, out, block=params.block_rows or call.rows)


def _with_all_scales(operand: Any, block: Block | None) -> tuple[jax.Array, ...]:
    """Return numbers and scales with an entry for each row, or for each group."""
    array, scale = operand
    if scale is None or block is None:
        return (array,)
    scale = spread(scale, array.shape[:1], block[:1])
    return array, jnp.broadcast_to(scale, (array.shape[0], *scale.shape[1:]))


def _spread(operand: tuple[jax.Array, ...], block: Block | None) -> tuple[jax.Array, jax.Array]:
    """Return a tile's rows, or a matrix, with float32 scales that broadcast to it."""
    array, *scales = operand
    if not scales or block is None:
        return array, jnp.float32(1)
    return array, spread(scales[0].astype(jnp.float32), array.shape, block)
