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
    """The same numbers on every platform."""

    name = "xla"
    features = frozenset({"group_sizes"})

    def forward(self, call: QuantizeCall, /, *args: Any, params: Any) -> tuple[Any, Any]:
        """Return the results, without residuals."""
        return quantized_blocks(*args, dtype=call.values, transposed=call.transposed), ()


def quantized_blocks(
    x: jax.Array, group_sizes: jax.Array | None = None, *, dtype: str, transposed: bool
) -> tuple[jax.Array, ...]:
    """Return numbers and scales of rows, then those of the transpose."""
    arrays = [x]
    if transposed:
        arrays.append(x.T if group_sizes is None else in_columns(x, group_sizes))
    found = [quantize(array, dtype=dtype, block=BLOCK) for array in arrays]
    return tuple(part for each in found for part in (each.values, each.scale))
