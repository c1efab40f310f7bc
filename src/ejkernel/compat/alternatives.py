# SPDX-License-Identifier: Apache-2.0
"""A computation with a second form for Hopper GPUs, chosen when a program is lowered."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Sequence
from typing import Any

import jax
from jax._src import config
from jax.sharding import AxisType

from ejkernel.compat.partitioning import is_exporting, on_one_device
from ejkernel.compat.programs import (
    is_partitioned,
    lower_each_platform,
    lower_function,
    program_under_way,
    register_lowering,
)
from ejkernel.compat.settings import avoids_jit
from ejkernel.compat.tracing import Primitive, register_batching, trace_context, traced

_config: Any = config


alternatives_p = Primitive("ejkernel_alternatives")
alternatives_p.multiple_results = True


def on_hopper_or_plain(forms: Any, *arrays: jax.Array) -> list[jax.Array]:
    """Run the form for Hopper in programs for one such GPU, and in shards; the plain form otherwise, and under `vmap`.

    A program lowered on a machine without a GPU has the plain form. An exported program has it too, because JAX cannot
    serialize kernels of Pallas' Triton backend.

    Args:
        forms: A hashable object with two methods that take these arrays and compute equal results: `plain`, with JAX's
            own operations, and `on_hopper`, with a kernel of Pallas' Triton backend, without gradients.
        arrays: The arrays.
    """
    found: list[jax.Array] = alternatives_p.bind(*arrays, forms=forms)
    return found


def _impl(*arrays: jax.Array, forms: Any) -> Any:
    if avoids_jit():  # a jitted function would call this function forever
        return forms.plain(*arrays)
    return _jitted(forms)(*arrays)


@functools.lru_cache(maxsize=64)
def _jitted(forms: Any) -> Any:
    return jax.jit(functools.partial(on_hopper_or_plain, forms))


@functools.lru_cache(maxsize=256)
def _types(forms: Any, avals: tuple[Any, ...], _: Any) -> Sequence[Any]:
    types: Sequence[Any] = traced(forms.plain, avals).out_avals
    return types


def _abstract_eval(*avals: Any, forms: Any) -> Sequence[Any]:
    return _types(forms, avals, trace_context())


def _lower(ctx: Any, *values: Any, forms: Any) -> Any:
    platforms = tuple(ctx.module_context.platforms)
    if len(platforms) > 1:
        return lower_each_platform(ctx, functools.partial(_lower, forms=forms), *values)
    with program_under_way(ctx):
        if platforms != ("cuda",) or is_partitioned() or is_exporting(ctx) or not _is_for_hopper():
            return lower_function(ctx, forms.plain, *values)
    # The kernel's types have neither shardings nor varying axes.
    bare = [[jax.core.ShapedArray(aval.shape, aval.dtype) for aval in avals] for avals in (ctx.avals_in, ctx.avals_out)]
    mesh = jax.sharding.get_abstract_mesh()
    of_one = on_one_device() if mesh.size > 1 or AxisType.Explicit in mesh.axis_types else contextlib.nullcontext()
    with of_one, _config._check_vma(False), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        return lower_function(ctx.replace(avals_in=bare[0], avals_out=bare[1]), forms.on_hopper, *values)


def _is_for_hopper() -> bool:
    """Return whether the program under way is for a Hopper GPU, and this JAX has Pallas' Triton backend."""
    try:
        from jax.experimental.pallas import triton
    except ImportError:
        return False
    info = getattr(triton, "get_gpu_info", None)  # from JAX 0.11 on
    if info is None:
        return False
    try:
        return bool(info().compute_capability // 10 == 9)
    except ValueError:  # this machine has no GPU
        return False


def _batch(axis_data: Any, arrays: Sequence[Any], axes: Sequence[Any], *, forms: Any) -> tuple[Any, Any]:
    if all(axis is None for axis in axes):
        found = alternatives_p.bind(*arrays, forms=forms)
        return found, [None] * len(found)
    found = jax.vmap(forms.plain, tuple(axes), axis_size=axis_data.size)(*arrays)
    return found, [0] * len(found)


alternatives_p.def_abstract_eval(_abstract_eval)
alternatives_p.def_impl(_impl)
register_lowering(alternatives_p, _lower)
register_batching(alternatives_p, _batch)
