# SPDX-License-Identifier: Apache-2.0
"""The description of a quantised product."""

from __future__ import annotations

import dataclasses

from ejkernel.ops.implementation import OperationCall

from .quantized import LARGEST, Block

LONGEST_INT8 = (2**31 - 1) // 128**2
"""The most products of two int8 numbers that int32 can sum, even if each number is -128."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedMatmulCall(OperationCall):
    """A call without its arrays: `[m, k]` times `[k, n]`, or `[n, k]` if `transpose_w`.

    Attributes:
        rows: `m`, of all leading axes.
        inner: `k`.
        columns: `n`.
        x_dtype, w_dtype: Names of the operands' dtypes.
        out_dtype: Name of the dtype of the result.
        x_block: Rows and columns of a block of `x`, or `None` if it has no scales.
        w_block: The same of `w`: the block's size along `n` and along `k`, in this order.
        transpose_w: Whether `w` is `[n, k]`.
        fast: Whether sums may stay in the tensor core's accumulator.
    """

    rows: int
    inner: int
    columns: int
    x_dtype: str
    w_dtype: str
    out_dtype: str
    x_block: Block | None
    w_block: Block | None
    transpose_w: bool = False
    fast: bool = False

    @property
    def is_narrow(self) -> bool:
        """Whether both operands are quantised."""
        return self.x_dtype in LARGEST and self.w_dtype in LARGEST

    @property
    def is_integer(self) -> bool:
        """Whether both operands are int8, so that sums are exact."""
        return self.x_dtype == self.w_dtype == "int8"

    @property
    def scales_outside(self) -> bool:
        """Whether no scale varies along `k`, so that the product can be scaled after the sum."""
        return all(block is None or block[1] is None for block in (self.x_block, self.w_block))
