# SPDX-License-Identifier: Apache-2.0
"""Pallas: what of it there is in this version of JAX."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.compat.differentiation import varying_axes

_MOSAIC_GPU_SINCE = (0, 11, 2)


def mosaic_gpu_reason() -> str | None:
    """Return why kernels in Pallas Mosaic GPU cannot be built in this environment, and what to do; `None` if they can.

    Nothing is imported.
    """
    if jax.__version_info__ < _MOSAIC_GPU_SINCE:
        return f"it needs JAX {'.'.join(map(str, _MOSAIC_GPU_SINCE))} or later, and this is {jax.__version__}"
    if importlib.util.find_spec("absl") is None:
        return "it needs the package absl-py, which Pallas Mosaic GPU imports: pip install absl-py"
    return None


def simulated_races() -> bool:
    """Return whether the last simulation of a Mosaic GPU kernel, if it looked for races, found one."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    return bool(interpret_pallas_call.get_races().races_found)


def store_as_it_is(target: Any, values: Any) -> None:
    """Write what a Mosaic GPU kernel has in registers, in pieces that memory may not take at its best.

    That is to shared memory without a swizzle, where threads meet at a bank and wait, and to global memory in parts of
    sectors: JAX 0.12 wants to be told that it is meant.
    """
    from jax.experimental.pallas import mosaic_gpu

    store: Any = getattr(mosaic_gpu, "store", None)
    if store is None:  # before JAX 0.12
        target[...] = values
    else:
        store(target, values, optimized=False)


def ragged_dot_mgpu(lhs: Any, rhs: Any, group_sizes: Any, **layout: Any) -> Any:
    """Return the product of JAX's own kernel for Hopper; rows past the last group are left as they were."""
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu as module

    return module.ragged_dot(lhs, rhs, group_sizes=group_sizes, **layout)


def megablox_product(lhs: Any, rhs: Any, sizes: Any, *, dtype: str, interpret: bool = False, **layout: Any) -> Any:
    """Return the product of JAX's own kernel for TPUs; rows of no group are left as they were.

    Args:
        lhs, rhs: The operands, varying over the same axes under `shard_map`.
        sizes: In int32, how many rows come before those of the first matrix, and how many each has.
        dtype: Of the result.
        interpret: Whether it is computed in plain JAX.
        **layout: `tiling`, rows of which have to divide all, and `transpose_rhs`.
    """
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    how = {"preferred_element_type": jnp.dtype(dtype), "interpret": interpret, **layout}
    return _unchecked(lambda: gmm(lhs, rhs, sizes, group_offset=jnp.int32(1), **how), lhs)


def megablox_weights_gradient(
    lhs: Any, rhs: Any, sizes: Any, *, count: int, dtype: str, interpret: bool = False, **layout: Any
) -> Any:
    """Return the sums over each group's rows of JAX's own kernel for TPUs; see `megablox_product`."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    how = {"preferred_element_type": jnp.dtype(dtype), "interpret": interpret, "num_actual_groups": count, **layout}
    return _unchecked(lambda: tgmm(lhs.swapaxes(0, 1), rhs, sizes, group_offset=jnp.int32(1), **how), lhs)


def _unchecked(compute: Callable[[], Any], like: Any) -> Any:
    """Return what kernels compute that do not say over which axes of a mesh their results vary: over those of `like`.

    They count in 32 bits, whether or not 64 are enabled.
    """
    from jax._src import config

    axes = tuple(sorted(varying_axes(like)))
    with jax.enable_x64(False):
        if not axes:
            return compute()
        with config._check_vma(False):
            out = compute()
    return jax.lax.pcast(out, axes, to="varying")
