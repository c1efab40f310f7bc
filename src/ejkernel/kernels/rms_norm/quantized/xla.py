# SPDX-License-Identifier: Apache-2.0
"""RMS normalisation with a result in 8 bits, in plain JAX."""

from __future__ import annotations

from typing import Any

from ejkernel.ops.implementation import Implementation

from .operation import QuantizedRmsNormCall, quantized_norm


class Xla(Implementation[QuantizedRmsNormCall]):
    """Every call on every platform."""

    name = "xla"
    features = frozenset(("weight=None", "weight_offset", "residual"))

    def forward(self, call: QuantizedRmsNormCall, /, *args: Any, params: Any) -> tuple[Any, Any]:
        """Return the results, without residuals."""
        return quantized_norm(*args, quantize=call.values, eps=call.eps, weight_offset=call.weight_offset), ()
