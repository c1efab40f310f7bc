# SPDX-License-Identifier: Apache-2.0
"""The parts of Pallas that differ between JAX versions."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.compat.differentiation import varying_axes

_MOSAIC_GPU_SINCE = (0, 11, 2)


def mosaic_gpu_reason() -> str | None:
    """Return why Mosaic GPU kernels cannot be built in this environment, and what to do; `None` if they can.

    Imports nothing.
    """
    if jax.__version_info__ < _MOSAIC_GPU_SINCE:
        return f"it needs JAX {'.'.join(map(str, _MOSAIC_GPU_SINCE))} or later, and this is {jax.__version__}"
    if importlib.util.find_spec("absl") is None:
        return "it needs the package absl-py, which Pallas Mosaic GPU imports: pip install absl-py"
    return None


def simulated_races() -> bool:
    """Return whether the race detector found a race in the last simulation of a Mosaic GPU kernel."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    return bool(interpret_pallas_call.get_races().races_found)


def store_as_it_is(target: Any, values: Any) -> None:
    """Store registers of a Mosaic GPU kernel with an access pattern that is not optimal.

    Examples are unswizzled shared memory with bank conflicts, and partial sectors of global memory. JAX 0.12 requires
    `optimized=False` for such stores.
    """
    from jax.experimental.pallas import mosaic_gpu

    store: Any = getattr(mosaic_gpu, "store", None)
    if store is None:  # before JAX 0.12
        target[...] = values
    else:
        store(target, values, optimized=False)


def ragged_dot_mgpu(lhs: Any, rhs: Any, group_sizes: Any, **layout: Any) -> Any:
    """Return the grouped product of JAX's Hopper kernel; rows past the last group are uninitialised."""
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu as module

    return module.ragged_dot(lhs, rhs, group_sizes=group_sizes, **layout)


def megablox_product(lhs: Any, rhs: Any, sizes: Any, *, dtype: str, interpret: bool = False, **layout: Any) -> Any:
    """Return the grouped product of JAX's TPU kernel; rows outside every group are uninitialised.

    Args:
        lhs, rhs: The operands, varying over the same axes under `shard_map`.
        sizes: int32; the number of rows before the first matrix's group, then the rows of each group.
        dtype: The dtype of the result.
        interpret: Whether to run the kernel in the interpreter.
        **layout: `tiling`, whose rows must divide the number of rows, and `transpose_rhs`.
    """
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    how = {"preferred_element_type": jnp.dtype(dtype), "interpret": interpret, **layout}
    return unchecked(lambda: gmm(lhs, rhs, sizes, group_offset=jnp.int32(1), **how), lhs)


def megablox_weights_gradient(
    lhs: Any, rhs: Any, sizes: Any, *, count: int, dtype: str, interpret: bool = False, **layout: Any
) -> Any:
    """Return the weight gradient of each group from JAX's TPU kernel; see `megablox_product`."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    how = {"preferred_element_type": jnp.dtype(dtype), "interpret": interpret, "num_actual_groups": count, **layout}
    return unchecked(lambda: tgmm(lhs.swapaxes(0, 1), rhs, sizes, group_offset=jnp.int32(1), **how), lhs)


def unchecked(compute: Callable[[], Any], like: Any) -> Any:
    """Run a kernel that does not declare the mesh axes of its results; they vary over the axes of `like`.

    64-bit mode is off during the call, because the kernels use 32-bit indices.
    """
    from jax._src import config

    axes = tuple(sorted(varying_axes(like)))
    with jax.enable_x64(False):
        if not axes:
            return compute()
        with config._check_vma(False):
            out = compute()
    return jax.lax.pcast(out, axes, to="varying")
