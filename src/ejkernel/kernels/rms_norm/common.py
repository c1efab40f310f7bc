# SPDX-License-Identifier: Apache-2.0
"""What every implementation of RMS normalisation knows of a call."""

from __future__ import annotations

import dataclasses

from ejkernel.ops.implementation import OperationCall


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RmsNormCall(OperationCall):
    """A call without its arrays.

    Attributes:
        rows: How many rows are normalised, those of enclosing `vmap`s left out.
        dim: How long they are.
        dtype: Name of their dtype.
        eps: Added to the mean of squares.
    """

    rows: int
    dim: int
    dtype: str
    eps: float

    @property
    def all_rows(self) -> int:
        """How many rows are normalised at once."""
        return self.rows * self.examples
