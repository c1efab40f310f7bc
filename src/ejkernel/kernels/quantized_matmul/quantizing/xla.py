# SPDX-License-Identifier: Apache-2.0
"""Quantising in plain JAX."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel.kernels.quantized_matmul.quantized import quantize
from ejkernel.ops.implementation import Implementation

from .common import BLOCK, QuantizeCall


class Xla(Implementation[QuantizeCall]):
    """The same numbers on every platform."""

    name = "xla"

    def forward(self, call: QuantizeCall, /, *args: Any, params: Any) -> tuple[Any, Any]:
        """Return the results, without residuals."""
        [x] = args
        return quantized_blocks(x, call.values, transposed=call.transposed), ()


def quantized_blocks(x: jax.Array, dtype: str, *, transposed: bool) -> tuple[jax.Array, ...]:
    """Return numbers and scales of rows, then those of the transpose."""
    found = [quantize(array, dtype=dtype, block=BLOCK) for array in ([x, x.T] if transposed else [x])]
    return tuple(part for each in found for part in (each.values, each.scale))
