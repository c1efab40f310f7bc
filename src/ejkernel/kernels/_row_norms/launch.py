# SPDX-License-Identifier: Apache-2.0
"""Entry points: they reshape the operands for the kernels and launch these, under any transformation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap, sequential_vmap

from ejkernel.kernels._varying import unify_varying

from .plan import Formula, RowNormParams, RowNormPlan

_VECTORS = ("float32", "bfloat16", "float16")  # dtypes of weight and bias that kernels read
_one_by_one: Any = sequential_vmap  # it has no annotations


def normalize(
    formula: Formula, params: RowNormParams, rows: Sequence[jax.Array], vectors: Sequence[jax.Array], **options: Any
) -> tuple[jax.Array, ...]:
    """Run the forward; see `shared_memory.normalize`.

    Args:
        formula: The formula of a row.
        params: The launch parameters.
        rows: Arrays of rows, `[..., dim]`.
        vectors: Weight and bias, if the formula has them.
        **options: Passed to `shared_memory.normalize`.
    """
    count = len(rows)

    def compute(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        plan = plan_of(arrays[0], formula, params, backward=False)
        normalize = _kernels(plan).normalize
        shape = arrays[0].shape
        with jax.enable_x64(False):  # the kernels count in int32
            flat = _flat(plan, arrays[:count], arrays[count:])
            found = normalize(plan, flat, **options)
        return tuple(x.reshape(shape if x.ndim == 2 else shape[:-1]) for x in found)

    found: tuple[jax.Array, ...] = _folded(compute, count)(*unify_varying((*rows, *vectors)))
    return found


def gradients(
    formula: Formula,
    params: RowNormParams,
    rows: Sequence[jax.Array],
    stats: Sequence[jax.Array],
    vectors: Sequence[jax.Array],
    **options: Any,
) -> tuple[jax.Array, ...]:
    """Run the backward; see `shared_memory.gradients`, and `normalize`."""
    ends = len(rows), len(rows) + len(stats)

    def compute(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        plan = plan_of(arrays[0], formula, params, backward=True)
        gradients = _kernels(plan).gradients
        with jax.enable_x64(False):
            flat = _flat(plan, arrays[: ends[0]], arrays[ends[1] :])
            dx, *sums = gradients(plan, flat, [x.reshape(-1) for x in arrays[slice(*ends)]], **options)
        return dx.reshape(arrays[0].shape), *sums

    # Examples are not folded into the rows: each needs separate sums.
    found: tuple[jax.Array, ...] = _one_by_one(compute)(*unify_varying((*rows, *stats, *vectors)))
    return found


def _kernels(plan: RowNormPlan) -> Any:
    """Return the module of the kernels; imported here, because Mosaic GPU is not available in every environment."""
    from . import registers, shared_memory

    return registers if plan.is_short else shared_memory


def plan_of(x: Any, formula: Formula, params: RowNormParams, *, backward: bool) -> RowNormPlan:
    """Return the plan for the rows of an array like `x`."""
    *axes, dim = x.shape
    return RowNormPlan(
        rows=math.prod(axes), dim=dim, dtype=str(x.dtype), formula=formula, backward=backward, params=params
    )


def _flat(plan: RowNormPlan, rows: Sequence[jax.Array], vectors: Sequence[jax.Array]) -> list[jax.Array]:
    readable = [x if str(x.dtype) in _VECTORS else x.astype(jnp.float32) for x in vectors]
    return [*(x.reshape(plan.rows, plan.dim) for x in rows), *readable]


def _folded(compute: Callable[..., tuple[jax.Array, ...]], rows: int) -> Any:
    """Return `compute` with a `vmap` rule that folds examples into the rows, if all share the vectors."""
    found: Any = custom_vmap(compute)

    def rule(size: int, batched: list[bool], *arrays: jax.Array) -> Any:
        folds = not any(batched[rows:])
        count = rows if folds else len(arrays)
        mapped = [
            x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
            for x, is_batched in zip(arrays[:count], batched[:count], strict=True)
        ]
        mapped += arrays[count:]
        out = found(*mapped) if folds else lax.map(lambda one: found(*one), tuple(mapped))
        return out, (True,) * len(out)

    found.def_vmap(rule)
    return found
