# SPDX-License-Identifier: Apache-2.0
"""The static description of one launch."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from ejkernel.kernels._row_norms.plan import RowNormParams, RowNormPlan
from ejkernel.kernels.quantized_matmul.quantizing.common import BLOCK

from .operation import QuantizedRmsNormCall


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedRowPlan(RowNormPlan):
    """The static description of one launch.

    Attributes:
        values: Name of the dtype of the result.
    """

    values: str

    @property
    def minor(self) -> int:
        """See `RowNormPlan`; a block of the result."""
        return BLOCK

    def shared_bytes(self) -> int:
        """See `RowNormPlan`."""
        wide = (self.sources + self.formula.residual) * jnp.dtype(self.dtype).itemsize
        return self.params.stages * self.params.block_rows * self.dim * (wide + 1) + 1024


def row_plan(call: QuantizedRmsNormCall, params: RowNormParams, rows: int) -> QuantizedRowPlan:
    """Return the plan of a launch on so many rows."""
    return QuantizedRowPlan(
        rows=rows,
        dim=call.dim,
        dtype=call.dtype,
        formula=call.formula,
        backward=False,
        params=params,
        values=call.values,
    )
