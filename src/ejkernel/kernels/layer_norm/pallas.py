# SPDX-License-Identifier: Apache-2.0
"""Layer normalisation by ejkernel's kernels for TPUs."""

from __future__ import annotations

from ejkernel.kernels._row_norms import pallas
from ejkernel.kernels._row_norms.plan import Formula

from .operation import RESIDUALS, LayerNormCall


class Pallas(pallas.Pallas[LayerNormCall]):
    """The implementation for TPUs."""

    residuals = RESIDUALS
    features = frozenset(("residual",))

    def formula(self, call: LayerNormCall) -> Formula:
        """Return the formula of layer normalisation for this call."""
        return Formula(centred=True, eps=call.eps, bias=True, residual=call.residual)
