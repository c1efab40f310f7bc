# SPDX-License-Identifier: Apache-2.0
"""The descriptions of a quantised product of groups, of its activation, and of the gradient of its matrices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from ejkernel.kernels.grouped_matmul.common import GroupedMatmulCall, finished, own_rows
from ejkernel.kernels.quantized_matmul.common import QuantizedMatmulCall
from ejkernel.kernels.quantized_matmul.quantized import Block, quantize
from ejkernel.kernels.quantized_matmul.quantizing.common import BLOCK
from ejkernel.ops.implementation import OperationCall


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedGroupedMatmulCall(GroupedMatmulCall):
    """A call without its arrays; `dtype` is that of the left operand.

    Attributes:
        rhs_dtype: Name of the dtype of the right operand.
        lhs_block: Rows and columns of a block of the left operand, or `None` if it has no scales.
        rhs_block: The same of the right operand: the block's size along groups, `n` and `k`, in this order.
        fast: Whether sums may stay in the tensor core's accumulator.
    """

    rhs_dtype: str
    lhs_block: Block | None
    rhs_block: Block | None
    fast: bool = False

    @property
    def as_dense(self) -> QuantizedMatmulCall:
        """The product of all rows with the matrix of one group."""
        return QuantizedMatmulCall(
            rows=self.rows,
            inner=self.inner,
            columns=self.columns,
            x_dtype=self.dtype,
            w_dtype=self.rhs_dtype,
            out_dtype=self.out_dtype,
            x_block=self.lhs_block,
            w_block=None if self.rhs_block is None else self.rhs_block[1:],
            transpose_w=self.transpose_rhs,
            fast=self.fast,
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(OperationCall)},
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedGroupedActivationCall(QuantizedGroupedMatmulCall):
    """A call without its arrays.

    Attributes:
        values: Name of the dtype of a result in 8 bits; `None` if the result has no scales.
    """

    values: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedGroupedWgradCall(GroupedMatmulCall):
    """A call without its arrays; `rows` is the length of both operands along the rows of groups, with whole blocks.

    Attributes:
        rhs_dtype: Name of the dtype of the right operand; `dtype` is that of the left one.
        square: Whether the right operand has scales of 128x128 blocks; else of 1x128 blocks, as the left one.
    """

    rhs_dtype: str
    square: bool = False


def activation_of(
    call: QuantizedGroupedActivationCall, products: Sequence[jax.Array], groups: Any, row_scale: Any = None
) -> Any:
    """Return the activation of float32 products: numbers and scales, or one array."""
    own = own_rows(groups, call.rows, call.groups)
    wide = finished(products, own, row_scale, call.activation)
    if call.values is None:
        return wide.astype(call.out_dtype)
    found = quantize(wide, dtype=call.values, block=BLOCK)
    return found.values, found.scale
