# SPDX-License-Identifier: Apache-2.0
"""Launch parameters."""

from __future__ import annotations

import dataclasses

from ejkernel.kernels._options import check_parameters
from ejkernel.ops.utils.messages.names import NamedFields


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MosaicGpuParams(NamedFields):
    """Launch parameters.

    A block of threads has one producer and one consumer warpgroup. The launch is persistent: each block of threads
    takes an equal number of blocks of 64 keys.

    Attributes:
        stages: Pipeline stages, each with the keys and values of 64 tokens.
        query_buffers: Buffers of queries; with 2, those of the next tile are copied early.
    """

    stages: int = 3
    query_buffers: int = 2

    def __post_init__(self) -> None:
        check_parameters(self, stages=range(2, 13), query_buffers=(1, 2))
