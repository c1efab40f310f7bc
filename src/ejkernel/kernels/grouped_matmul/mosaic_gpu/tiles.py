# SPDX-License-Identifier: Apache-2.0
"""Shared memory, tile order and launch of the grouped product and of the weight gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels._hopper import products
from ejkernel.kernels._hopper.launch import launch
from ejkernel.kernels._hopper.pipeline import Pipeline
from ejkernel.kernels._hopper.tile_shapes import WARPGROUPS

from .plan import GroupedPlan


class GroupedMemory(NamedTuple):
    """Shared memory and barriers of one block of threads: types before `run_scoped`, references inside it.

    Attributes:
        lhs: Pipeline stages of the left operand, one part per consumer warpgroup.
        rhs: Pipeline stages of the right operand.
        out: Staging buffers of the epilogue, per consumer warpgroup.
        pipeline: The barriers of the stages.
        cleared: Both consumers have zeroed rows of other groups in a stage; weight gradient only.
        tiles: The tiles of the tile scheduler; product only.
    """

    lhs: Any
    rhs: Any
    out: Any
    pipeline: Pipeline
    cleared: Any = None
    tiles: Any = None


def lhs_shape(plan: GroupedPlan) -> tuple[int, int, int, int]:
    """Return the shape of the pipeline stages of the product's left operand."""
    return plan.stages, WARPGROUPS, plan.part_rows, plan.step_size


def pipeline_types(plan: GroupedPlan) -> Pipeline:
    """Return the types of the pipeline's barriers."""
    return Pipeline.types(plan.stages, consumers=WARPGROUPS, copies=plan.copies, cluster=plan.cluster)


def tile_position(number: Any, row_tiles: Any, plan: GroupedPlan) -> tuple[Any, Any]:
    """Return row and column, in tiles, of a group's tile `number`; the group has `row_tiles` rows of tiles.

    In clusters the number is that of a cluster, and the row that of its first tile.
    """
    row, column = products.tile_position(number, row_tiles, plan.column_tiles, max(1, plan.panel // plan.cluster))
    return row * plan.cluster, column


def accumulate(plan: GroupedPlan, mainloop: Callable[..., None]) -> list[jax.Array]:
    """Run `mainloop` on one zeroed float32 accumulator per product, and return their values."""
    return products.accumulate((plan.part_rows, plan.tile_columns), plan.products, mainloop)


def run_kernel(
    kernel: Any, arrays: tuple[jax.Array, ...], out_shape: tuple[int, ...], *, name: str, results: int = 1
) -> list[jax.Array]:
    """Launch a kernel with one producer and two consumer warpgroups, and return its results."""
    return launch(
        kernel.run,
        arrays,
        [jax.ShapeDtypeStruct(out_shape, jnp.dtype(kernel.plan.out_dtype))] * results,
        name=name,
        programs=kernel.plan.programs,
        memory=kernel.memory_types(),
        consumers=WARPGROUPS,
        cluster=kernel.plan.cluster,
        lane_semantics=True,
        interpret=kernel.backend.interpret,
    )
