# SPDX-License-Identifier: Apache-2.0
"""RMS normalisation by ejkernel's kernels for TPUs."""

from __future__ import annotations

from ejkernel.kernels._row_norms import pallas
from ejkernel.kernels._row_norms.plan import Formula

from .operation import RESIDUALS, RmsNormCall


class Pallas(pallas.Pallas[RmsNormCall]):
    """The implementation for TPUs."""

    residuals = RESIDUALS
    features = frozenset(("weight=None", "weight_offset", "residual"))

    def formula(self, call: RmsNormCall) -> Formula:
        """Return the formula of RMS normalisation for this call."""
        weight = call.weight_offset if call.weight else None
        return Formula(centred=False, eps=call.eps, weight=weight, residual=call.residual)
