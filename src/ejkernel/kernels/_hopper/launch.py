# SPDX-License-Identifier: Apache-2.0
"""Launches of kernels with one producer warpgroup and several consumer warpgroups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.experimental import pallas as pl

from .device import Registers
from .memory import plgpu

WARPGROUP = "warpgroup"  # the axis of the warpgroups of a block of threads; the last warpgroup is the producer
PROGRAM = "program"  # the axis of the blocks of threads


def launch(
    body: Callable[..., None],
    out_type: Any,
    *,
    name: str,
    programs: int,
    consumers: int = 0,
    lane_semantics: bool = False,
    interpret: Any = None,
) -> Callable[..., Any]:
    """Return a function of the arrays that runs `body` on references to them and to the results.

    Args:
        body: The kernel.
        out_type: Shapes and dtypes of the results.
        name: The kernel's name in profiles.
        programs: How many blocks of threads are launched.
        consumers: Consumer warpgroups, beside one producer; 0: a block is a single warpgroup.
        lane_semantics: Lower for lanes rather than warpgroups: the warpgroup semantics refuse dynamic row offsets.
        interpret: `InterpretGPUParams` to simulate the kernel on a CPU; `None` runs it on a GPU.
    """
    threads = {"num_threads": consumers + 1, "thread_name": WARPGROUP} if consumers else {}
    semantics = {"lowering_semantics": plgpu.LoweringSemantics.Lane} if lane_semantics else {}
    run: Callable[..., Any] = plgpu.kernel(
        body,
        out_type=out_type,
        grid=(programs,),
        grid_names=(PROGRAM,),
        kernel_name=name,
        # Without this, Pallas puts a barrier around every access to shared memory. Our kernels place the barriers that
        # they need.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, **semantics),
        interpret=interpret,
        **threads,
    )
    return run


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
