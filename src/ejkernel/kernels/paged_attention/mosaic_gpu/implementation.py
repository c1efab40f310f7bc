# SPDX-License-Identifier: Apache-2.0
"""The implementation `mosaic_gpu`."""

from __future__ import annotations

from typing import Any

import jax

from ejkernel.kernels._varying import one_by_one
from ejkernel.kernels.paged_attention.common import Operands, PagedCall, planned
from ejkernel.kernels.paged_attention.plan import PlanArrays
from ejkernel.ops.implementation import Implementation

from . import launch, support
from .params import MosaicGpuParams


class MosaicGpu(Implementation[PagedCall]):
    """Paged attention on Hopper GPUs."""

    name = "mosaic_gpu"
    params = MosaicGpuParams
    interpret: Any = None  # `InterpretGPUParams` in tests

    def unsupported(self, call: PagedCall) -> str | None:
        """Return why the kernel does not run the call; `None` if it does."""
        return support.unsupported_reason(call)

    def params_fault(self, call: PagedCall, params: MosaicGpuParams) -> str | None:
        """Return why the call cannot run with these parameters; `None` if it can."""
        return support.params_fault(call, params)

    def heuristic(self, call: PagedCall) -> MosaicGpuParams:
        """Return as many stages as gain something and let two blocks of threads share a multiprocessor."""
        return support.heuristic(call)

    def space(self, call: PagedCall) -> list[MosaicGpuParams]:
        """Return the numbers of stages that fit in shared memory."""
        return support.space(call)

    def forward(self, call: PagedCall, /, *args: Any, params: MosaicGpuParams) -> tuple[Any, Any]:
        """Return the output, and the log-sum-exp if the call returns it."""
        operands, plan = planned(call, args)
        leaves, structure = jax.tree.flatten((operands._replace(plan=None), plan))

        def run(*leaves: jax.Array) -> Any:
            own: tuple[Operands, PlanArrays] = jax.tree.unflatten(structure, leaves)
            with jax.enable_x64(False):  # the kernel counts in int32
                out, lse = launch.attention(call, own, params, self.interpret)
            return (out, lse) if call.return_lse else out

        return one_by_one(run, *leaves), ()
