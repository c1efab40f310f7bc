# SPDX-License-Identifier: Apache-2.0
"""What the two kernels share: their memory, the order of tiles, the ring of stages, and a result's way to memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from .plan import REGISTERS, ROW_BYTES, STEP, WARPGROUPS, Plan

plgpu: Any = mosaic_gpu  # its annotations differ between versions, and few of them take a slice of a reference


class Scratch(NamedTuple):
    """Shared memory and barriers of a block of threads.

    Attributes:
        lhs: Stages of the left operand, a part for each warpgroup.
        rhs: Stages of the right operand.
        out: Pieces of the result on their way, some for each warpgroup.
        full: Of each stage: its copies have come.
        free: Of each stage: nobody needs it any more.
        cleared: Foreign rows of a stage have been cleared; only the weights' gradient has it.
    """

    lhs: Any
    rhs: Any
    out: Any
    full: Any
    free: Any
    cleared: Any = None


def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return the type of shared memory in tiles of eight rows, as wide as one swizzle, which tensor cores read."""
    width = ROW_BYTES // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(ROW_BYTES))
    return plgpu.SMEM(shape, jnp.dtype(dtype), transforms=transforms)


def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return the type of shared memory that is swizzled alone.

    Where the last axis is one swizzle it has the same bytes at the same places as `tiled`, and copies between it and
    global memory may begin at any row there, where those of tiles begin at multiples of eight.
    """
    return plgpu.SMEM(shape, jnp.dtype(dtype), transforms=(plgpu.SwizzleTransform(ROW_BYTES),))


def ring(plan: Plan) -> tuple[Any, Any]:
    """Return the types of the barriers of the stages: full, and free."""
    # A copy arrives by itself: one of each warpgroup's rows, and one of each product's matrix.
    full = plgpu.Barrier(num_arrivals=WARPGROUPS + plan.products, num_barriers=plan.stages)
    return full, plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=plan.stages)


def place(number: Any, row_tiles: Any, plan: Plan) -> tuple[Any, Any]:
    """Return row and column of the tile of that number, of a group with so many rows of tiles."""
    height = plan.panel * plan.column_tiles
    panel = lax.div(number, height)
    rest = number - panel * height
    # The last panel may be lower.
    rows = jnp.minimum(plan.panel, row_tiles - panel * plan.panel)
    column = lax.div(rest, rows)
    return panel * plan.panel + (rest - column * rows), column


def when_free(scratch: Scratch, step: Any, plan: Plan) -> Any:
    """Wait until the stage of a step may be filled, and return it."""
    stage = lax.rem(step, plan.stages)

    @pl.when(step >= plan.stages)
    def _wait() -> None:
        plgpu.barrier_wait(scratch.free.at[stage])

    return stage


def share_out(
    plan: Plan,
    scratch: Scratch,
    each_tile: Callable[..., Any],
    *,
    copy: Callable[..., Any],
    compute: Callable[..., Any],
) -> None:
    """Have the last warpgroup copy, and the others compute.

    Args:
        plan: The launch.
        scratch: Memory and barriers.
        each_tile: Calls a `body(tile, step)`, which returns the next step, for each tile of this program.
        copy: That body, of the warpgroup that copies.
        compute: The same, of one that computes, followed by its number.
    """
    warpgroup, (few, many) = lax.axis_index("warpgroup"), REGISTERS

    @pl.when(warpgroup == WARPGROUPS)
    def _copying() -> None:
        plgpu.set_max_registers(few, action="decrease")
        _drain(scratch, each_tile(copy), plan)

    @pl.when(warpgroup < WARPGROUPS)
    def _computing() -> None:
        plgpu.set_max_registers(many, action="increase")
        each_tile(lambda tile, step: compute(tile, step, warpgroup))
        plgpu.wait_smem_to_gmem(0)


def _drain(scratch: Scratch, steps: Any, plan: Plan) -> None:
    """Wait until all stages are free, so that no barrier is left with an arrival that nobody saw."""

    @pl.loop(jnp.maximum(steps - plan.stages, 0), steps)
    def _wait(step: Any) -> None:
        plgpu.barrier_wait(scratch.free.at[lax.rem(step, plan.stages)])


def accumulate(plan: Plan, body: Callable[..., None]) -> list[jax.Array]:
    """Return the sums that `body` leaves in the accumulators that it is given, one a product, which begin at zero."""

    def scoped(*sums: Any) -> list[Any]:
        body(*sums)
        return [of_product[...] for of_product in sums]

    shape = (plan.part_rows, plan.tile_columns)
    found: list[jax.Array] = pl.run_scoped(scoped, *[plgpu.ACC(shape, jnp.float32) for _ in range(plan.products)])
    return found


def launch(
    plan: Plan,
    body: Callable[..., None],
    arrays: tuple[jax.Array, ...],
    out_shape: tuple[int, ...],
    *,
    name: str,
    interpret: Any,
    results: int = 1,
) -> list[jax.Array]:
    """Run a kernel with one warpgroup that copies and two that compute; its last references are those of its results.

    The semantics are those of lanes: those of warpgroups take no rows that are known only as the program runs.
    """

    def kernel_body(*refs: Any) -> None:
        body(*refs)

    kernel_body.__name__ = name
    kernel = plgpu.kernel(
        kernel_body,
        out_type=[jax.ShapeDtypeStruct(out_shape, jnp.dtype(plan.out_dtype))] * results,
        grid=(plan.programs,),
        grid_names=("program",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        # What a thread stores in shared memory no other loads, so that Pallas need not put barriers around it.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )
    found: list[jax.Array] = kernel(*arrays)
    return found


def operand_shape(plan: Plan) -> tuple[int, int, int, int]:
    """Return the shape of the product's left stages."""
    return plan.stages, WARPGROUPS, plan.part_rows, STEP
