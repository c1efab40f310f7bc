# SPDX-License-Identifier: Apache-2.0
"""A ring of tiles: the tile scheduler runs in the producer, and the consumers read its tiles from shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from .launch import plgpu
from .pipeline import Pipeline, producer_tail

_SLOTS = 4


class TileRing(NamedTuple):
    """Tiles in shared memory, each as some int32 numbers: types before `run_scoped`, references inside it.

    Consumers need no time between two tiles for the tile scheduler: the producer, which is ahead of them, runs it.

    Attributes:
        numbers: `[slots, numbers of a tile]`.
        pipeline: The barriers of the slots.
    """

    numbers: Any
    pipeline: Pipeline

    @classmethod
    def types(cls, size: int, *, consumers: int) -> TileRing:
        """Return the types for tiles of `size` numbers."""
        return cls(plgpu.SMEM((_SLOTS, size), jnp.int32), Pipeline.types(_SLOTS, consumers=consumers))

    def publish(self, index: Any, tile: Sequence[Any]) -> None:
        """Store tile number `index` of this block of threads for the consumers; the producer calls it."""
        slot = self.pipeline.producer_acquire(index)
        for place, number in enumerate(tile):
            self.numbers[slot, place] = number
        plgpu.barrier_arrive(self.pipeline.full.at[slot])

    def read(self, index: Any) -> list[Any]:
        """Return the numbers of tile `index`; each consumer calls it."""
        slot = self.pipeline.stage(index)
        self.pipeline.consumer_wait(slot)
        tile = [self.numbers[slot, place] for place in range(self.numbers.shape[1])]
        self.pipeline.consumer_release(slot)
        return tile

    def tail(self, count: Any) -> None:
        """Wait until consumers have read the last of `count` tiles; the producer calls it last."""
        producer_tail(count, self.pipeline)
