# SPDX-License-Identifier: Apache-2.0
"""RMS normalisation by ejkernel's kernel for Hopper GPUs."""

from __future__ import annotations

from ejkernel.kernels._row_norms import implementation
from ejkernel.kernels._row_norms.plan import Formula

from .operation import RESIDUALS, RmsNormCall


class MosaicGpu(implementation.MosaicGpu[RmsNormCall]):
    """The implementation for Hopper GPUs."""

    residuals = RESIDUALS
    features = frozenset(("weight=None", "weight_offset", "residual"))

    def formula(self, call: RmsNormCall) -> Formula:
        """Return the formula of RMS normalisation for this call."""
        weight = call.weight_offset if call.weight else None
        return Formula(centred=False, eps=call.eps, weight=weight, residual=call.residual)
