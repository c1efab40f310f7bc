# SPDX-License-Identifier: Apache-2.0
"""The order of tiles and the mainloop of our matrix-product kernels: one producer and two consumer warpgroups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


def multiply_stages(
    pipeline: Pipeline, step: Any, steps: int, multiply: Callable[[Any], None], *, products: int = 1
) -> None:
    """Run `multiply(stage)`, which starts `products` WGMMAs, on `steps` stages from `step` on, and release them."""

    def wait_and_multiply(stage: Any) -> None:
        pipeline.consumer_wait(stage)
        multiply(stage)

    # A stage is released one step late, so that the tensor core always has the next products queued.
    wait_and_multiply(pipeline.stage(step))

    @pl.loop(1, steps)
    def _step(i: Any) -> None:
        wait_and_multiply(pipeline.stage(step + i))
        plgpu.wgmma_wait(products)
        pipeline.consumer_release(pipeline.stage(step + i - 1))

    plgpu.wgmma_wait(0)
    pipeline.consumer_release(pipeline.stage(step + steps - 1))
