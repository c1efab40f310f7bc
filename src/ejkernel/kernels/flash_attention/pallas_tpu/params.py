# SPDX-License-Identifier: Apache-2.0
"""Launch parameters of the forward and backward kernels."""

from __future__ import annotations

import dataclasses

from ejkernel.kernels._options import check_parameters
from ejkernel.kernels.flash_attention._tpu import check_blocks
from ejkernel.ops.errors import ConfigError
from ejkernel.ops.utils.messages.names import NamedFields

_UNROLLED = range(1, 9)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ForwardParams(NamedFields):
    """Launch parameters of the forward; blocks are multiples of 128, and shorter sequences have shorter blocks.

    A grid step owns `block_q` queries of a head and loops over the keys in vector memory, `chunk` at a time.

    Attributes:
        block_q: Queries per grid step.
        chunk: Keys per step of the loop.
        unroll: Chunks in one basic block; the compiler overlaps instructions only inside of one.
        rows: Queries per tile of a chunk; tiles are independent, so that one's softmax overlaps another's products.
        strip: Queries per tile at the edges of the visible keys, with tiles that end at the edge.
        resident: Keys in vector memory at once; `None`: all keys of a head.
        sum_by_product: Whether a column of ones in the value gives the sum of the weights. It costs nothing where the
            matrix unit is wider than the value.
    """

    block_q: int = 1024
    chunk: int = 1024
    unroll: int = 2
    rows: int = 1024
    strip: int = 512
    resident: int | None = None
    sum_by_product: bool = False

    def __post_init__(self) -> None:
        check_blocks(self, "block_q", "chunk", "rows", "strip", optional=("resident",))
        check_parameters(self, unroll=_UNROLLED)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BackwardParams(NamedFields):
    """Launch parameters of the backward; blocks are multiples of 128, and shorter sequences have shorter blocks.

    A grid step of the first kernel owns `block_kv` keys of a head and loops over the queries in vector memory. In the
    fused form it also computes the gradient of the queries; otherwise a second kernel, with grid steps that own
    queries, computes the logits again.

    Attributes:
        block_kv: Keys per grid step.
        chunk: Queries per step of the loop.
        unroll: Chunks in one basic block.
        strip: Keys per tile at the edges of the visible queries.
        resident: Queries in vector memory at once; `None`: all queries of a head. The fused form needs all.
        transpose: Whether the fused form adds up the query's gradient transposed, which fills a matrix unit that is
            wider than the head.
        query: The parameters of the second kernel; `None` for the fused form. It adds up no weights:
            `sum_by_product` has no effect.
    """

    block_kv: int = 1024
    chunk: int = 1024
    unroll: int = 1
    strip: int = 512
    resident: int | None = None
    transpose: bool = False
    query: ForwardParams | None = None

    def __post_init__(self) -> None:
        check_blocks(self, "block_kv", "chunk", "strip", optional=("resident",))
        check_parameters(self, unroll=_UNROLLED)
        if self.query is not None and not isinstance(self.query, ForwardParams):
            raise ConfigError(f"query must be ForwardParams or None, got {self.query!r}.")
        if self.query is None and self.resident is not None:
            raise ConfigError(f"resident must be None in the fused form, got {self.resident}; pass query, too.")
        if self.query is not None and self.transpose:
            raise ConfigError("transpose must be False where a second kernel computes the query's gradient.")
