# SPDX-License-Identifier: Apache-2.0
"""How scales are sharded: like their operands, by whole blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ejkernel.ops.utils.values.signature import is_known

from .quantized import Block, scale_shape


class ScaleAxes:
    """The axes of scales in a sharding rule.

    An axis is sharded by whole blocks, or so that each shard lies within one. A shorter last block keeps its axis
    whole.

    Attributes:
        multiples: Axes whose shards must be whole blocks, because a result has their scales, with the size of a block;
            and axes that a shorter last block keeps whole, with their own size.
    """

    def __init__(self) -> None:
        self._whole: set[str] = set()
        self.multiples: dict[str, int] = {}
        self._leaders: dict[str, str] = {}

    def of(self, name: str, array: Any, scale: Any, block: Block, axes: Sequence[str]) -> str:
        """Return the axes of the scales of the operand `name`, which has these axes."""
        parts = zip(array.shape, scale.shape, block, axes, strict=True)
        return " ".join(self._axis(name, *part) for part in parts)

    def of_result(self, name: str, sizes: Sequence[int], block: Block, axes: Sequence[str]) -> str:
        """Return the axes of the scales of a result, which has these sizes and axes."""
        parts = list(zip(sizes, scale_shape(sizes, block), block, axes, strict=True))
        for size, _, own, axis in parts:
            if own not in (None, 1):
                self._must_divide(axis, own)
                self._whole |= set() if is_known(size) else {axis}
        return " ".join(self._axis(name, *part) for part in parts)

    def _axis(self, name: str, size: int, entries: int, block: int | None, axis: str) -> str:
        if block is None or not is_known(size, entries):
            return "_"
        if block == 1:
            return axis
        if size % block:
            self._must_divide(axis, size)
            return "_"
        self._leaders[f"{name}_{axis}"] = axis
        return f"{name}_{axis}"

    def _must_divide(self, axis: str, multiple: int) -> None:
        self.multiples[axis] = max(multiple, self.multiples.get(axis, 1))

    def split(self, axes: Sequence[str]) -> list[str]:
        """Return those of the axes that may be split."""
        return [axis for axis in axes if axis not in self._whole]

    @property
    def follows(self) -> dict[str, str]:
        """The axes of blocks, each with the operand's axis that it follows."""
        return {name: leader for name, leader in self._leaders.items() if leader not in self._whole}
