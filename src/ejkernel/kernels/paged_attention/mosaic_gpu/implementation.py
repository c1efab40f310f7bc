# SPDX-License-Identifier: Apache-2.0
"""The implementation `mosaic_gpu`: supported calls, heuristics and search spaces, from shapes alone."""

from __future__ import annotations

import math
from typing import Any

import jax

from ejkernel.kernels import _hopper as hopper
from ejkernel.kernels._varying import one_by_one
from ejkernel.kernels.paged_attention.common import Operands, PagedCall, planned
from ejkernel.kernels.paged_attention.plan import PlanArrays
from ejkernel.kernels.paged_attention.schedule import BLOCK, MOST_ROWS, tile_sizes
from ejkernel.ops.implementation import Implementation
from ejkernel.ops.utils.values.signature import is_known

from . import latent_plan, launch
from .plan import LaunchPlan, MosaicGpuParams, as_run, is_widened, launch_plan

_HEAD_DIMS = range(16, 257, 16)
_LATENT = MosaicGpuParams(stages=2, query_buffers=1)  # of latent attention: more does not fit in shared memory
_LARGEST = 2**31 - 2**16  # tokens are counted in int32
_LARGEST_COPY = 2**32  # bytes of a 16-bit copy of an 8-bit cache


class MosaicGpu(Implementation[PagedCall]):
    """Paged attention on Hopper GPUs."""

    name = "mosaic_gpu"
    params = MosaicGpuParams
    interpret: Any = None  # `InterpretGPUParams` in tests

    def unsupported(self, call: PagedCall) -> str | None:
        """Return why the kernel does not run `call`, and an alternative; `None` if it does."""
        sizes = (*call.q, *call.pages, *call.table)
        if not is_known(*sizes) or 0 in sizes:
            return "'mosaic_gpu' needs sizes that are known and not 0; use 'xla'."
        return hopper.unavailable(call, "the cache", "'xla'") or _arguments_reason(call)

    def params_fault(self, call: PagedCall, params: MosaicGpuParams) -> str | None:
        """Return why the call cannot run with these parameters; `None` if it can."""
        if call.value_dim is not None and params != _LATENT:
            return (
                f"with value_dim, it runs with stages={_LATENT.stages} and query_buffers={_LATENT.query_buffers} alone."
            )
        needed = _shared_bytes(call, params)
        if needed > hopper.SHARED_MEMORY:
            return f"it needs {needed} bytes of shared memory; a block of threads has at most {hopper.SHARED_MEMORY}."
        return None

    def heuristic(self, call: PagedCall) -> MosaicGpuParams:
        """Return the most stages that save time in decode while two blocks of threads share a multiprocessor.

        If two do not fit, the stages of one are the most that do: its consumer needs most of one.
        """
        if call.value_dim is not None:
            return _LATENT
        decode = tile_sizes(call.q[0], call.table[0], call.q[1], call.pages[2]).short
        fitting = [params for params in _choices() if self.params_fault(call, params) is None]
        for params in fitting:
            plan = launch_plan(call, params, decode)
            if plan.shares == 1 and (plan.stages == 2 or plan.stages * plan.copied_bytes <= _most_in_flight(plan)):
                return params
        return fitting[0]

    def space(self, call: PagedCall) -> list[MosaicGpuParams]:
        """Return the numbers of stages that fit in shared memory."""
        if call.value_dim is not None:
            return [_LATENT]
        found = [params for params in _choices() if self.params_fault(call, params) is None]
        return list(dict.fromkeys((self.heuristic(call), *found)))

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


def _arguments_reason(call: PagedCall) -> str | None:
    pages, page_size = call.pages[:2]
    if call.dtype not in hopper.DTYPES:
        return f"q has dtype {call.dtype}, and 'mosaic_gpu' takes bfloat16 and float16; cast it, or use 'xla'."
    if page_size < 8 or (BLOCK % page_size and page_size % BLOCK):
        return f"'mosaic_gpu' needs pages of 8, 16, 32 or a multiple of 64 tokens, got {page_size}; use 'xla'."
    # All blocks of keys of all items are counted in int32.
    blocks = call.q[0] * call.pages[2] * (-(-call.table[1] * page_size // BLOCK) + 1)
    if max(pages * page_size, blocks) > _LARGEST:
        return f"'mosaic_gpu' counts tokens of the cache and blocks of keys up to {_LARGEST}; use 'xla'."
    copied = 2 * math.prod(as_run(call).pages)
    if copied > _LARGEST_COPY and is_widened(call):
        return (
            f"kv_pages has dtype {call.cache_dtype}, and for more new tokens than sequences, or with value_dim, "
            f"'mosaic_gpu' copies the cache, or the pages of the table, in {call.dtype}: {copied} bytes, and it takes "
            f"up to {_LARGEST_COPY}; make the page table smaller, or use 'xla'."
        )
    return _values_reason(call) if call.value_dim is None else latent_plan.unsupported_reason(call)


def _values_reason(call: PagedCall) -> str | None:
    if call.q[2] not in _HEAD_DIMS:
        return f"'mosaic_gpu' needs a head_dim that is a multiple of 16 up to 256, got {call.q[2]}; use 'xla'."
    if call.group > MOST_ROWS:
        return f"'mosaic_gpu' takes up to {MOST_ROWS} query heads per KV head, got {call.group}; use 'xla'."
    return None


def _shared_bytes(call: PagedCall, params: MosaicGpuParams) -> int:
    """Return the shared memory of the decode kernel; that of prefill does not depend on the parameters."""
    if call.value_dim is not None:
        return latent_plan.shared_bytes(call)
    sizes = tile_sizes(call.q[0], call.table[0], call.q[1], call.pages[2])
    return launch_plan(call, params, sizes.short).shared_bytes


def _most_in_flight(plan: LaunchPlan) -> int:
    """Return the bytes of all stages beyond which decode is slower, or no faster."""
    # 64 sequences of 4,096 on one H200, pages of 16, with 2, 3, 4 and 6 stages: int8 144.6, 140.1, 145.1, 151.9 us;
    # bfloat16 with 2, 3 and 4: 244.9, 247.4, 250.2 us. Pages of 64: int8 142.1, 137.0, 140.2, 144.9 us.
    if plan.is_narrow:
        return 3 * 2**14
    return 2 * 2**15 if plan.key_copies > 1 else hopper.SHARED_MEMORY


def _choices() -> list[MosaicGpuParams]:
    """Return all parameters, those with the most stages first; more than 6 gain nothing."""
    return [MosaicGpuParams(stages=stages, query_buffers=count) for stages in (6, 5, 4, 3, 2) for count in (2, 1)]
