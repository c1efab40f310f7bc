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
        weight: Whether there is one.
        weight_offset: Added to the weight.
    """

    rows: int
    dim: int
    dtype: str
    eps: float
    weight: bool = True
    weight_offset: float = 0.0

    @property
    def features(self) -> frozenset[str]:
        """See `OperationCall`."""
        asked = {"weight=None": not self.weight, "weight_offset": self.weight_offset != 0}
        return frozenset(name for name, is_asked in asked.items() if is_asked)

    @property
    def all_rows(self) -> int:
        """How many rows are normalised at once."""
        return self.rows * self.examples
