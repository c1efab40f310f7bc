# SPDX-License-Identifier: Apache-2.0
"""Quantising in plain JAX."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel.kernels.quantized_matmul.quantized import quantize
from ejkernel.ops.implementation import Implementation

from .common import BLOCK, QuantizeCall
from .groups import in_columns


class Xla(Implementation[QuantizeCall]):
    """Quantisation in plain JAX, for every platform."""

    name = "xla"
    features = frozenset({"group_sizes"})

    def forward(self, call: QuantizeCall, /, *args: Any, params: Any) -> tuple[Any, Any]:
        """Return the results, without residuals."""
        return quantized_blocks(*args, dtype=call.values, transposed=call.transposed, square=call.square), ()


def quantized_blocks(
    x: jax.Array, group_sizes: jax.Array | None = None, *, dtype: str, transposed: bool, square: bool = False
) -> tuple[jax.Array, ...]:
    """Return numbers and scales of rows, then those of the transpose."""
    found = [quantize(x, dtype=dtype, block=BLOCK)]
    if transposed:
        columns = x.T if group_sizes is None else in_columns(x, group_sizes)
        found.append(quantize(columns, dtype=dtype, block=BLOCK, axis=(0, 1) if square else -1))
    return tuple(part for each in found for part in (each.values, each.scale))
