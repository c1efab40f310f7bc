# SPDX-License-Identifier: Apache-2.0
"""The description of a call that quantises blocks."""

from __future__ import annotations

import dataclasses

from ejkernel.ops.implementation import OperationCall

BLOCK = 128
"""Elements of a row that share a scale: a step of the products' kernels."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeCall(OperationCall):
    """A call without its array.

    Attributes:
        rows, columns: Of the matrix; rows are those of all leading axes.
        dtype: Name of the dtype of the matrix.
        values: Name of the dtype of the results.
        transposed: Whether the transpose is quantised, too.
        groups: Number of groups of rows; each begins a block of the transpose; `None` without groups.
        square: Whether the transpose has scales of 128x128 blocks; else of 1x128 blocks.
    """

    rows: int
    columns: int
    dtype: str
    values: str
    transposed: bool = False
    groups: int | None = None
    square: bool = False

    @property
    def features(self) -> frozenset[str]:
        """See `OperationCall`."""
        return frozenset() if self.groups is None else frozenset({"group_sizes"})
