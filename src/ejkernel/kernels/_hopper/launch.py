# SPDX-License-Identifier: Apache-2.0
"""Launches of kernels with one producer warpgroup and several consumer warpgroups, and their types of shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from .device import Registers

plgpu: Any = mosaic_gpu  # its annotations differ between versions, and few of them accept a slice of a reference

SWIZZLE = 128  # bytes, the widest
WARPGROUP = "warpgroup"  # the axis of the warpgroups of a block of threads; the last warpgroup is the producer
CLUSTER = "cluster"  # the axis of the blocks of threads in a cluster
PROGRAM = "program"  # the axis of the blocks of threads, or of clusters of them

Tree = TypeVar("Tree")


def launch(
    body: Callable[[Any, Any, Any], None],
    arrays: Any,
    out_type: Sequence[Any],
    *,
    name: str,
    programs: int,
    memory: Any = (),
    consumers: int = 0,
    cluster: int = 1,
    lane_semantics: bool = False,
    reduces_rows_only: bool = False,
    interpret: Any = None,
) -> list[jax.Array]:
    """Run `body(arrays, results, memory)` on references, and return the results.

    Args:
        body: The kernel.
        arrays: A tree of arrays; `body` gets the same tree of references.
        out_type: Shapes and dtypes of the results.
        name: The kernel's name in profiles.
        programs: How many blocks of threads, or clusters of them, are launched.
        memory: A tree of types of shared memory and barriers.
        consumers: Consumer warpgroups, beside one producer; 0: a block is a single warpgroup.
        cluster: Blocks of threads in a cluster, which can share copies.
        lane_semantics: Lower for lanes rather than warpgroups: the warpgroup semantics refuse dynamic row offsets.
        reduces_rows_only: Whether all reductions are over the columns of a row, within one warp. Others need shared
            memory, for which Pallas reserves 2 KiB.
        interpret: `InterpretGPUParams` to simulate the kernel on a CPU; `None` runs it on a GPU.
    """
    leaves, structure = jax.tree.flatten(arrays)
    threads: dict[str, Any] = {"num_threads": consumers + 1, "thread_name": WARPGROUP} if consumers else {}
    if cluster > 1:
        threads |= {"cluster": (cluster,), "cluster_names": (CLUSTER,)}
    options: dict[str, Any] = {"lowering_semantics": plgpu.LoweringSemantics.Lane} if lane_semantics else {}
    if reduces_rows_only:
        options["reduction_scratch_bytes"] = 0

    def kernel(*refs: Any) -> None:
        given, results = jax.tree.unflatten(structure, refs[: len(leaves)]), refs[len(leaves) :]
        axes = WARPGROUP if consumers else ()
        pl.run_scoped(lambda memory: body(given, results, memory), memory, collective_axes=axes)

    run: Callable[..., list[jax.Array]] = plgpu.kernel(
        kernel,
        out_type=list(out_type),
        grid=(programs,),
        grid_names=(PROGRAM,),
        kernel_name=name,
        # Without this, Pallas puts a barrier around every access to shared memory. Our kernels place the barriers that
        # they need.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, **options),
        interpret=interpret,
        **threads,
    )
    return run(*leaves)


def unsliced(arrays: Tree) -> Tree:
    """Return the same arrays, whose slices XLA leaves outside of kernels; for kernels that update references.

    With JAX 0.11.2, XLA moves a slice of an operand or a result into the call of a kernel (`dynamic_slice_fusion`), and
    forgets that the kernel updates another operand in place: under `lax.map`, sums began with arbitrary numbers.
    """
    whole: Tree = jax.lax.optimization_barrier(arrays)
    return whole


def dispatch_warpgroup(
    warpgroup: Any,
    consumers: int,
    registers: Registers | None,
    *,
    producer: Callable[[], None],
    consumer: Callable[[Any], None],
) -> None:
    """Dispatch this warpgroup to its producer or consumer role.

    Args:
        warpgroup: The number of this warpgroup, `lax.axis_index(WARPGROUP)`.
        consumers: How many consumer warpgroups there are.
        registers: Registers per thread of either role; `None` leaves them as they are.
        producer: Copies from global to shared memory.
        consumer: Computes; its argument is the number of the warpgroup.
    """

    @pl.when(warpgroup == consumers)
    def _producer() -> None:
        if registers is not None:
            plgpu.set_max_registers(registers.producer, action="decrease")
        producer()

    @pl.when(warpgroup < consumers)
    def _consumer() -> None:
        if registers is not None:
            plgpu.set_max_registers(registers.consumer, action="increase")
        consumer(warpgroup)


def tiled(shape: tuple[int, ...], dtype: Any, swizzle: int = SWIZZLE) -> Any:
    """Return shared memory in tiles of eight rows, one swizzle wide: the layout that WGMMA and TMA take."""
    dtype = jnp.dtype(dtype)
    transforms = (plgpu.TilingTransform((8, swizzle // dtype.itemsize)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def swizzled(shape: tuple[int, ...], dtype: Any, swizzle: int = SWIZZLE) -> Any:
    """Return swizzled shared memory without tiles.

    If the last axis is one swizzle wide, every element has the same address as in `tiled`. TMA copies of this view may
    then start at any row in global memory; copies of tiles must start at multiples of eight.
    """
    return plgpu.SMEM(shape, jnp.dtype(dtype), transforms=(plgpu.SwizzleTransform(swizzle),))
