# SPDX-License-Identifier: Apache-2.0
"""Layer normalisation by ejkernel's kernel for Hopper GPUs."""

from __future__ import annotations

from ejkernel.kernels._row_norms import implementation
from ejkernel.kernels._row_norms.plan import Formula

from .operation import RESIDUALS, LayerNormCall


class MosaicGpu(implementation.MosaicGpu[LayerNormCall]):
    """The implementation for Hopper GPUs."""

    residuals = RESIDUALS
    features = frozenset(("residual",))

    def formula(self, call: LayerNormCall) -> Formula:
        """Return the formula of layer normalisation for this call."""
        return Formula(centred=True, eps=call.eps, bias=True, residual=call.residual)
