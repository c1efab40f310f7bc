# SPDX-License-Identifier: Apache-2.0
"""The order of tiles and the mainloop of our matrix-product kernels: one producer and two consumer warpgroups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .launch import plgpu
from .pipeline import Pipeline


def tile_position(number: Any, row_tiles: Any, column_tiles: int, panel: int) -> tuple[Any, Any]:
    """Return row and column, in tiles, of tile `number` of a result with `row_tiles` rows of tiles.

    Tiles are ordered in panels of `panel` rows of tiles, which share operands in the L2 cache.
    """
    height = panel * column_tiles
    number_of_panel = lax.div(number, height)
    rest = number - number_of_panel * height
    # The last panel may have fewer rows.
    rows = jnp.minimum(panel, row_tiles - number_of_panel * panel)
    column = lax.div(rest, rows)
    return number_of_panel * panel + (rest - column * rows), column


def accumulate(
    shape: tuple[int, int], products: int, mainloop: Callable[..., None], *, dtype: Any = jnp.float32
) -> list[jax.Array]:
    """Run `mainloop` on one zeroed accumulator per product, and return their values."""

    def scoped(*accumulators: Any) -> list[Any]:
        mainloop(*accumulators)
        return [accumulator[...] for accumulator in accumulators]

    found: list[jax.Array] = pl.run_scoped(scoped, *[plgpu.ACC(shape, dtype) for _ in range(products)])
    return found


class Lag(NamedTuple):
    """A lag between two consumer warpgroups, which overlaps the epilogue of each with the products of the other.

    Warpgroup 1 runs the last steps of a tile once warpgroup 0 has started all its products. The tensor core is then
    busy while warpgroup 0 begins its epilogue, and again while warpgroup 1 ends its own.

    Attributes:
        barrier: A barrier; `Lag.barrier_type()` before `run_scoped`.
        warpgroup: The number of this warpgroup.
        steps: The number of these last steps, less than the pipeline's stages.
    """

    barrier: Any
    warpgroup: Any
    steps: int

    @staticmethod
    def barrier_type() -> Any:
        """Return the type of the barrier."""
        return plgpu.Barrier(num_arrivals=1)

    def wait_if(self, condition: Any) -> None:
        """Wait in warpgroup 1, if the condition holds, until warpgroup 0 has started all its products."""
        pl.when((self.warpgroup == 1) & condition)(lambda: plgpu.barrier_wait(self.barrier))

    def end(self) -> None:
        """Tell warpgroup 1 that warpgroup 0 has started all its products."""
        pl.when(self.warpgroup == 0)(lambda: plgpu.barrier_arrive(self.barrier))


def multiply_stages(
    pipeline: Pipeline,
    step: Any,
    steps: int,
    multiply: Callable[[Any], None],
    *,
    products: int = 1,
    lag: Lag | None = None,
) -> None:
    """Run `multiply(stage)`, which starts `products` WGMMAs, on `steps` stages from `step` on, and release them."""
    if steps < pipeline.stages:  # warpgroup 0 could be two tiles ahead, and no barrier counts two arrivals
        lag = None

    def wait_and_multiply(stage: Any) -> None:
        pipeline.consumer_wait(stage)
        multiply(stage)

    # A stage is released one step late, so that the tensor core always has the next products queued.
    wait_and_multiply(pipeline.stage(step))

    @pl.loop(1, steps)
    def _step(i: Any) -> None:
        if lag is not None:
            lag.wait_if(i == steps - lag.steps)
        wait_and_multiply(pipeline.stage(step + i))
        plgpu.wgmma_wait(products)
        pipeline.consumer_release(pipeline.stage(step + i - 1))

    if lag is not None:
        lag.end()
    plgpu.wgmma_wait(0)
    pipeline.consumer_release(pipeline.stage(step + steps - 1))
