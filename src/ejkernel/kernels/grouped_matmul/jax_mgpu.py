# SPDX-License-Identifier: Apache-2.0
"""The product by the kernel that JAX ships for Hopper GPUs.

The weights' gradient does not use JAX's kernel, which multiplies rows of other groups by zero and so keeps their NaN.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel import compat
from ejkernel.kernels import _hopper as hopper
from ejkernel.kernels._options import check_parameters
from ejkernel.kernels._varying import one_by_one
from ejkernel.ops.implementation import Implementation
from ejkernel.ops.utils.messages.names import NamedFields
from ejkernel.ops.utils.values.signature import is_known

from .common import GroupedMatmulCall, Groups, row_spans

_BLOCK_K = 64
_MOST_GROUPS = 256  # the size of the kernel's program grows with the groups


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JaxMgpuParams(NamedFields):
    """Launch parameters of the kernel.

    Attributes:
        block_m: Rows of a tile, 64, 128 or 192.
        block_n: Columns of a tile, 64 or 128.
        stages: Number of pipeline stages.
        panel: Width of the panels of the tile scheduler, in tiles.
    """

    block_m: int = 128
    block_n: int = 128
    stages: int = 4
    panel: int = 16

    def __post_init__(self) -> None:
        check_parameters(self, block_m=(64, 128, 192), block_n=(64, 128), stages=range(1, 9), panel=range(1, 257))


class JaxMgpu(Implementation[GroupedMatmulCall]):
    """The product on Hopper GPUs by JAX's kernel."""

    name = "jax_mgpu"
    params = JaxMgpuParams
    features = frozenset({"first_group"})

    def unsupported(self, call: GroupedMatmulCall) -> str | None:
        """Return why the kernel does not support the call, with an alternative; `None` if it does."""
        if not is_known(call.rows, call.groups, call.inner, call.columns):
            return "it needs shapes that are numbers, and this program is exported for many; use 'xla'."
        missing = hopper.unavailable(call, "both operands", "'xla'", self.name)
        if missing is not None:
            return missing
        if call.dtype not in hopper.DTYPES or call.out_dtype != call.dtype:
            asked = f"{call.dtype} to {call.out_dtype}"
            return f"'jax_mgpu' takes bfloat16 or float16 and returns the same; got {asked}; cast, or use 'xla'."
        if call.inner % _BLOCK_K or call.columns % _BLOCK_K or 0 in (call.rows, call.inner, call.columns):
            return f"'jax_mgpu' takes k and n that are multiples of {_BLOCK_K}; use 'mosaic_gpu' or 'xla'."
        if not 1 <= call.groups <= _MOST_GROUPS:
            return f"'jax_mgpu' takes 1 to {_MOST_GROUPS} groups, got {call.groups}; use 'mosaic_gpu'."
        return None

    def params_fault(self, call: GroupedMatmulCall, params: JaxMgpuParams) -> str | None:
        """Return why the tiles do not fit in shared memory; `None` if they do."""
        needed = 2 * (params.stages * _BLOCK_K * (params.block_m + params.block_n) + params.block_m * params.block_n)
        if needed + _OVERHEAD > hopper.SHARED_MEMORY:
            return (
                f"it takes {needed} bytes of shared memory, more than the {hopper.SHARED_MEMORY - _OVERHEAD} available."
            )
        return None

    def heuristic(self, call: GroupedMatmulCall) -> JaxMgpuParams:
        """Return small tiles for small groups."""
        return JaxMgpuParams(block_m=64 if call.usual_rows < 128 else 128)

    def space(self, call: GroupedMatmulCall) -> list[JaxMgpuParams]:
        """Return combinations of tile sizes and pipeline stages."""
        return [
            JaxMgpuParams(block_m=block_m, block_n=block_n, stages=stages)
            for block_m, block_n, stages in itertools.product((64, 128), (64, 128), (4, 6))
        ]

    def forward(self, call: GroupedMatmulCall, /, *args: Any, params: JaxMgpuParams) -> tuple[jax.Array, Any]:
        """Return the product, without residuals."""
        layout = {
            "block_m": params.block_m,
            "block_n": params.block_n,
            "block_k": _BLOCK_K,
            "max_concurrent_steps": params.stages,
            "grid_block_n": params.panel,
        }

        def compute(lhs: jax.Array, rhs: jax.Array, groups: Groups) -> jax.Array:
            starts, ends = row_spans(groups, call.rows, call.groups)
            is_part = call.all_groups is not None
            lhs = jnp.roll(lhs, -starts[0], axis=0) if is_part else lhs  # the kernel expects its first group at row 0
            with jax.enable_x64(False):  # the kernel's indices are int32
                out = compat.kernels.ragged_dot_mgpu(
                    lhs, rhs, ends - starts, transpose_rhs=call.transpose_rhs, **layout
                )
            row = jnp.arange(call.rows, dtype=ends.dtype)[:, None]
            out = jnp.roll(out, starts[0], axis=0) if is_part else out
            return jnp.where(
                (row >= starts[0]) & (row < ends[-1]), out, jnp.zeros_like(out)
            )  # the kernel does not write them

        return one_by_one(compute, *args), ()


_OVERHEAD = 2048  # bytes of shared memory for barriers and alignment
