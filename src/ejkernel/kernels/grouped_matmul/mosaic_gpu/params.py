# SPDX-License-Identifier: Apache-2.0
"""Launch parameters of the two kernels."""

from __future__ import annotations

import dataclasses

from ejkernel.ops.errors import ConfigError

_BLOCKS = (64, 128, 192, 256)
_LONG_BLOCKS = (128, 256)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProductParams:
    """Launch parameters of the product; they do not change the result.

    A block of threads has one producer and two consumer warpgroups; each consumer computes half of the rows of a tile.
    The launch is persistent: one block per multiprocessor takes tile after tile.

    Attributes:
        block_m: Rows of a tile, 128 or 256.
        block_n: Columns of a tile: 64, 128, 192 or 256; 64 or 128 with a gate, which needs a second accumulator.
        stages: Pipeline stages, each with 64 of `k`.
        panel: Rows of tiles in a panel of the tile order; inside a panel rows vary fastest.
        out_slots: Staging buffers of the epilogue: pieces of the result that are copied at once.
    """

    block_m: int = 128
    block_n: int = 256
    stages: int = 4
    panel: int = 16
    out_slots: int = 2

    def __post_init__(self) -> None:
        _check_common(self)
        _check("block_m", self.block_m, _LONG_BLOCKS, "128 or 256")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WgradParams:
    """Launch parameters of the weight gradient; they do not change the result.

    Blocks of threads and tiles are as in `ProductParams`; a tile belongs to one group's result, and a step takes 64 of
    the group's rows.

    Attributes:
        block_k: Rows of a tile of the result, 128 or 256.
        block_n: Columns of a tile: 64, 128, 192 or 256.
        stages: Pipeline stages, each with 64 rows.
        panel, out_slots: As in `ProductParams`.
        largest_first: Whether groups with more rows come first.
        snake: Whether every other round of tiles is dealt to the blocks in reverse.
    """

    block_k: int = 128
    block_n: int = 256
    stages: int = 4
    panel: int = 16
    out_slots: int = 2
    largest_first: bool = False
    snake: bool = False

    def __post_init__(self) -> None:
        _check_common(self)
        _check("block_k", self.block_k, _LONG_BLOCKS, "128 or 256")
        for name in ("largest_first", "snake"):
            if type(getattr(self, name)) is not bool:
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}.")


def _check_common(params: ProductParams | WgradParams) -> None:
    _check("block_n", params.block_n, _BLOCKS, "64, 128, 192 or 256")
    _check("stages", params.stages, range(2, 9), "from 2 to 8")
    _check("panel", params.panel, range(1, 257), "from 1 to 256")
    _check("out_slots", params.out_slots, range(1, 5), "from 1 to 4")


def _check(name: str, value: object, allowed: range | tuple[int, ...], wanted: str) -> None:
    if type(value) is not int or value not in allowed:
        raise ConfigError(f"{name} must be {wanted}, got {value!r}.")
