# SPDX-License-Identifier: Apache-2.0
"""Launch parameters of the two kernels."""

from __future__ import annotations

import dataclasses

from ejkernel.ops.errors import ConfigError

_BLOCKS = (64, 128, 192, 256)
_LONG_BLOCKS = (128, 256)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProductParams:
    """How the product is laid out on the chip; none of it changes what is computed.

    A block of threads is one warpgroup that copies and two that compute, which share a tile of the result: half of its
    rows each. There are as many blocks as multiprocessors, and each takes tile after tile.

    Attributes:
        block_m: Rows of a tile, 128 or 256.
        block_n: Columns of a tile: 64, 128, 192 or 256; with a gate, which has sums of its own, 64 or 128.
        stages: How many steps' operands, 64 of `k` each, are held at once.
        panel: Tiles are taken in panels of so many rows of tiles, inside which rows come before columns.
        out_slots: How many pieces of a result are on their way to memory at once.
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
    """How the weights' gradient is laid out on the chip; none of it changes what is computed.

    Blocks of threads and their tiles are as in `ProductParams`; a tile is of one group's result, and a step is 64 of
    the group's rows.

    Attributes:
        block_k: Rows of a tile of the result, 128 or 256.
        block_n: Columns of a tile: 64, 128, 192 or 256.
        stages: How many steps' operands are held at once.
        panel: As in `ProductParams`.
        out_slots: Likewise.
        largest_first: Whether groups with more rows come first.
        snake: Whether every other round of tiles is dealt to the blocks backwards.
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
