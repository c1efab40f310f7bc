# SPDX-License-Identifier: Apache-2.0
"""Entry points: they reshape the operands for the kernels and launch these, under any transformation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from ejkernel.kernels._varying import all_varying, one_by_one

from .common import Formula
from .plan import RowNormParams, RowNormPlan

_VECTORS = ("float32", "bfloat16", "float16")  # dtypes of weight and bias that kernels read


def normalize(
    formula: Formula,
    params: RowNormParams,
    rows: Sequence[jax.Array],
    vectors: Sequence[jax.Array],
    *,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """Run the forward.

    Args:
        formula: The formula of a row.
        params: The launch parameters.
        rows: The rows, `[..., dim]`; the residual, if the formula has one.
        vectors: Weight and bias, if the formula has them.
        interpret: `InterpretGPUParams` to simulate the kernel on a CPU; `None` runs it on a GPU.

    Returns:
        The normalised rows; the sums of rows and residual, for a formula with one; the mean of each row, if the formula
        subtracts it; `1 / rms` or `1 / standard deviation` of each row, in float32.
    """
    count = len(rows)

    def compute(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        plan, shape = plan_of(arrays[0], formula, params, backward=False), arrays[0].shape
        stats = [jax.ShapeDtypeStruct((plan.rows,), jnp.float32)] * (1 + formula.centred)
        found = _run(plan, (arrays[:count], (), arrays[count:]), stats, interpret)
        return *(x.reshape(shape) for x in found[:count]), *(x.reshape(shape[:-1]) for x in found[count:])

    found: tuple[jax.Array, ...] = folded(compute, count)(*rows, *vectors)
    return found


def gradients(
    formula: Formula,
    params: RowNormParams,
    rows: Sequence[jax.Array],
    stats: Sequence[jax.Array],
    vectors: Sequence[jax.Array],
    *,
    interpret: Any = None,
) -> tuple[jax.Array, ...]:
    """Run the backward.

    Args:
        formula, params, interpret: As for `normalize`.
        rows: The normalised rows; the cotangent of the output; that of the sum, if there is a residual.
        stats: The forward's results for each row: the mean, if the formula subtracts it, and the scale.
        vectors: The weight, if there is one.

    Returns:
        The gradient of the rows, then the float32 gradients of weight and bias, if the formula has them.
    """

    def compute(*arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        x = arrays[0][0]
        plan = plan_of(x, formula, params, backward=True)
        sums = [jax.ShapeDtypeStruct((plan.programs, *plan.sum_shape), jnp.float32)] * plan.sums
        dx, *parts = _run(plan, arrays, sums, interpret)
        axes = tuple(range(1 + plan.is_short))
        return dx.reshape(x.shape), *(part.sum(axis=axes).reshape(plan.dim) for part in parts)

    # Examples are not folded into the rows: each needs separate sums.
    found: tuple[jax.Array, ...] = one_by_one(compute, list(rows), list(stats), list(vectors))
    return found


def _run(plan: RowNormPlan, arrays: Sequence[Sequence[jax.Array]], extra: list[Any], interpret: Any) -> list[jax.Array]:
    """Run the kernel on rows, statistics and vectors; return rows, and results of the types in `extra`."""
    # Imported here: Mosaic GPU is not available in every environment.
    from ejkernel.kernels._hopper.launch import launch

    from .registers import ShortRowKernel
    from .shared_memory import LongRowKernel

    kernel = (ShortRowKernel if plan.is_short else LongRowKernel)(plan)
    rows, stats, vectors = arrays
    shape = (plan.rows, *plan.row_shape)
    with jax.enable_x64(False):  # the kernels count in int32
        return launch(
            kernel.run,
            [
                *(x.reshape(shape) for x in rows),
                *(x.reshape(-1) for x in stats),
                *(readable(x).reshape(plan.row_shape) for x in vectors),
            ],
            [*[jax.ShapeDtypeStruct(shape, jnp.dtype(plan.dtype))] * plan.results, *extra],
            name=f"{kernel.name}_{'backward' if plan.backward else 'forward'}",
            programs=plan.programs,
            memory=kernel.memory_types(),
            lane_semantics=True,
            interpret=interpret,
        )


def readable(vector: jax.Array) -> jax.Array:
    """Return a weight or bias in a dtype that kernels read."""
    return vector if str(vector.dtype) in _VECTORS else vector.astype(jnp.float32)


def plan_of(x: Any, formula: Formula, params: RowNormParams, *, backward: bool) -> RowNormPlan:
    """Return the plan for the rows of an array like `x`."""
    *axes, dim = x.shape
    return RowNormPlan(
        rows=math.prod(axes), dim=dim, dtype=str(x.dtype), formula=formula, backward=backward, params=params
    )


def folded(compute: Callable[..., tuple[jax.Array, ...]], rows: int) -> Any:
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
    return all_varying(found)
