# SPDX-License-Identifier: Apache-2.0
"""Launch parameters."""

from __future__ import annotations

import dataclasses

from ejkernel.kernels._options import check_parameters
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.utils.messages.names import NamedFields


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MosaicGpuParams(NamedFields):
    """Launch parameters of a forward or backward.

    A block of threads has one producer and two consumer warpgroups; a tile has 128 rows, half of them per consumer. The
    launch is persistent: one block per multiprocessor takes tile after tile.

    Attributes:
        form: How gradients are computed. `rows`: chunks of rows with complete logits. `linear_cross_entropy_gradients`
            then runs three products. `vocabulary`: chunks of columns, whose logits are computed again once the
            log-sum-exp is known: four products, and little memory. Statistics alone need no chunks.
        chunk: Rows per chunk, a multiple of 128, or columns per chunk, a multiple of 256; `None` takes all at once.
        accumulation_dtype: Dtype of the sum of the weight's gradient over chunks of rows; `None`: float32. The
            argument `accumulation_dtype` of the call takes precedence.
        block_n: Columns of a tile, 128 or 256.
        stages: Pipeline stages, each with 64 of `d`.
        panel: Rows of tiles in a panel of the tile order; inside a panel rows vary fastest.
        out_slots: Staging buffers of the epilogue: pieces of 64 columns that are copied at once.
        lag: Steps by which the second consumer ends its products after the first one, whose epilogue then overlaps with
            them; less than `stages`. 0: both end them together.
        cluster: Blocks of threads in a cluster, which share copies of the weight: 1 or 2.
    """

    form: str = "rows"
    chunk: int | None = None
    accumulation_dtype: str | None = None
    block_n: int = 256
    stages: int = 4
    panel: int = 16
    out_slots: int = 2
    lag: int = 0
    cluster: int = 1

    def __post_init__(self) -> None:
        check_parameters(
            self,
            form=("rows", "vocabulary"),
            accumulation_dtype=("float32", "bfloat16"),
            block_n=(128, 256),
            stages=range(2, 9),
            panel=range(1, 257),
            out_slots=(1, 2, 4),
            lag=range(8),
            cluster=(1, 2),
        )
        multiple = 128 if self.form == "rows" else 256
        if self.chunk is not None and (type(self.chunk) is not int or self.chunk < 1 or self.chunk % multiple):
            raise ConfigError(f"chunk must be a positive multiple of {multiple} or None, got {self.chunk!r}.")
